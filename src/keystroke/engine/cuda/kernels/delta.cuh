// Gated delta nets: a short convolution over queries, keys and values, then a state for every value head that decays and is
// corrected by each row.
//
// Phases of such a layer, in place of those of attention:
//   1. normalise (wait), project_delta: inputs of every row into the sequence's log, gates; b and a as scores. arrive.
//   2. recur (wait): a block has DELTA_COLUMNS columns of one value head of one sequence; the log's convolution, then row by row. arrive.
//   3. gather_delta (wait): norm and gate of the heads that the block's part of the out projection reads.
//   4. project_delta_output adds to the residual stream, as the O projection does. arrive_early.
//   5. The feed-forward part follows as in other layers.
// A single row passes what 1 and 2 compute with a tag (DELTA_TAGS): nothing is announced behind them, but that the residual stream
// was read, and 4 announces its sums before it computes them.
//
// A step leaves the state as it was before the step's own rows, and their inputs in the log: the next step says how many of them
// count (`replay`), applies those first and stores the state. So rejected drafts and cancelled steps change nothing. A row's
// place in the log follows from its position; the log also has the inputs that the convolution looks back to.
//
// A step of one row in all also stores the state behind it, in the sequence's second place if it has one: the next step then goes on
// from there and applies nothing again. Control's `state` says in which place the state is; logs have one place.

#if DELTA_LAYERS
DEVICE bool is_delta(int layer) { return layer_bit(layer, DELTA_LOW, DELTA_HIGH); }
DEVICE float silu(float v) { return quotient(v, 1.0f + __expf(-v)); }
DEVICE u32 delta_tag(int delta) { return tag_of(delta, DELTA_LAYERS); }

// The sequence that a state belongs to; whether a step stores the state behind it too, and where.
DEVICE int slot_of(const Parameters& p, int state) { return state < p.state_slots ? state : state - p.state_slots; }
DEVICE bool goes_ahead(const Parameters& p, const Control& c) { return c.rows == 1 && slot_of(p, c.state[0]) < p.second_states; }
DEVICE int other_place(const Parameters& p, int state) { return state < p.state_slots ? state + p.state_slots : state - p.state_slots; }

// Row `position` of the log of a sequence: [DELTA_CHANNELS] inputs of the convolution, then b and a of every value head.
DEVICE float* logged(const Worker& w, int delta, int sequence, int position) {
  const s64 log = (s64)slot_of(*w.p, w.control->state[sequence]) * DELTA_LAYERS + delta;
  return w.p->logs + (log * LOG_ROWS + position % LOG_ROWS) * LOG_WIDTH;
}

