// Sparse attention: which chunks of keys a row attends to, and the most weight that it thereby leaves out.
// Law: a row chooses by its own queries and by pages that its step does not write to, so the choice never depends on
// the rows beside it. With every chunk chosen, the result is that of attend_all, bit for bit.

constexpr int RECENT = 3;       // the last chunks are always taken: no row asks for bounds of pages this step writes
constexpr int RUN = 4;          // consecutive chunks that a thread looks at while choosing
constexpr int MOST_CHUNKS = COMPUTE * RUN;
constexpr int MOST_CHOSEN = 64;
constexpr float BOUND_SLACK = 0.01f;  // more than rounding can take from a bound
constexpr int KEY_SCALE = 512, KEY_MOST = 65533;  // of a chunk that may be chosen; less one: it must be; more: it is not there

// Selection's own shared memory. Attention leaves it alone.
struct Selection {
  uint4 keys[MOST_CHUNKS / 8];  // of chunks, 16 bits each, one more than above: the smallest are chosen
  int chosen[MOST_CHOSEN];
  int last, edge;               // the largest key that is chosen, and the last chunk that is chosen with it
  float tops[WARPS][GROUP];
};
static_assert(sizeof(Selection) <= SELECTION_BYTES, "selection fits its memory");

DEVICE int chunks_of(const Control& c, int m) {  // partial results that row m has
  const int all = chunks_to(c.position[m]), budget = SPARSE ? c.budget[c.sequence[m]] : 0;
  return budget && budget < all ? budget : all;
}
// A row that may have left out too much says so; its step will be taken again with every chunk. By one warp.
DEVICE void raise_doubt(Worker& w, int m, int head, float taken) {
  const int s = w.control->sequence[m];
  if (SPARSE && w.lane == 0 && w.control->budget[s] && load4(w.p->omitted + m * HEADS + head) - taken > w.p->most_omitted)
    *(volatile int*)(w.p->doubt + s) = 1;
}

// log2(2**a + 2**b)
DEVICE float add_logs(float a, float b) {
  const float top = fmaxf(a, b);
  return top == -INFINITY ? top : top + log2f(exp2f(a - top) + exp2f(b - top));
}
// Halves of a word of two bf16 that are positive, or those that are not.
DEVICE u32 negative_halves(u32 word) { return (word >> 15 & 0x00010001u) * 0xffffu; }
DEVICE u32 positive_part(u32 word) { return word & ~negative_halves(word); }
DEVICE u32 negative_part(u32 word) { return word & negative_halves(word); }

