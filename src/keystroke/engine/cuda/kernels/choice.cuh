// From logits to tokens: the best token, sampling, acceptance of drafts, the result for the host.
// Makes the same choices as engine/sampler.py with the noise of engine/noise.py, bit for bit.

DEVICE bool better(float value, int token, float best, int best_token) {
  return value > best || (value == best && token < best_token);
}

// Logits of every row, and this block's best token of each.
DEVICE void project_head(Worker& w) {
  const Span span = w.spans[HEAD];
  constexpr int EACH = 2;  // rows a lane sees
  float best[EACH];
  int token[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) { best[i] = -INFINITY; token[i] = 0x7fffffff; }
  compute_sync();  // the operand is there
  multiply<Head>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int i, int g, int m, float low, float high) {
    const int id = unit * 16 + g;
    float* logits = w.p->logits + (s64)m * VOCAB;
    if (id < VOCAB) {
      logits[id] = low;
      if (better(low, id, best[i], token[i])) { best[i] = low; token[i] = id; }
    }
    if (id + 8 < VOCAB) {
      logits[id + 8] = high;
      if (better(high, id + 8, best[i], token[i])) { best[i] = high; token[i] = id + 8; }
    }
  });
  compute_sync();  // the scratch is free
  float* values = w.scratch;
  int* tokens = (int*)w.scratch + WARPS * 8;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
#pragma unroll
    for (int mask = 4; mask; mask >>= 1) {
      const float other = shuffle_xor(best[i], mask);
      const int other_token = shuffle_xor_int(token[i], mask);
      if (better(other, other_token, best[i], token[i])) { best[i] = other; token[i] = other_token; }
    }
    if ((w.lane & 7) == 0) {
      values[w.warp * 8 + (w.lane >> 3) + i * 4] = best[i];
      tokens[w.warp * 8 + (w.lane >> 3) + i * 4] = token[i];
    }
  }
  compute_sync();
  if (w.thread < w.rows) {
    float top = -INFINITY;
    int top_token = 0x7fffffff;
    for (int k = w.thread / 8; k < WARPS; k += ADDERS) {  // those that add this row's sums
      const float value = values[k * 8 + w.thread % 8];
      const int at = tokens[k * 8 + w.thread % 8];
      if (better(value, at, top, top_token)) { top = value; top_token = at; }
    }
    w.p->best_value[blockIdx.x * MAX_ROWS + w.thread] = top;
    w.p->best_token[blockIdx.x * MAX_ROWS + w.thread] = top_token;
  }
}

// Removes the tokens that a row's mask does not allow, and finds this block's best of each row again. Masks are in host memory,
// which is slow: the host writes them while the layers run, and they are fetched all at once.
DEVICE_APART void leave_out_masked(Worker w) {
  const Control& c = *w.control;
  const Span span = w.spans[HEAD];
  const int low = span.low * 16, high = span.high * 16 < VOCAB ? span.high * 16 : VOCAB;
  const int first = low / 32, words = high > low ? (high - 1) / 32 - first + 1 : 0;  // of each row's mask
  if (w.thread == 0) {
    while (load_system(w.p->masks_ready) != c.ticket && !load_system(w.p->stop)) spin_for_host();
    fence_system();
  }
  u32* fetched = (u32*)w.scratch;
  const int fit = words ? SCRATCH_BYTES / 4 / words : MAX_ROWS;  // rows whose words there is room for
  for (int from = 0; from < w.rows; from += fit) {
    const int until = from + fit < w.rows ? from + fit : w.rows;
    compute_sync();  // masks are there, logits and the earlier best are written, the scratch is free
    for (int i = w.thread; i < (until - from) * words; i += COMPUTE) {
      const int m = from + i / words;
      if (c.masked >> m & 1) fetched[i] = (u32)load_system((const int*)w.p->masks + (s64)m * MASK_WORDS + first + i % words);
    }
    compute_sync();
    for (int m = from + w.warp; m < until; m += WARPS) {
      if (!(c.masked >> m & 1)) continue;
      const u32* allowed = fetched + (m - from) * words;
      float* logits = w.p->logits + (s64)m * VOCAB;
      float best = -INFINITY;
      int token = 0x7fffffff;
      for (int id = low + w.lane; id < high; id += 32) {
        if (allowed[id / 32 - first] >> (id & 31) & 1) {
          const float value = load4(logits + id);
          if (better(value, id, best, token)) { best = value; token = id; }
        } else {
          logits[id] = -INFINITY;
        }
      }
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) {
        const float other = shuffle_xor(best, mask);
        const int other_token = shuffle_xor_int(token, mask);
        if (better(other, other_token, best, token)) { best = other; token = other_token; }
      }
      if (w.lane == 0) {
        w.p->best_value[blockIdx.x * MAX_ROWS + m] = best;
        w.p->best_token[blockIdx.x * MAX_ROWS + m] = token;
      }
    }
  }
}

