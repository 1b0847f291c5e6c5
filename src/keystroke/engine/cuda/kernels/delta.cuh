// Gated delta nets: a short convolution over queries, keys and values, then a state for every value head that decays and is
// corrected by each row.
//
// Phases of such a layer, in place of those of attention:
//   1. normalise (wait), project_delta: inputs of every row into the sequence's log, gates; b and a as scores. arrive.
//   2. recur (wait): a block has 32 columns of one value head of one sequence; the log's convolution, then row by row. arrive.
//   3. gather_delta (wait): norm and gate of the heads that the block's part of the out projection reads.
//   4. project_delta_output adds to the residual stream, as the O projection does. arrive_early.
//   5. The feed-forward part follows as in other layers.
//
// A step leaves the state as it was before the step's own rows, and their inputs in the log: the next step says how many of them
// count (`replay`), applies those first and stores the state. So rejected drafts and cancelled steps change nothing. A row's
// place in the log follows from its position; the log also has the inputs that the convolution looks back to.

#if DELTA_LAYERS
DEVICE bool is_delta(int layer) { return layer_bit(layer, DELTA_LOW, DELTA_HIGH); }
DEVICE float silu(float v) { return quotient(v, 1.0f + __expf(-v)); }

// Row `position` of the log of a sequence: [DELTA_CHANNELS] inputs of the convolution, then b and a of every value head.
DEVICE float* logged(const Worker& w, int delta, int sequence, int position) {
  const s64 log = (s64)w.control->state[sequence] * DELTA_LAYERS + delta;
  return w.p->logs + (log * LOG_ROWS + position % LOG_ROWS) * LOG_WIDTH;
}
DEVICE float* log_of_row(const Worker& w, int delta, int m) { return logged(w, delta, w.control->sequence[m], w.control->position[m]); }

// b and a: this block's rows of a narrow matrix of floats, each by all warps.
DEVICE void project_delta_heads(Worker& w, int delta) {
  for_scores(w, 2 * DELTA_VALUE_HEADS, [&](int e, int m, float sum) { log_of_row(w, delta, m)[DELTA_CHANNELS + e] = sum; });
}
DEVICE void project_delta(Worker& w, int delta) {
  const Span span = w.spans[DELTA_SPAN];
  compute_sync();  // the operand is there
  show_early(w, BEFORE_ATTENTION);
  multiply<DeltaIn>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int m, float low, float high) {
    const int row = unit * 16 + g;
    float* to = row < DELTA_CHANNELS ? log_of_row(w, delta, m) + row : w.p->gates + (s64)m * GATE_WIDTH + row - DELTA_CHANNELS;
    to[0] = low;
    to[8] = high;
  });
  compute_sync();  // the scratch is free
  project_delta_heads(w, delta);
}

constexpr int DELTA_COLUMNS = 32;                                // of a unit: one for each lane
constexpr int DELTA_PARTS = DELTA_VALUE / DELTA_COLUMNS;
constexpr int DELTA_EACH = DELTA_KEY / WARPS;                    // dimensions of a key that a warp has
constexpr int DELTA_MIXED = 2 * DELTA_KEY + DELTA_COLUMNS;       // a row's query, key, and values of the unit
// Waits for the previous phase after it has asked for the first state.
DEVICE void recur(Worker& w, int delta) {
  const Control& c = *w.control;
  float* mixed = w.scratch;
  float* known = mixed + DELTA_MIXED;      // [WARPS][DELTA_COLUMNS] what the state knows of the key,
  float* read = known + WARPS * DELTA_COLUMNS;  // and what the query reads
  const int units = c.sequences * DELTA_VALUE_HEADS * DELTA_PARTS;
  bool waited = false;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int part = unit % DELTA_PARTS, head = unit / DELTA_PARTS % DELTA_VALUE_HEADS, s = unit / DELTA_PARTS / DELTA_VALUE_HEADS;
    const int key_head = DELTA_TILED ? head % DELTA_KEY_HEADS : head / (DELTA_VALUE_HEADS / DELTA_KEY_HEADS);
    const int replay = c.replay[s], first = c.first[s], start = c.position[first] - replay, rows = replay + c.count[s];
    const s64 place = ((s64)c.state[s] * DELTA_LAYERS + delta) * DELTA_VALUE_HEADS + head;
    float* stored = w.p->states + (place * DELTA_KEY + w.warp * DELTA_EACH) * DELTA_VALUE + part * DELTA_COLUMNS + w.lane;
    float state[DELTA_EACH];
#pragma unroll
    for (int i = 0; i < DELTA_EACH; ++i) state[i] = load4(stored + i * DELTA_VALUE);
    if (!waited) wait(w);
    waited = true;
    const float rate = w.p->delta_decays[delta * DELTA_VALUE_HEADS + head], bias = w.p->delta_biases[delta * DELTA_VALUE_HEADS + head];
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const int position = start + row;
      for (int i = w.thread; i < DELTA_MIXED; i += COMPUTE) {
        const int channel = i < DELTA_KEY       ? key_head * DELTA_KEY + i
                            : i < 2 * DELTA_KEY ? (DELTA_KEY_HEADS + key_head - 1) * DELTA_KEY + i
                                                : 2 * DELTA_KEY_HEADS * DELTA_KEY + head * DELTA_VALUE + part * DELTA_COLUMNS + i - 2 * DELTA_KEY;
        const float* taps = w.p->convolutions + ((s64)delta * DELTA_CHANNELS + channel) * DELTA_TAPS;
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < DELTA_TAPS; ++t) {
          const int at = position - (DELTA_TAPS - 1) + t;
          if (at >= 0) sum += taps[t] * load4(logged(w, delta, s, at) + channel);
        }
        mixed[i] = silu(sum);
      }
      compute_sync();
      float query = 0.0f, key = 0.0f;  // squares; every warp adds them up for itself
