// The single layer of a draft head: features become a stream; the stream and a token give the layer's result.
// One function per phase, between two barriers of all blocks; draft.cu calls them in order.

DEVICE float2 pair_of(const float* from) { return load8((const float2*)from); }

// A row of HIDDEN numbers, normalised and weighted, into the operand. load(i) gives numbers i and i + 1.
template <class Load>
DEVICE void put_normed(Worker& w, const float* weight, int turn, u16* to, const Load& load) {
  float2 v[NORM_PAIRS];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    v[i] = within(w, i, HIDDEN / 2) ? load((i * COMPUTE + w.thread) * 2) : make_float2(0, 0);
    sum += v[i].x * v[i].x + v[i].y * v[i].y;
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  float* parts = w.small + (turn & 1) * WARPS;
  if (w.lane == 0) parts[w.warp] = sum;
  compute_sync();
  sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += parts[i];
  const float inverse = inverse_root(sum / HIDDEN + NORM_EPS);
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    const int at = i * COMPUTE + w.thread;
    if (!within(w, i, HIDDEN / 2)) continue;
    const float2 by = ((const float2*)weight)[at];
    ((u32*)to)[at] = pack_activation(v[i].x * inverse * by.x, v[i].y * inverse * by.y);
  }
}
// `count` 16-bit numbers that other blocks wrote, into the operand.
DEVICE void put_plain(Worker& w, const u16* from, u16* to, int count) {
  for (int i = w.thread * 8; i < count; i += COMPUTE * 8) *(uint4*)(to + i) = load16(from + i);
}

DEVICE void meet(Worker& w) {
  arrive(w);
  wait(w);
}

// Fuses the features of `rows` rows, from row `first` on, into one stream each.
DEVICE void fuse(Worker& w, const DraftParameters& p, int first) {
  const Span span = w.spans[FUSE];
  if (span.low < span.high)
    for (int m = 0; m < w.rows; ++m)
      put_plain(w, p.base.features + (s64)(first + m) * FEATURES * HIDDEN, w.operand + m * p.base.x_stride, FEATURES * HIDDEN);
  compute_sync();
  multiply<Fuse>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int m, float low, float high) {
    float* to = p.stream + m * HIDDEN + unit * 16 + g;
    to[0] = low;
    to[8] = high;
  });
}

// Queries, keys and values of the tokens from `position` on, each with the stream of the token before it. Row m's stream begins at
// stream + m HIDDEN; only the last row's queries are used. A token's slot is its own position, its angle that of the token before.
template <class Token>
DEVICE void project_pairs(Worker& w, const DraftParameters& p, const float* stream, int position, const Token& token) {
  const Span span = w.spans[JOINED];
  if (span.low < span.high)
    for (int m = 0; m < w.rows; ++m) {
      const u16* embedded = p.base.embedding + (s64)token(m) * HIDDEN;
      u16* to = w.operand + m * p.base.x_stride;
      put_normed(w, p.norms + OF_TOKEN * HIDDEN, 0, to, [&](int i) {
        const u32 two = *(const u32*)(embedded + i);
        return make_float2(bf16_value((u16)two), bf16_value((u16)(two >> 16)));
      });
      put_normed(w, p.norms + OF_STREAM * HIDDEN, 1, to + HIDDEN, [&](int i) { return pair_of(stream + m * HIDDEN + i); });
    }
  compute_sync();
  const int* table = p.base.tables + (s64)w.control->table[0] * p.base.table_stride;
  multiply<Joined>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int m, float low, float high) {
    const int head = unit / (HEAD_DIM / 16), tile = unit % (HEAD_DIM / 16), at = position + m;
    const s64 row = ((s64)table[at / PAGE] * KV_HEADS * PAGE + at % PAGE) * HEAD_DIM;  // of the first head
    if (head >= HEADS + KV_HEADS) {
      u16* to = p.values + row + (s64)(head - HEADS - KV_HEADS) * PAGE * HEAD_DIM + tile * 16 + g;
      to[0] = bf16(low);
      to[8] = bf16(high);
      return;
    }
    const int d = tile * 8 + g;
    const float2 v = rotate(make_float2(low, high), p.base.rope[(s64)(at - 1) * (HEAD_DIM / 2) + d]);
    if (head >= HEADS) {
      u16* to = p.keys + row + (s64)(head - HEADS) * PAGE * HEAD_DIM + d;
      to[0] = bf16(v.x);
      to[HEAD_DIM / 2] = bf16(v.y);
    } else if (m == w.rows - 1) {
      p.queries[head * HEAD_DIM + d] = v.x;
      p.queries[head * HEAD_DIM + d + HEAD_DIM / 2] = v.y;
    }
  });
}