// The most that a key of a page can score is a product of the query with the page's largest keys where the query is
// positive and with its smallest where it is negative: tensor cores give it for eight pages and 16 (row, head) pairs
// at once. A warp takes such a group and leaves, for each chunk, log2 of the most weight it may have.
DEVICE void bound_chunks(Worker w, int layer) {
  const Control& c = *w.control;
  const float score_scale = 1.4426950408889634f / sqrtf((float)HEAD_DIM);
  const uint4 zero = {0, 0, 0, 0};
  int index = blockIdx.x + w.warp * gridDim.x;
  for (int s = 0; s < c.sequences; ++s) {
    if (!c.budget[s]) continue;
    const int pages = c.position[c.first[s]] / PAGE;  // whole ones
    const int groups = (pages + 7) / 8, tiles = (c.count[s] * GROUP + 15) / 16, items = groups * tiles * KV_HEADS;
    for (; index < items; index += gridDim.x * WARPS) {
      Unit unit;
      unit.sequence = s;
      unit.head = index % KV_HEADS;
      unit.row = index / KV_HEADS % tiles * 16;
      unit.end = c.count[s] * GROUP;
      const int from = index / KV_HEADS / tiles * 8, page = from + w.g;
      const bool there = page < pages;
      const int* table = w.p->tables + (s64)c.table[s] * w.p->table_stride;
      const u16* at = w.p->bounds + layer * w.p->bound_layer_stride +
                      ((s64)(there ? table[page] : 0) * KV_HEADS + unit.head) * (2 * HEAD_DIM) + w.j * 8;
      uint4 high[K_STEPS], low[K_STEPS];
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step) {
        high[step] = there ? load16(at + step * 32) : zero;
        low[step] = there ? load16(at + HEAD_DIM + step * 32) : zero;
      }
      const Rows r = rows_of(w, unit);
      const u16* q0 = w.p->queries + r.m0 * QUERY_WIDTH + r.h0 * HEAD_DIM + w.j * 8;
      const u16* q1 = w.p->queries + r.m1 * QUERY_WIDTH + r.h1 * HEAD_DIM + w.j * 8;
      float most[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step) {
        const uint4 a = r.has0 ? load16(q0 + step * 32) : zero, b = r.has1 ? load16(q1 + step * 32) : zero;
        mma_attention(most, positive_part(a.x), positive_part(b.x), positive_part(a.y), positive_part(b.y), high[step].x, high[step].y);
        mma_attention(most, positive_part(a.z), positive_part(b.z), positive_part(a.w), positive_part(b.w), high[step].z, high[step].w);
        mma_attention(most, negative_part(a.x), negative_part(b.x), negative_part(a.y), negative_part(b.y), low[step].x, low[step].y);
        mma_attention(most, negative_part(a.z), negative_part(b.z), negative_part(a.w), negative_part(b.w), low[step].z, low[step].w);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        most[i] = from + w.j * 2 + (i & 1) < pages ? most[i] * score_scale + BOUND_SLACK + 6.0f : -INFINITY;  // 64 keys
      float* to0 = w.p->chunk_bounds + ((s64)r.m0 * HEADS + r.h0) * w.p->partial_stride;
      float* to1 = w.p->chunk_bounds + ((s64)r.m1 * HEADS + r.h1) * w.p->partial_stride;
      const int first = from + w.j * 2;
      if (from < NEAR_CHUNKS) {
        if (r.has0) { to0[first] = most[0]; to0[first + 1] = most[1]; }
        if (r.has1) { to1[first] = most[2]; to1[first + 1] = most[3]; }
      } else {
        float sum0 = add_logs(most[0], most[1]), sum1 = add_logs(most[2], most[3]);
        sum0 = add_logs(sum0, shuffle_xor(sum0, 1));
        sum1 = add_logs(sum1, shuffle_xor(sum1, 1));
        const int chunk = NEAR_CHUNKS + (first - NEAR_CHUNKS) / (CHUNK / PAGE);
        if (r.has0 && !(w.j & 1)) to0[chunk] = sum0;
        if (r.has1 && !(w.j & 1)) to1[chunk] = sum1;
      }
    }
    index -= items;
  }
}

// Ask for the bounds of this warp's first group before the queries are there.
DEVICE void fetch_bounds(Worker w, int layer) {
  const Control& c = *w.control;
  int index = blockIdx.x + w.warp * gridDim.x;
  for (int s = 0; s < c.sequences; ++s) {
    if (!c.budget[s]) continue;
    const int pages = c.position[c.first[s]] / PAGE;
    const int tiles = (c.count[s] * GROUP + 15) / 16, items = (pages + 7) / 8 * tiles * KV_HEADS;
    if (index < items) {
      const int page = index / KV_HEADS / tiles * 8 + w.g;
      if (page >= pages || w.j * 64 >= 2 * HEAD_DIM) return;
      const int held = w.p->tables[(s64)c.table[s] * w.p->table_stride + page];
      prefetch(w.p->bounds + layer * w.p->bound_layer_stride + ((s64)held * KV_HEADS + index % KV_HEADS) * (2 * HEAD_DIM) + w.j * 64);
      return;
    }
    index -= items;
  }
}

// Sum of what the lanes before this one hold; `all` becomes the sum of the warp.
DEVICE int sum_before(const Worker& w, int value, int& all) {
  int before = 0;
  all = value;
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {
    const int other = shuffle_xor_int(all, mask);
    if (w.lane & mask) before += other;
    all += other;
  }
  return before;
}
// By one warp: the `count` smallest of the keys, in the order of their chunks; of equal ones the first. The largest of
// them is found bit by bit.
DEVICE void choose_smallest(const Worker& w, Selection& sel, int chunks, int count) {
  constexpr int MOST = MOST_CHUNKS / 8 / 32;
  const int each = (chunks + 255) / 256;  // groups of eight keys that a lane looks at
  u32 words[MOST * 4];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const uint4 k = i < each ? sel.keys[w.lane * each + i] : make_uint4(~0u, ~0u, ~0u, ~0u);
    words[4 * i] = k.x; words[4 * i + 1] = k.y; words[4 * i + 2] = k.z; words[4 * i + 3] = k.w;
  }
  u32 last = 0;
  int less = 0;  // keys below it
