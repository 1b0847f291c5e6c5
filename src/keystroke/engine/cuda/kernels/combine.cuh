// Partial attention results of a row's chunks become the row that the O projection reads.
// Law: one tree of sums, whoever walks it.

// Partial results of a row's chunks meet in three stages of fixed shape, so that any number of threads may share the
// work: chunk c belongs to group c % 32 and a group's chunks are added first (up to 32 chunks a group is one chunk);
// then groups 0 ... 15 and 16 ... 31; then those two.
constexpr int GROUPS = 32;
struct Partial { float top, total, x, y, z, u; };
DEVICE Partial nothing_yet() {
  Partial p;
  p.top = -INFINITY;
  p.total = p.x = p.y = p.z = p.u = 0.0f;
  return p;
}
DEVICE void add_scaled(Partial& sum, const Partial& part, float scale) {
  sum.x += scale * part.x;
  sum.y += scale * part.y;
  sum.z += scale * part.z;
  sum.u += scale * part.u;
}
DEVICE void take_values(Partial& p, const float* from) {
  const uint4 raw = load16(from);
  p.x = __uint_as_float(raw.x); p.y = __uint_as_float(raw.y); p.z = __uint_as_float(raw.z); p.u = __uint_as_float(raw.w);
}
// By one warp, lane = group: what each group's sums are multiplied by at the end.
DEVICE float group_weight(float top, float total, float& whole) {
  float best = top;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) best = fmaxf(best, shuffle_xor(best, mask));
  const float weight = power_of_two(top - best);
  float sum = weight * total;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  whole = best + log2f(sum);
  return weight / sum;
}
DEVICE uint2 packed_sum(const Partial& first, const Partial& second) {
  return make_uint2(pack_activation(first.x + second.x, first.y + second.y), pack_activation(first.z + second.z, first.u + second.u));
}
DEVICE Partial other_half(const Partial& p) {  // of the thread eight lanes away
  Partial o;
  o.x = shuffle_xor(p.x, 8); o.y = shuffle_xor(p.y, 8); o.z = shuffle_xor(p.z, 8); o.u = shuffle_xor(p.u, 8);
  return o;
}