// The best of all blocks for row m, by one warp.
DEVICE void best_of_all(Worker& w, int m, float& best, int& token) {
  best = -INFINITY;
  token = 0x7fffffff;
  for (int i = w.lane; i < gridDim.x; i += 32) {
    const float other = load4(w.p->best_value + i * MAX_ROWS + m);
    const int other_token = __float_as_int(load4((const float*)w.p->best_token + i * MAX_ROWS + m));
    if (better(other, other_token, best, token)) { best = other; token = other_token; }
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    const float other = shuffle_xor(best, mask);
    const int other_token = shuffle_xor_int(token, mask);
    if (better(other, other_token, best, token)) { best = other; token = other_token; }
  }
}

// The noise of engine/noise.py: Philox4x32-10, counter (token / 4, position), key seed.
DEVICE u32 noise_bits(int token, u32 position, u32 key_a, u32 key_b) {
  u32 c0 = token >> 2, c1 = position, c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
    c0 = (u32)(b >> 32) ^ c1 ^ key_a;
    c2 = (u32)(a >> 32) ^ c3 ^ key_b;
    c1 = (u32)b;
    c3 = (u32)a;
    key_a += 0x9E3779B9u;
    key_b += 0xBB67AE85u;
  }
  const int word = token & 3;
  return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

// Rows with a temperature: each block scores its slice of the vocabulary with the noise of the position.
DEVICE void draw(Worker& w) {
  const Control& c = *w.control;
  const int low = (int)((s64)blockIdx.x * VOCAB / gridDim.x), high = (int)((s64)(blockIdx.x + 1) * VOCAB / gridDim.x);
  for (int m = w.warp; m < w.rows; m += WARPS) {
    const int s = c.sequence[m];
    const float inverse = c.inverse_temperature[s];
    if (inverse == 0.0f) continue;
    float top;
    int ignored;
    best_of_all(w, m, top, ignored);
    double best = -INFINITY;
    int token = 0x7fffffff;
    for (int id = low + w.lane; id < high; id += 32) {
      const float relative = (load4(w.p->logits + (s64)m * VOCAB + id) - top) * inverse;
      if (!(relative > -26.8738f) || relative < c.log_min_p[s]) continue;
      if (c.filtered && !inside(key_of(relative), id, filter_edges(w)[m])) continue;
      const u32 bits = noise_bits(id, (u32)(c.position[m] + 1), c.seed_low[s], c.seed_high[s]);
      const double uniform = ((double)bits + 0.5) * 2.3283064365386963e-10;
      const double score = (double)relative - log(-log1p(-uniform));
      if (score > best || (score == best && id < token)) { best = score; token = id; }
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      const double other = shuffle_xor_double(best, mask);
      const int other_token = shuffle_xor_int(token, mask);
      if (other > best || (other == best && other_token < token)) { best = other; token = other_token; }
    }
    if (w.lane == 0) {
      w.p->best_score[blockIdx.x * MAX_ROWS + m] = best;
      w.p->best_token[gridDim.x * MAX_ROWS + blockIdx.x * MAX_ROWS + m] = token;
    }
  }
}