// Pages that the token at `position` attends to.
struct Past { int first, pages; };
DEVICE Past past_of(int position) {
  Past past;
  const int last = position / PAGE;
  past.first = last < WINDOW_PAGES ? 0 : last - WINDOW_PAGES + 1;
  past.pages = last - past.first + 1;
  return past;
}

// The queries against one page of one KV head at a time, a block's share of them.
DEVICE void attend_pages(Worker& w, const DraftParameters& p, int position) {
  constexpr int QUARTER = HEAD_DIM / 4, PADDED = QUARTER + 4;  // of a key; so that quarters lie in different banks
  constexpr int PAIRS = HEAD_DIM / 2, SLICES = COMPUTE / PAIRS, EACH = PAGE / SLICES;
  constexpr float SCALE = 1.4426950408889634f;  // and the root of HEAD_DIM: scores are powers of two
  float* queries = w.scratch;                       // [GROUP][4][PADDED]
  float* scores = queries + GROUP * 4 * PADDED;     // [GROUP][PAGE]
  float2* sums = (float2*)(scores + GROUP * PAGE);  // [SLICES][GROUP][PAIRS]
  const Past past = past_of(position);
  const int* table = p.base.tables + (s64)w.control->table[0] * p.base.table_stride;
  const float scale = SCALE * inverse_root((float)HEAD_DIM);
  for (int unit = blockIdx.x; unit < past.pages * KV_HEADS; unit += gridDim.x) {
    const int page = past.first + unit / KV_HEADS, head = unit % KV_HEADS;
    const s64 at = ((s64)table[page] * KV_HEADS + head) * PAGE * HEAD_DIM;
    const int from = page == 0 ? 1 : 0;  // nothing stands before the first token
    const int until = position - page * PAGE + 1 < PAGE ? position - page * PAGE + 1 : PAGE;
    compute_sync();  // the scratch is free
    for (int i = w.thread; i < GROUP * HEAD_DIM; i += COMPUTE) {
      const int q = i / HEAD_DIM, d = i % HEAD_DIM;
      queries[(q * 4 + d / QUARTER) * PADDED + d % QUARTER] = load4(p.queries + (head * GROUP + q) * HEAD_DIM + d) * scale;
    }
    compute_sync();
    {
      const int key = w.warp * 8 + w.g;  // four lanes each
      const u16* numbers = p.keys + at + key * HEAD_DIM + w.j * QUARTER;
      float dot[GROUP];
#pragma unroll
      for (int q = 0; q < GROUP; ++q) dot[q] = 0;
#pragma unroll
      for (int i = 0; i < QUARTER; i += 8) {
        const uint4 raw = load16(numbers + i);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float low = bf16_value((u16)words[e]), high = bf16_value((u16)(words[e] >> 16));
#pragma unroll
          for (int q = 0; q < GROUP; ++q) {
            const float2 by = *(const float2*)(queries + (q * 4 + w.j) * PADDED + i + e * 2);
            dot[q] += low * by.x + high * by.y;
          }
        }
      }
#pragma unroll
      for (int q = 0; q < GROUP; ++q) {
        dot[q] += shuffle_xor(dot[q], 1);
        dot[q] += shuffle_xor(dot[q], 2);
        if (w.j == 0) scores[q * PAGE + key] = key >= from && key < until ? dot[q] : -INFINITY;
      }
    }
    compute_sync();
    for (int q = w.warp; q < GROUP; q += WARPS) {
      float best = -INFINITY, total = 0;
      for (int i = w.lane; i < PAGE; i += 32) best = fmaxf(best, scores[q * PAGE + i]);
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) best = fmaxf(best, shuffle_xor(best, mask));
      for (int i = w.lane; i < PAGE; i += 32) {
        const float weight = best > -INFINITY ? power_of_two(scores[q * PAGE + i] - best) : 0.0f;
        scores[q * PAGE + i] = weight;
        total += weight;
      }
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) total += shuffle_xor(total, mask);
      if (w.lane == 0) p.partial_norm[(page - past.first) * HEADS + head * GROUP + q] = make_float2(best, total);
    }
    compute_sync();
    const int pair = w.thread % PAIRS, slice = w.thread / PAIRS;
    float2 mixed[GROUP];
