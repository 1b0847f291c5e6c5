// Combines the partial attention results of a row's chunks into the row that the O projection reads, by one tree of sums that does
// not depend on which threads compute it.

// Partial results of a row's chunks are added in three stages of fixed shape, so that any number of threads can share the work:
// first the chunks c of each group c % 32 (with up to 32 chunks a group is one chunk); then groups 0 ... 15 and 16 ... 31; then
// those two.
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
DEVICE void take_values(Partial& p, const uint4& raw) {
  p.x = untagged(raw.x); p.y = untagged(raw.y); p.z = untagged(raw.z); p.u = untagged(raw.w);
}
// By one warp, lane = group: the factors of each group's sums. A sink is a score without a value.
DEVICE float sink_of(const Worker& w, int layer, int head) { return SINKS ? w.p->sinks[layer * HEADS + head] : -INFINITY; }
DEVICE float group_weight(float top, float total, float sink, float& whole) {
  float best = top;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) best = fmaxf(best, shuffle_xor(best, mask));
  if (SINKS) best = fmaxf(best, sink);
  const float weight = power_of_two(top - best);
  float sum = weight * total;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  if (SINKS) sum += power_of_two(sink - best);
  whole = best + log2f(sum);
  return weight == 0.0f ? 0.0f : weight / sum;  // a division of nothing takes the long way
}
// Factors of two dimensions of a head.
DEVICE float2 gate_of(const Worker& w, int m, int head, int d) {
  return GATED ? load8((const float2*)(w.p->gates + (s64)m * GATE_WIDTH + head * HEAD_DIM + d)) : make_float2(1.0f, 1.0f);
}
DEVICE uint2 packed_sum(const Partial& first, const Partial& second, const float2& low, const float2& high) {
  return make_uint2(pack_activation((first.x + second.x) * low.x, (first.y + second.y) * low.y),
                    pack_activation((first.z + second.z) * high.x, (first.u + second.u) * high.y));
}
// The destination of a result, two numbers at a time from dimension d on: the operand, or other blocks, above the layer's tag if
// there is one.
struct Sent { u16* plain; u32* tagged; };
DEVICE void leave(const Worker&, u16* to, int d, u32 pair) { *(u32*)(to + d) = pair; }
DEVICE void leave(const Worker& w, const Sent& to, int d, u32 pair) {
  if (const u32 tag = sent_tag(w)) *(uint2*)(to.tagged + d) = make_uint2(pair << 16 | tag, (pair & 0xffff0000u) | tag);
  else *(u32*)(to.plain + d) = pair;
}
DEVICE Sent sent_at(const Worker& w, int m, int head) {
  const int at = m * QUERY_WIDTH + head * HEAD_DIM;
  return Sent{w.p->attended + at, w.p->attended_tagged + at};
}
DEVICE Partial other_half(const Partial& p) {  // of the thread eight lanes away
  Partial o;
  o.x = shuffle_xor(p.x, 8); o.y = shuffle_xor(p.y, 8); o.z = shuffle_xor(p.z, 8); o.u = shuffle_xor(p.u, 8);
  return o;
}