// One block ends the step: tokens of all rows, accepted drafts, result for the host, rows of the next step. Waits for all logits.
DEVICE void conclude(Worker& w) {
  const Control& c = *w.control;
  const int stop = w.thread == 0 ? load_system(w.p->stop) : 0;  // host memory is far: asked for before the wait
  wait(w);
  int* chosen = (int*)w.small;  // MAX_ROWS
  int* accepted = chosen + MAX_ROWS;
  for (int m = w.warp; m < w.rows; m += WARPS) {
    float best;
    int token;
    best_of_all(w, m, best, token);
    if (!(fabsf(best) < LARGEST)) { token = -1; w.p->barrier[2] = 1; }
    if (c.inverse_temperature[c.sequence[m]] != 0.0f && token >= 0) {
      double score = -INFINITY;
      token = 0x7fffffff;
      for (int i = w.lane; i < gridDim.x; i += 32) {
        const double other = *(const volatile double*)(w.p->best_score + i * MAX_ROWS + m);
        const int other_token = *(const volatile int*)(w.p->best_token + (gridDim.x + i) * MAX_ROWS + m);
        if (other > score || (other == score && other_token < token)) { score = other; token = other_token; }
      }
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) {
        const double other = shuffle_xor_double(score, mask);
        const int other_token = shuffle_xor_int(token, mask);
        if (other > score || (other == score && other_token < token)) { score = other; token = other_token; }
      }
    }
    if (w.lane == 0) chosen[m] = token;
  }
  compute_sync();
  const int s = w.thread;
  Control* next = w.p->next;
  if (s < c.sequences) {
    const int first = c.first[s], end = first + c.count[s];
    int row = first + c.pending[s] - 1, taken = 0;
    while (row + 1 < end && chosen[row] == c.token[row + 1]) { ++row; ++taken; }
    accepted[s] = taken;
    next->token[s] = chosen[row] < 0 ? 0 : chosen[row];
    next->position[s] = c.position[row] + 1;
    next->sequence[s] = s;
    next->first[s] = s;
    next->count[s] = 1;
    next->pending[s] = 1;
    next->table[s] = c.table[s];
    next->inverse_temperature[s] = c.inverse_temperature[s];
    next->log_min_p[s] = c.log_min_p[s];
    next->seed_low[s] = c.seed_low[s];
    next->seed_high[s] = c.seed_high[s];
    next->top_k[s] = c.top_k[s];
    next->top_p[s] = c.top_p[s];
    next->budget[s] = c.budget[s];
#if DELTA_LAYERS
    const bool ahead = goes_ahead(*w.p, c);
    next->state[s] = ahead ? other_place(*w.p, c.state[s]) : c.state[s];
    next->replay[s] = ahead ? 0 : row + 1 - first;
#endif
  }
  compute_sync();
  const u32 fault = *(volatile u32*)&w.p->barrier[2];
  if (w.thread == 0) {
    bool stopped = stop != 0 || fault;
    if (SPARSE && c.sparse)  // a step in doubt is taken again: nothing may follow it
      for (int i = 0; i < c.sequences; ++i) stopped |= *(volatile int*)(w.p->doubt + i) != 0;
    next->rows = stopped ? 0 : c.sequences;
    next->sequences = c.sequences;
    next->sampled = c.sampled;
    next->filtered = c.filtered;
    next->sparse = c.sparse;
    next->masked = 0;  // what may follow is for the host to say
    next->ticket = c.ticket + 1;
  }
  int* result = w.p->result;
  if (w.thread < MAX_ROWS) {
    store_system(result + 2 + w.thread, w.thread < c.sequences ? accepted[w.thread] : 0);
    store_system(result + 2 + MAX_ROWS + w.thread, w.thread < w.rows ? chosen[w.thread] : -1);
    store_system(result + 2 + 2 * MAX_ROWS + w.thread, *(volatile int*)(w.p->doubt + w.thread));
  }
  if (w.thread == 0) store_system(result + 1, (int)fault);
  compute_sync();
  if (w.thread < MAX_ROWS) w.p->doubt[w.thread] = 0;
  if (w.thread == 0) {
    fence_system();  // of what all threads wrote, since they have met
    store_system(result, c.ticket);
    w.p->barrier[2] = 0;
  }
}