// Row `row` of what row m gives, where b and a are rows behind those of the matrix: without the bits of a tag, so that a single row's
// numbers are those of others.
DEVICE void put_delta(Worker& w, int delta, int m, int row, float v) {
  if (DELTA_TAGS) w.p->delta_sent[row] = raw_bits(v, delta_tag(delta));
  const float kept = tagged(v, 0);
  if (row >= DELTA_CHANNELS && row < DELTA_IN_ROWS) {
    if (!DELTA_TAGS) w.p->gates[(s64)m * GATE_WIDTH + row - DELTA_CHANNELS] = kept;
  } else {
    logged(w, delta, w.control->sequence[m], w.control->position[m])[row < DELTA_CHANNELS ? row : row - DELTA_VALUES] = kept;
  }
}
// The same for a single row, by a warp of its own while the others multiply: sums of eight parts of the columns, added in their order.
DEVICE void project_delta_aside(Worker& w, int delta) {
  constexpr int QUADS = HIDDEN / 4, PART = (QUADS + WARPS - 1) / WARPS, EACH = (PART + 31) / 32;
  const int lane = w.thread % 32;
  const uint2* x = (const uint2*)w.operand;
  for (int e = blockIdx.x; e < 2 * DELTA_VALUE_HEADS; e += gridDim.x) {
    const float4* weights = (const float4*)(w.p->delta_heads + ((s64)delta * 2 * DELTA_VALUE_HEADS + e) * HIDDEN);
    float sums[WARPS];
#pragma unroll
    for (int part = 0; part < WARPS; ++part) {
      sums[part] = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const int at = part * PART + i * 32 + lane;
        if (i * 32 + lane < PART && at < QUADS) sums[part] = add_quad(sums[part], weights[at], x[at]);
      }
    }
#pragma unroll
    for (int part = 0; part < WARPS; ++part)
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) sums[part] += shuffle_xor(sums[part], mask);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) sum += sums[part];
    if (lane == 0) put_delta(w, delta, 0, DELTA_IN_ROWS + e, sum * (1.0f / ACTIVATION_SCALE));
  }
}
DEVICE void prefetch_delta_heads(Worker& w, int delta) {
  constexpr int LINES = HIDDEN / 32;
  for (int i = w.thread % 32; i < LINES && blockIdx.x < 2 * DELTA_VALUE_HEADS; i += 32)
    prefetch(w.p->delta_heads + ((s64)delta * 2 * DELTA_VALUE_HEADS + blockIdx.x) * HIDDEN + i * 32);
}
DEVICE void project_delta(Worker& w, int delta) {
  const Span span = w.spans[DELTA_SPAN];
  compute_sync();  // the operand is there
  show_early(w, BEFORE_ATTENTION);
  multiply<DeltaIn>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int m, float low, float high) {
    put_delta(w, delta, m, unit * 16 + g, low);
    put_delta(w, delta, m, unit * 16 + g + 8, high);
  });
  if (DELTA_ASIDE) return;
  compute_sync();  // the scratch is free
  // b and a: this block's rows of a narrow matrix of floats, each by all warps.
  const Span rows = w.spans[DELTA_ROWS];
  for_scores(w, 2 * DELTA_VALUE_HEADS, Every{rows.low, rows.high}, [&](int e, int m, float sum) { put_delta(w, delta, m, DELTA_IN_ROWS + e, sum); });
}