DEVICE void wait_for_partials(Worker& w) {
  if (w.tag) wait_early(w);
  else wait(w);
}
// Rows of at most 32 chunks: `pairs` of a row and a head. place(i, m, head) sets pair i and returns the destination of its result. A
// warp computes 16 DIMS dimensions of a pair at a time and derives the weights of its chunks itself. Waits for the previous phase
// after computing addresses, which takes as long as the loads.
template <int DIMS, class Pairs>
DEVICE void combine_near(Worker& w, int layer, int pairs, const Pairs& place) {
  constexpr int PARTS = HEAD_DIM / (16 * DIMS);
  float* weights = w.scratch + w.warp * GROUPS;
  // A thread adds 16 chunks of DIMS dimensions; its partner, eight lanes away, the other 16.
  const int half = w.lane >> 3 & 1, mine = (w.lane & 7) + (w.lane >> 4) * 8;
  bool waited = false;
  for (int at = w.warp; at < pairs * PARTS; at += WARPS) {
    const int d = (at % PARTS * 16 + mine) * DIMS;
    int m, head;
    const auto to = place(at / PARTS, m, head);
    const int chunks = chunks_of(*w.control, m), others = chunks - half * 16;
    const s64 base = ((s64)m * HEADS + head) * w.p->partial_stride;
    const float2* norms = w.p->partial_norm + base + w.lane;
    const float sink = sink_of(w, layer, head);
    const float* from = w.p->partial + (base + half * 16) * HEAD_DIM + d;
    if (!GUARDED && !waited) wait_for_partials(w);
    const float* gates = w.p->gates + (s64)m * GATE_WIDTH + head * HEAD_DIM + d;
    u32 gate[DIMS];
    if (GATED) ask(gates, gate);
    uint2 norm = make_uint2(w.tag, w.tag);
    const auto lacks = [&] { return (((norm.x ^ w.tag) | (norm.y ^ w.tag)) & 3) != 0; };
    if (w.lane < chunks) norm = poll8(norms);
    u32 raw[16][DIMS];
#pragma unroll
    for (int c = 0; c < 16; ++c)
#pragma unroll
      for (int e = 0; e < DIMS; ++e) raw[c][e] = w.tag;
    const auto off = [&] {
      u32 off = 0;
#pragma unroll
      for (int c = 0; c < 16; ++c) off |= off_tags(raw[c], w.tag);
      return off;
    };
    if constexpr (GUARDED) {  // the values of each chunk are asked for when its norm is there
      const u32 live = 0xffffffffu >> (32 - chunks);
#pragma unroll 1
      for (u32 asked = 0;;) {
        const u32 there = ballot(!lacks()), now = (there & live & ~asked) >> half * 16;
#pragma unroll
        for (int c = 0; c < 16; ++c)
          if (now >> c & 1) ask(from + c * HEAD_DIM, raw[c]);
        asked = there;
        if (asked == 0xffffffffu) {
          if (!ballot(off() != 0)) break;
          asked = 0;  // rare: a norm came before its values
        }
        spin();
        if (lacks()) norm = poll8(norms);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 16; ++c)
        if (c < others) ask(from + c * HEAD_DIM, raw[c]);
      while (lacks()) {  // while those are on their way
        spin();
        norm = poll8(norms);
      }
    }
    float whole;
    const float weight = group_weight(w.lane < chunks ? untagged(norm.x) : -INFINITY, w.lane < chunks ? untagged(norm.y) : 0.0f, sink, whole);
    warp_sync();  // the last ones were read
    weights[w.lane] = weight;
    warp_sync();
    if (SPARSE && at % PARTS == 0) raise_doubt(w, m, head, whole);
    while (!GUARDED && off()) {  // one look at all of them: sixteen branches take longer than the sums
      spin();
#pragma unroll
      for (int c = 0; c < 16; ++c)
        if (off_tags(raw[c], w.tag)) ask(from + c * HEAD_DIM, raw[c]);
    }
    waited = true;
    float sum[DIMS];
#pragma unroll
    for (int e = 0; e < DIMS; ++e) sum[e] = 0.0f;
#pragma unroll
    for (int c = 0; c < 16; ++c)
#pragma unroll
      for (int e = 0; e < DIMS; ++e) sum[e] += weights[half * 16 + c] * untagged(raw[c][e]);
#pragma unroll
    for (int e = 0; e < DIMS; ++e) sum[e] += shuffle_xor(sum[e], 8);
    while (GATED && TAGS && off_tags(gate, w.tag)) {
      spin();
      ask(gates, gate);
    }
    const auto result = [&](int e) { return GATED ? sum[e] * untagged(gate[e]) : sum[e]; };
    if (half == 0)
#pragma unroll
      for (int e = 0; e < DIMS; e += 2) leave(w, to, d + e, pack_activation(result(e), result(e + 1)));
  }
  if (!GUARDED && !waited) wait_for_partials(w);
}
// 32 dimensions of one head of one row by a whole block, for more chunks than tags cover: a barrier has ensured that they are
// written, so a thread loads eight chunks at a time.
DEVICE void combine_together(Worker& w, int layer, int m, int head, int d) {
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
        take_values(parts[i], load16(w.p->partial + (base + c) * HEAD_DIM + d + quad * 4));
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
    weights[w.lane] = group_weight(all[w.lane * 8].top, all[w.lane * 8].total, sink_of(w, layer, head), whole);
    if (d == 0) raise_doubt(w, m, head, whole);
    warp_sync();
    const int half = w.lane >> 3 & 1;
    sum = nothing_yet();
    for (int i = 0; i < 16; ++i) add_scaled(sum, all[(half * 16 + i) * 8 + quad], weights[half * 16 + i]);
    const Partial other = other_half(sum);
    const int at = d + quad * 4;
    const Sent to = sent_at(w, m, head);
    const uint2 v = packed_sum(sum, other, gate_of(w, m, head, at), gate_of(w, m, head, at + 2));
    if (w.lane >= 8) return;
    leave(w, to, at, v.x);
    leave(w, to, at + 2, v.y);
  }
}