#pragma unroll
      for (int e = 0; e < DELTA_KEY / 32; ++e) {
        const float* at = mixed + e * 32 + w.lane;
        query += at[0] * at[0];
        key += at[DELTA_KEY] * at[DELTA_KEY];
      }
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) {
        query += shuffle_xor(query, mask);
        key += shuffle_xor(key, mask);
      }
      query = inverse_root(query + 1e-6f) * (1.0f / sqrtf((float)DELTA_KEY));
      key = inverse_root(key + 1e-6f);
      const float* factors = logged(w, delta, s, position) + DELTA_CHANNELS + head;
      const float step = load4(factors + DELTA_VALUE_HEADS) + bias;
      const float keep = expf(rate * (step > 20.0f ? step : log1pf(expf(step))));
      const float take = quotient(1.0f, 1.0f + __expf(-load4(factors)));
      const float* queries = mixed + w.warp * DELTA_EACH;
      const float* keys = queries + DELTA_KEY;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < DELTA_EACH; ++i) {
        state[i] *= keep;
        sum += keys[i] * key * state[i];
      }
      known[w.warp * DELTA_COLUMNS + w.lane] = sum;
      compute_sync();
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += known[i * DELTA_COLUMNS + w.lane];
      const float change = (mixed[2 * DELTA_KEY + w.lane] - sum) * take;
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < DELTA_EACH; ++i) {
        state[i] += keys[i] * key * change;
        sum += queries[i] * query * state[i];
      }
      read[w.warp * DELTA_COLUMNS + w.lane] = sum;
      compute_sync();  // also: the mixed row was read
      if (row == replay - 1) {
#pragma unroll
        for (int i = 0; i < DELTA_EACH; ++i) stored[i * DELTA_VALUE] = state[i];
      }
      if (w.warp != 0 || row < replay) continue;
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += read[i * DELTA_COLUMNS + w.lane];
      w.p->delta_results[((s64)(first + row - replay) * DELTA_VALUE_HEADS + head) * DELTA_VALUE + part * DELTA_COLUMNS + w.lane] = sum;
    }
  }
  if (!waited) wait(w);
}

// Fills the operand with the heads that this block's part of the out projection reads, normalised and gated. Waits for the previous
// phase.
DEVICE void gather_delta(Worker& w, int delta) {
  constexpr int HEADS_EACH = DELTA_VALUE_HEADS / O_SPLIT, EACH = DELTA_VALUE / 32;
  const Span span = w.spans[OUTPUT];
  const int from = span.low / (HIDDEN / 16), parts = span.low < span.high ? (span.high - 1) / (HIDDEN / 16) - from + 1 : 0;
  const float* weights = w.p->delta_norms + delta * DELTA_VALUE + w.lane * EACH;
  const int heads = parts * HEADS_EACH;
  wait(w);
  for (int at = w.warp; at < heads * w.rows; at += WARPS) {
    const int m = at / heads, head = from * HEADS_EACH + at % heads, d = head * DELTA_VALUE + w.lane * EACH;
    const float* result = w.p->delta_results + (s64)m * DELTA_VALUE_HEADS * DELTA_VALUE + d;
    const float* gates = w.p->gates + (s64)m * GATE_WIDTH + d;
    float v[EACH], sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      v[e] = load4(result + e);
      sum += v[e] * v[e];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
    const float inverse = inverse_root(sum / DELTA_VALUE + NORM_EPS);
    u16* to = w.operand + (s64)m * w.p->x_stride + d;
#pragma unroll
    for (int e = 0; e < EACH; ++e) to[e] = activation(v[e] * inverse * weights[e] * silu(load4(gates + e)));
  }
}
DEVICE void project_delta_output(Worker& w) {
  const Span span = w.spans[OUTPUT];
  compute_sync();  // the operand is there
  show_early(w, BEHIND_ATTENTION);
  const auto column = [](int unit, int) { return unit / (HIDDEN / 16) * DeltaOut::inner; };
  const auto finish = [&](int unit, int, int g, int m, float low, float high) { add_rows(w, unit, g, m, low, high); };
  if constexpr (O_ALONE && DeltaOut::together > 0 && DeltaOut::blocks <= WARPS)
    multiply_alone<DeltaOut>(w, span.low, span.high, column, finish, span.low);
  else multiply<DeltaOut>(w, span.low, span.high, column, finish);
}
#else
DEVICE bool is_delta(int) { return false; }
#endif