constexpr int DELTA_LANE_COLUMNS = DELTA_COLUMNS / 32;           // of a unit, of each lane
constexpr int DELTA_PARTS = DELTA_VALUE / DELTA_COLUMNS;
constexpr int DELTA_EACH = DELTA_KEY / WARPS;                    // dimensions of a key that a warp has
constexpr int DELTA_MIXED = 2 * DELTA_KEY + DELTA_COLUMNS;       // a row's query, key, and values of the unit
constexpr int DELTA_TURNS = (DELTA_MIXED + COMPUTE - 1) / COMPUTE;
// Waits for the previous phase after it has asked for the first state.
DEVICE void recur(Worker& w, int delta) {
  const Parameters& p = *w.p;
  const Control& c = *w.control;
  const u32 tag = delta_tag(delta);
  float* mixed = w.scratch;
  float* known = mixed + DELTA_MIXED;           // [WARPS][DELTA_COLUMNS] what the state knows of the key,
  float* read = known + WARPS * DELTA_COLUMNS;  // and what the query reads
  const int units = c.sequences * DELTA_VALUE_HEADS * DELTA_PARTS;
  bool waited = false;
  if (DELTA_TAGS) compute_sync();  // the scratch is free
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int part = unit % DELTA_PARTS, head = unit / DELTA_PARTS % DELTA_VALUE_HEADS, s = unit / DELTA_PARTS / DELTA_VALUE_HEADS;
    const int key_head = DELTA_TILED ? head % DELTA_KEY_HEADS : head / (DELTA_VALUE_HEADS / DELTA_KEY_HEADS);
    const int replay = c.replay[s], first = c.first[s], start = c.position[first] - replay, rows = replay + c.count[s];
    const auto place = [&](int state) {
      const s64 at = ((s64)state * DELTA_LAYERS + delta) * DELTA_VALUE_HEADS + head;
      return p.states + (at * DELTA_KEY + w.warp * DELTA_EACH) * DELTA_VALUE + part * DELTA_COLUMNS + w.lane;
    };
    float* stored = place(c.state[s]);
    float state[DELTA_EACH][DELTA_LANE_COLUMNS];
#pragma unroll
    for (int i = 0; i < DELTA_EACH; ++i)
#pragma unroll
      for (int l = 0; l < DELTA_LANE_COLUMNS; ++l) state[i][l] = load4(stored + i * DELTA_VALUE + l * 32);
    const auto store_state = [&](float* to) {
#pragma unroll
      for (int i = 0; i < DELTA_EACH; ++i)
#pragma unroll
        for (int l = 0; l < DELTA_LANE_COLUMNS; ++l) to[i * DELTA_VALUE + l * 32] = state[i][l];
    };
    int channels[DELTA_TURNS];
    float taps[DELTA_TURNS][DELTA_TAPS];
#pragma unroll
    for (int turn = 0; turn < DELTA_TURNS; ++turn) {
      const int i = turn * COMPUTE + w.thread;
      channels[turn] = i < DELTA_KEY       ? key_head * DELTA_KEY + i
                       : i < 2 * DELTA_KEY ? (DELTA_KEY_HEADS + key_head - 1) * DELTA_KEY + i
                                           : 2 * DELTA_KEY_HEADS * DELTA_KEY + head * DELTA_VALUE + part * DELTA_COLUMNS + i - 2 * DELTA_KEY;
#pragma unroll
      for (int t = 0; t < DELTA_TAPS; ++t)
        taps[turn][t] = within(w, turn, DELTA_MIXED) ? p.convolutions[((s64)delta * DELTA_CHANNELS + channels[turn]) * DELTA_TAPS + t] : 0.0f;
    }
    const float rate = p.delta_decays[delta * DELTA_VALUE_HEADS + head], bias = p.delta_biases[delta * DELTA_VALUE_HEADS + head];
    if (!DELTA_TAGS && !waited) wait(w);
    waited = true;
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const int position = start + row;
      const bool sent = DELTA_TAGS && row >= replay;  // by other blocks in this step
      const u32* log = (const u32*)logged(w, delta, s, position);
      const u32* inputs = sent ? p.delta_sent : log;
      const u32* factors = (sent ? p.delta_sent + DELTA_IN_ROWS : log + DELTA_CHANNELS) + head;  // b, then a
      float before[DELTA_TURNS][DELTA_TAPS - 1];  // asked for first, used last: no load waits for another
#pragma unroll
      for (int turn = 0; turn < DELTA_TURNS; ++turn)
#pragma unroll
        for (int t = 0; t < DELTA_TAPS - 1; ++t) {
          const int at = position - (DELTA_TAPS - 1) + t;
          before[turn][t] = at >= 0 && within(w, turn, DELTA_MIXED) ? load4(logged(w, delta, s, at) + channels[turn]) : 0.0f;
        }
      u32 raw[DELTA_TURNS + 2];
      while (true) {
#pragma unroll
        for (int turn = 0; turn < DELTA_TURNS; ++turn)
          raw[turn] = within(w, turn, DELTA_MIXED) ? relaxed_load(inputs + channels[turn]) : tag;
        raw[DELTA_TURNS] = relaxed_load(factors);
        raw[DELTA_TURNS + 1] = relaxed_load(factors + DELTA_VALUE_HEADS);
        if (!sent || !off_tags(raw, tag)) break;
        spin();
      }
      if (row == 0 && unit == blockIdx.x) mark(w);
#pragma unroll
      for (int turn = 0; turn < DELTA_TURNS; ++turn)
        if (within(w, turn, DELTA_MIXED)) {
          float sum = 0.0f;
#pragma unroll
          for (int t = 0; t < DELTA_TAPS - 1; ++t) sum = fmaf(taps[turn][t], before[turn][t], sum);
          mixed[turn * COMPUTE + w.thread] = silu(fmaf(taps[turn][DELTA_TAPS - 1], untagged(raw[turn]), sum));
        }
      const float take = quotient(1.0f, 1.0f + __expf(-untagged(raw[DELTA_TURNS])));
      const float step = untagged(raw[DELTA_TURNS + 1]) + bias;
      const float keep = expf(rate * (step > 20.0f ? step : log1pf(expf(step))));
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
      const float* queries = mixed + w.warp * DELTA_EACH;
      const float* keys = queries + DELTA_KEY;
#pragma unroll
      for (int l = 0; l < DELTA_LANE_COLUMNS; ++l) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < DELTA_EACH; ++i) {
          state[i][l] *= keep;
          sum += keys[i] * key * state[i][l];
        }
        known[w.warp * DELTA_COLUMNS + l * 32 + w.lane] = sum;
      }
      compute_sync();