#pragma unroll
    for (int q = 0; q < GROUP; ++q) mixed[q] = make_float2(0, 0);
#pragma unroll 8
    for (int i = 0; i < EACH; ++i) {
      const int key = slice * EACH + i;
      const u32 two = (u32)__float_as_int(load4((const float*)(p.values + at + key * HEAD_DIM + pair * 2)));
      const bool live = key >= from && key < until;  // what was never written may be no number
      const float low = live ? bf16_value((u16)two) : 0.0f, high = live ? bf16_value((u16)(two >> 16)) : 0.0f;
#pragma unroll
      for (int q = 0; q < GROUP; ++q) {
        const float weight = scores[q * PAGE + key];
        mixed[q].x += weight * low;
        mixed[q].y += weight * high;
      }
    }
#pragma unroll
    for (int q = 0; q < GROUP; ++q) sums[(slice * GROUP + q) * PAIRS + pair] = mixed[q];
    compute_sync();
    for (int i = w.thread; i < GROUP * PAIRS; i += COMPUTE) {
      float2 sum = make_float2(0, 0);
#pragma unroll
      for (int s = 0; s < SLICES; ++s) {
        const float2 part = sums[s * GROUP * PAIRS + i];
        sum.x += part.x;
        sum.y += part.y;
      }
      const int to = (page - past.first) * QUERY_WIDTH + head * GROUP * HEAD_DIM + i * 2;
      *(u32*)(p.partial + to) = pack_bf16(sum.x, sum.y);
    }
  }
}

// Combines the results of all pages into the operand; then the O projection onto the stream.
DEVICE void project_attended(Worker& w, const DraftParameters& p, const float* stream, int position) {
  const Span span = w.spans[OUTPUT];
  if (span.low < span.high) {
    const int pages = past_of(position).pages;
    float* weights = w.scratch;  // [HEADS][WINDOW_PAGES]
    for (int head = w.warp; head < HEADS; head += WARPS) {
      float2 norm = make_float2(-INFINITY, 0);
      if (w.lane < pages) norm = load8(p.partial_norm + w.lane * HEADS + head);
      float best = norm.x;
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) best = fmaxf(best, shuffle_xor(best, mask));
      const float weight = norm.y > 0 ? power_of_two(norm.x - best) : 0.0f;
      float total = weight * norm.y;
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) total += shuffle_xor(total, mask);
      weights[head * WINDOW_PAGES + w.lane] = total > 0 ? weight / total : 0.0f;
    }
    compute_sync();
    for (int d = w.thread * 2; d < QUERY_WIDTH; d += COMPUTE * 2) {
      const float* by = weights + d / HEAD_DIM * WINDOW_PAGES;
      float2 sum = make_float2(0, 0);
#pragma unroll 8
      for (int page = 0; page < pages; ++page) {
        const u32 two = (u32)__float_as_int(load4((const float*)(p.partial + page * QUERY_WIDTH + d)));
        sum.x += by[page] * bf16_value((u16)two);
        sum.y += by[page] * bf16_value((u16)(two >> 16));
      }
      *(u32*)(w.operand + d) = pack_activation(sum.x, sum.y);
    }
  }
  compute_sync();
  multiply<Output>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int, float low, float high) {
    const int row = unit * 16 + g;
    p.middle[row] = load4(stream + row) + low;
    p.middle[row + 8] = load4(stream + row + 8) + high;
  });
}

DEVICE void activate(Worker& w, const DraftParameters& p) {
  const Span span = w.spans[GATE_UP];
  if (span.low < span.high) put_normed(w, p.norms + OF_MLP * HIDDEN, 0, w.operand, [&](int i) { return pair_of(p.middle + i); });
  compute_sync();
  multiply<GateUp>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int, float low, float high) {
    p.activated[unit * 8 + g] = activation(quotient(low, 1.0f + __expf(-low)) * high);
  });
}

DEVICE void project_result(Worker& w, const DraftParameters& p) {
  const Span span = w.spans[DOWN];
  if (span.low < span.high) put_plain(w, p.activated, w.operand, INTERMEDIATE);
  compute_sync();
  multiply<Down>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int, float low, float high) {
    const int row = unit * 16 + g;
    p.result[row] = load4(p.middle + row) + low;
    p.result[row + 8] = load4(p.middle + row + 8) + high;
  });
}