#pragma unroll 1
  for (int bit = 15; bit >= 0; --bit) {
    const u32 higher = last | 1u << bit;
    int below = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (i < each)
#pragma unroll
        for (int e = 0; e < 4; ++e) below += ((words[4 * i + e] & 0xffffu) < higher) + (words[4 * i + e] >> 16 < higher);
    below = warp_sum(below);
    if (below < count) { last = higher; less = below; }
  }
  const int wanted = count - less;  // of those whose key this is
  int own = 0, all;
#pragma unroll
  for (int i = 0; i < 8 * MOST; ++i) {
    const u32 key = words[i / 2] >> i % 2 * 16 & 0xffffu;
    own += (key < last) + ((key == last) << 16);
  }
  int before = sum_before(w, own, all);
#pragma unroll
  for (int i = 0; i < 8 * MOST; ++i) {
    if (i >= 8 * each) continue;
    const u32 key = words[i / 2] >> i % 2 * 16 & 0xffffu;
    const int smaller = before & 0xffff, equal = before >> 16, chunk = w.lane * each * 8 + i;
    if (key < last || (key == last && equal < wanted)) sel.chosen[smaller + (equal < wanted ? equal : wanted)] = chunk;
    if (key == last && equal == wanted - 1) sel.edge = chunk;
    before += (key < last) + ((key == last) << 16);
  }
  if (w.lane == 0) sel.last = (int)last;
}

// Chunks of one KV head for row m, in their order, into `sel.chosen`: the first, the last, and those whose bounds stand
// out most beside the best of any query head. `accounts`: this block says what is left out.
DEVICE void choose_chunks(Worker w, Selection& sel, int m, int head, bool accounts) {
  const Control& c = *w.control;
  const int chunks = chunks_to(c.position[m]), count = chunks_of(c, m), mine = w.thread * RUN;
  float v[GROUP][RUN];
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    const float* from = w.p->chunk_bounds + ((s64)m * HEADS + head * GROUP + h) * w.p->partial_stride + mine;
    const uint4 raw = mine < chunks ? load16(from) : make_uint4(0, 0, 0, 0);
    v[h][0] = __uint_as_float(raw.x); v[h][1] = __uint_as_float(raw.y); v[h][2] = __uint_as_float(raw.z); v[h][3] = __uint_as_float(raw.w);
  }
  compute_sync();  // the previous choice is no longer read
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      if (mine + i < 1 || mine + i >= chunks - RECENT) v[h][i] = -INFINITY;
      top = fmaxf(top, v[h][i]);
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) top = fmaxf(top, shuffle_xor(top, mask));
    if (w.lane == 0) sel.tops[w.warp][h] = top;
  }
  compute_sync();
  float tops[GROUP];
  int key[RUN];
#pragma unroll
  for (int i = 0; i < RUN; ++i) key[i] = mine + i < chunks ? -1 : KEY_MOST + 1;
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    tops[h] = sel.tops[0][h];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) tops[h] = fmaxf(tops[h], sel.tops[i][h]);
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      if (mine + i < 1 || mine + i >= chunks - RECENT) continue;
      const float behind = (tops[h] - v[h][i]) * KEY_SCALE;
      const int own = behind < (float)KEY_MOST ? (int)behind : KEY_MOST;
      key[i] = h == 0 || own < key[i] ? own : key[i];
    }
  }
  *(uint2*)((u16*)sel.keys + mine) = make_uint2((u32)(key[0] + 1) | (u32)(key[1] + 1) << 16, (u32)(key[2] + 1) | (u32)(key[3] + 1) << 16);
  compute_sync();
  if (w.warp == 0) choose_smallest(w, sel, chunks, count);
  if (accounts && w.p->most_omitted < INFINITY) {
    compute_sync();
    const int last = sel.last - 1, edge = sel.edge;
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < RUN; ++i)
        if ((key[i] > last || (key[i] == last && mine + i > edge)) && key[i] <= KEY_MOST) sum += exp2f(v[h][i] - tops[h]);
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
      if (w.lane == 0) sel.tops[w.warp][h] = sum;
    }
    compute_sync();
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += sel.tops[i][h];
      if (w.thread == h) w.p->omitted[m * HEADS + head * GROUP + h] = sum > 0.0f ? tops[h] + log2f(sum) : -INFINITY;
    }
  }
  compute_sync();
}