#pragma unroll
      for (int l = 0; l < DELTA_LANE_COLUMNS; ++l) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += known[i * DELTA_COLUMNS + l * 32 + w.lane];
        const float change = (mixed[2 * DELTA_KEY + l * 32 + w.lane] - sum) * take;
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < DELTA_EACH; ++i) {
          state[i][l] += keys[i] * key * change;
          sum += queries[i] * query * state[i][l];
        }
        read[w.warp * DELTA_COLUMNS + l * 32 + w.lane] = sum;
      }
      compute_sync();  // also: the mixed row was read
      if (row == replay - 1) store_state(stored);
      if (row < replay) continue;
      if (w.warp < DELTA_LANE_COLUMNS) {
        const int column = w.warp * 32 + w.lane;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += read[i * DELTA_COLUMNS + column];
        const s64 to = (s64)(first + row - replay) * DELTA_VALUE_HEADS + head;
        p.delta_results[to * DELTA_VALUE + part * DELTA_COLUMNS + column] = tagged(sum, DELTA_TAGS ? tag : 0);
      }
      if (goes_ahead(p, c)) store_state(place(other_place(p, c.state[s])));
    }
  }
  if (waited) return;
  if (!DELTA_TAGS) wait(w);
  mark(w);
}

// Fills the operand with the heads that this block's part of the out projection reads, normalised and gated. Waits for the previous
// phase.
DEVICE void gather_delta(Worker& w, int delta) {
  constexpr int HEADS_EACH = DELTA_VALUE_HEADS / O_SPLIT, EACH = DELTA_VALUE / 32;
  const Span span = w.spans[OUTPUT];
  const int from = span.low / (HIDDEN / 16), parts = span.low < span.high ? (span.high - 1) / (HIDDEN / 16) - from + 1 : 0;
  const float* weights = w.p->delta_norms + delta * DELTA_VALUE + w.lane * EACH;
  const int heads = parts * HEADS_EACH;
  const u32 tag = delta_tag(delta), seen = DELTA_TAGS ? ask_readers(w) : 0;
  if (DELTA_ASIDE) wait_early_scores(w, BEFORE_ATTENTION);
  if (DELTA_TAGS) compute_sync();  // the operand is no longer needed
  else wait(w);
  for (int at = w.warp; at < heads * w.rows; at += WARPS) {
    const int m = at / heads, head = from * HEADS_EACH + at % heads, d = head * DELTA_VALUE + w.lane * EACH;
    const float* result = w.p->delta_results + (s64)m * DELTA_VALUES + d;
    const void* gate = DELTA_TAGS ? (const void*)(w.p->delta_sent + DELTA_CHANNELS + d) : w.p->gates + (s64)m * GATE_WIDTH + d;
    u32 results[EACH], gates[EACH];
    while (true) {
      ask(gate, gates);
      ask(result, results);
      if (!DELTA_TAGS || !(off_tags(gates, tag) | off_tags(results, tag))) break;
      spin();
    }
    float v[EACH], sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      v[e] = untagged(results[e]);
      sum += v[e] * v[e];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
    const float inverse = inverse_root(sum / DELTA_VALUE + NORM_EPS);
    u16* to = w.operand + (s64)m * w.p->x_stride + d;
#pragma unroll
    for (int e = 0; e < EACH; ++e) to[e] = activation(v[e] * inverse * weights[e] * silu(untagged(gates[e])));
  }
  if (DELTA_TAGS) check_readers(w, seen);
}
DEVICE void project_delta_output(Worker& w) {
  const Span span = w.spans[OUTPUT];
  compute_sync();  // the operand is there
  show_early(w, BEHIND_ATTENTION);
  if (DELTA_TAGS) arrive_early(w);
  const auto column = [](int unit, int) { return unit / (HIDDEN / 16) * DeltaOut::inner; };
  const auto finish = [&](int unit, int, int g, int m, float low, float high) { add_rows(w, unit, g, m, low, high); };
  if constexpr (O_ALONE && DeltaOut::together > 0 && DeltaOut::blocks <= WARPS)
    multiply_alone<DeltaOut>(w, span.low, span.high, column, finish, span.low);
  else multiply<DeltaOut>(w, span.low, span.high, column, finish);
}
#else
DEVICE bool is_delta(int) { return false; }
#endif