// Rows of at most 32 chunks, by every block for itself, and only the heads that its share of O reads.
DEVICE void combine_alone(Worker& w, int first_head, int heads) {
  float* weights = w.scratch;  // [row, head][GROUPS]
  for (int at = w.warp; at < w.rows * heads; at += WARPS) {
    const int m = at / heads, head = first_head + at % heads;
    const s64 base = ((s64)m * HEADS + head) * w.p->partial_stride;
    float2 norm = make_float2(-INFINITY, 0.0f);
    if (w.lane < chunks_of(*w.control, m)) norm = load8(w.p->partial_norm + base + w.lane);
    float whole;
    weights[at * GROUPS + w.lane] = group_weight(norm.x, norm.y, whole);
    raise_doubt(w, m, head, whole);
  }
  compute_sync();
  // A thread adds 16 chunks of four dimensions; its partner, eight lanes away, the other 16.
  constexpr int QUADS = HEAD_DIM / 4;
  const int half = w.lane >> 3 & 1, items = w.rows * heads * QUADS;
  const int lane_item = (w.lane & 7) + (w.lane >> 4) * 8 + w.warp * 16;  // 0 ... 127
  for (int base_item = 0; base_item < items; base_item += COMPUTE / 2) {
    const int item = base_item + lane_item;
    const bool real = item < items;
    const int at = real ? item / QUADS : 0, d = item % QUADS * 4;
    const int m = at / heads, head = first_head + at % heads;
    const int chunks = chunks_of(*w.control, m);
    const float* parts = w.p->partial + (((s64)m * HEADS + head) * w.p->partial_stride + half * 16) * HEAD_DIM + d;
    Partial part[16], sum = nothing_yet();
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      part[c] = nothing_yet();
      if (half * 16 + c < chunks) take_values(part[c], parts + c * HEAD_DIM);
    }
#pragma unroll
    for (int c = 0; c < 16; ++c) add_scaled(sum, part[c], weights[at * GROUPS + half * 16 + c]);
    const Partial other = other_half(sum);
    if (real && half == 0) *(uint2*)(w.operand + m * w.p->x_stride + head * HEAD_DIM + d) = packed_sum(sum, other);
  }
}
// 32 dimensions of one head of one row by a whole block.
DEVICE void combine_together(Worker& w, int m, int head, int d) {
  const int chunks = chunks_of(*w.control, m);
  const s64 base = ((s64)m * HEADS + head) * w.p->partial_stride;
  const float2* norms = w.p->partial_norm + base;
  const int quad = w.thread & 7, group = w.thread >> 3;
  Partial sum = nothing_yet();
  for (int from = group; from < chunks; from += GROUPS * 8) {
    Partial parts[8];
    float top = sum.top;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int c = from + i * GROUPS;
      parts[i] = nothing_yet();
      if (c < chunks) {
        const float2 n = load8(norms + c);
        parts[i].top = n.x;
        parts[i].total = n.y;
        take_values(parts[i], w.p->partial + (base + c) * HEAD_DIM + d + quad * 4);
      }
      top = fmaxf(top, parts[i].top);
    }
    if (top > -INFINITY) {
      Partial grown = nothing_yet();
      grown.top = top;
      float scale = power_of_two(sum.top - top);
      grown.total += scale * sum.total;
      add_scaled(grown, sum, scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scale = power_of_two(parts[i].top - top);
        grown.total += scale * parts[i].total;
        add_scaled(grown, parts[i], scale);
      }
      sum = grown;
    }
  }
  Partial* all = (Partial*)w.scratch;
  float* weights = (float*)(all + GROUPS * 8);
  compute_sync();  // the scratch is free
  all[group * 8 + quad] = sum;
  compute_sync();
  if (w.warp == 0) {
    float whole;
    weights[w.lane] = group_weight(all[w.lane * 8].top, all[w.lane * 8].total, whole);
    if (d == 0) raise_doubt(w, m, head, whole);
    warp_sync();
    const int half = w.lane >> 3 & 1;
    sum = nothing_yet();
    for (int i = 0; i < 16; ++i) add_scaled(sum, all[(half * 16 + i) * 8 + quad], weights[half * 16 + i]);
    const Partial other = other_half(sum);
    if (w.lane < 8) *(uint2*)(w.p->attended + (s64)m * QUERY_WIDTH + head * HEAD_DIM + d + quad * 4) = packed_sum(sum, other);
  }
}

// After this the operand holds the attended rows, as far as this block reads them. Waits for the previous phase.
DEVICE void gather(Worker& w) {
  const Control& c = *w.control;
  const Span span = w.spans[OUTPUT];
  int most = 0;
  for (int m = 0; m < w.rows; ++m) most = chunks_of(c, m) > most ? chunks_of(c, m) : most;
  wait(w);
  if (most <= GROUPS && w.rows <= w.p->fused_rows) {
    if (span.low < span.high) {
      constexpr int EACH = HEADS / O_SPLIT;  // heads in one part of the inner dimension
      const int from = span.low / (HIDDEN / 16), to = (span.high - 1) / (HIDDEN / 16);
      combine_alone(w, from * EACH, (to - from + 1) * EACH);
    }
  } else {
    constexpr int EACH = QUERY_WIDTH / 32;
    for (int i = blockIdx.x; i < w.rows * EACH; i += gridDim.x)
      combine_together(w, i / EACH, i % EACH / (HEAD_DIM / 32), i % EACH % (HEAD_DIM / 32) * 32);
    arrive(w);
    wait(w);
    load_rows<QUERY_WIDTH>(w, w.p->attended, QUERY_WIDTH);
  }
  compute_sync();
}