// Parts of the attended rows, from `first` on, into the operand once their tags show that they have arrived: without a barrier, and
// each thread waits for its first four numbers before it loads more.
DEVICE void take_attended(Worker& w, int first, int parts) {
  constexpr int QUADS = Output::inner / 4, ALL = (COLUMNS * QUADS + COMPUTE - 1) / COMPUTE, TURNS = ALL < 8 ? ALL : 8;
#pragma unroll 1
  for (int part = first; part < first + parts; ++part)
#pragma unroll 1
    for (int base = w.thread; base < w.rows * QUADS; base += TURNS * COMPUTE) {
      const auto column = [&](int at) { return part * Output::inner + at % QUADS * 4; };
      const auto ask = [&](int at) { return poll16(w.p->attended_tagged + at / QUADS * QUERY_WIDTH + column(at)); };
      uint4 v[TURNS];
      v[0] = ask(base);
      while (missing(v[0], sent_tag(w))) {
        spin();
        v[0] = ask(base);
      }
#pragma unroll
      for (int i = 1; i < TURNS; ++i)
        if (base + i * COMPUTE < w.rows * QUADS) v[i] = ask(base + i * COMPUTE);
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        const int at = base + i * COMPUTE;
        if (at >= w.rows * QUADS) continue;
        while (missing(v[i], sent_tag(w))) {
          spin();
          v[i] = ask(at);
        }
        *(uint2*)(w.operand + at / QUADS * w.p->x_stride + column(at)) = upper_halves(v[i]);
      }
    }
}

// Fills the operand with the part of the attended rows that this block reads. Waits for the previous phase.
DEVICE void gather(Worker& w, int layer) {
  const Span span = w.spans[OUTPUT];
  constexpr int EACH = HEADS / O_SPLIT;  // heads in one part of the inner dimension
  ASSUME(span.low >= 0 && span.high >= 0);
  const int from = span.low / (HIDDEN / 16), parts = span.low < span.high ? (span.high - 1) / (HIDDEN / 16) - from + 1 : 0;
  if (w.fused) {
    constexpr int DIMS = EACH * HEAD_DIM > COMPUTE ? 4 : 2;  // so that few heads keep all warps busy
    const int heads = parts * EACH;
    const u32 seen = GUARDED ? ask_readers(w) : 0;
    if (GUARDED) compute_sync();  // neither the operand nor the scratch is needed any more
    combine_near<DIMS>(w, layer, heads * w.rows, [&](int i, int& m, int& head) {
      m = SINGLE ? 0 : i / heads;
      head = from * EACH + i - m * heads;
      return w.operand + m * w.p->x_stride + head * HEAD_DIM;
    });
    if (GUARDED) check_readers(w, seen);
    return;
  }
  if (w.few) {
    const int pairs = w.rows * HEADS, blocks = gridDim.x;
    const int low = blockIdx.x * pairs / blocks, high = (blockIdx.x + 1) * pairs / blocks;
    combine_near<4>(w, layer, high - low, [&](int i, int& m, int& head) {
      m = (low + i) / HEADS;
      head = (low + i) % HEADS;
      return sent_at(w, m, head);
    });
  } else {
    constexpr int PIECES = QUERY_WIDTH / 32;
    wait_for_partials(w);
    for (int i = blockIdx.x; i < w.rows * PIECES; i += gridDim.x)
      combine_together(w, layer, i / PIECES, i % PIECES / (HEAD_DIM / 32), i % PIECES % (HEAD_DIM / 32) * 32);
  }
  if (sent_tag(w)) {
    refresh(w);
    take_attended(w, from, parts);
    return;
  }
  arrive(w);
  wait(w);
  const int at = from * EACH * HEAD_DIM;
  if (parts) load_rows(w, w.p->attended + at, QUERY_WIDTH, at, parts * EACH * HEAD_DIM, [](int) {});
}