// This block's run of the chosen chunks, row by row and head by head: calls visit(unit) for each chunk, and
// begin(m, head, first of them or not) before a group of them that has to be chosen. The last ones are known without:
// where all of a block's part of a group is such, nothing need be waited for. Elsewhere there is a page for the ring to
// bring, so the computing warps never get two choices ahead of the streaming one.
template <class Begin, class Visit>
DEVICE void walk_chosen(const Control& c, const Selection& sel, const Begin& begin, const Visit& visit) {
  int units = 0;
  for (int m = 0; m < c.rows; ++m)
    if (c.budget[c.sequence[m]]) units += chunks_of(c, m) * KV_HEADS;
  const int high = (int)((s64)(blockIdx.x + 1) * units / gridDim.x);
  int at = (int)((s64)blockIdx.x * units / gridDim.x), base = 0;
  for (int m = 0; m < c.rows && at < high; ++m) {
    const int s = c.sequence[m];
    if (!c.budget[s]) continue;
    const int count = chunks_of(c, m);
    for (int head = 0; head < KV_HEADS; ++head, base += count) {
      if (at >= high || at >= base + count) continue;
      const int known = base + count - RECENT;
      if (at < known) begin(m, head, at == base);
      Unit unit;
      unit.sequence = s;
      unit.head = head;
      unit.row = (m - c.first[s]) * GROUP;
      unit.end = unit.row + GROUP;
      unit.last = c.position[m];
      for (; at < high && at < base + count; ++at) {
        unit.slot = at - base;
        unit.chunk = at < known ? sel.chosen[unit.slot] : chunks_to(unit.last) - count + unit.slot;
        visit(unit);
      }
    }
  }
}
DEVICE Selection& selection_in(u8* scratch) { return *(Selection*)(scratch + 2 * ATTENTION_BYTES); }

DEVICE void attend_chosen(Worker& w, int layer, u64* orders) {
  Selection& sel = selection_in((u8*)w.scratch);
  walk_chosen(
      *w.control, sel,
      [&](int m, int head, bool first) {
        choose_chunks(apart(w), sel, m, head, first);
        if (w.thread == 0) barrier_arrive(orders);
      },
      [&](const Unit& unit) {
        const Share share = {find_pages(*w.p, *w.control, unit), unit, true};
        attend_unit(w, layer, share, (u8*)w.scratch, load_queries<DENSITY>(w, rows_of(w, unit)));
        compute_sync();  // the scratch is read; it is free
      });
}
// The streaming warp's part: it learns which chunks to bring when they are chosen. `phase` counts those occasions.
DEVICE void stream_chosen(Streamer& s, const Parameters& p, const Control& c, int layer, u8* scratch, u64* orders, u32& phase) {
  const int usual = s.in_flight;
  s.in_flight = p.stages * PAGE_BYTES;  // they are wanted at once
  walk_chosen(
      c, selection_in(scratch),
      [&](int, int, bool) {
        barrier_wait(orders, phase);
        phase ^= 1;
      },
      [&](const Unit& unit) { bring_pages(s, p, c, layer, unit, find_pages(p, c, unit)); });
  s.in_flight = usual;
}

// Waits for the queries.
DEVICE void attend(Worker& w, int layer) {
  if (SPARSE && w.control->sparse) fetch_bounds(apart(w), layer);
  if (tags_queries(w)) compute_sync();  // each unit waits for its own; the scratch is free
  else wait(w);
  mark(w);
  if (SPARSE && w.control->sparse) {
    bound_chunks(apart(w), layer);
    arrive(w);
  }
  attend_all(w, layer);
  if (SPARSE && w.control->sparse) {
    wait(w);
    Worker chosen = apart(w);
    attend_chosen(chosen, layer, w.orders);
    w.ring.at = chosen.ring.at;
  }
}
