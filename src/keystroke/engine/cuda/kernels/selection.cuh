// Sparse attention: which chunks of keys a row attends to, and an upper bound of the weight that it omits. A row's choice depends
// only on its own queries and on pages that its step does not write to, never on other rows. With every chunk chosen, the result
// equals that of attend_all bit for bit.

constexpr int LOOK = 2 * COMPUTE;     // chunks that all threads look at together while choosing, two each
constexpr int MOST_CHUNKS = 2 * LOOK;
constexpr int MOST_CHOSEN = 64;
constexpr float BOUND_SLACK = 0.01f;  // more than rounding can take from a bound
constexpr int KEY_SCALE = 512, KEY_MOST = 65533;  // of a chunk that may be chosen; less one: it must be; more: it is not there

// Shared memory of the selection; attention does not use it.
struct Selection {
  uint4 keys[MOST_CHUNKS / 8];  // of chunks, 16 bits each, one more than above: the smallest are chosen
  int chosen[MOST_CHOSEN];
  int last, edge;               // the largest key that is chosen, and the last chunk that is chosen with it
  int tops[GROUP][WARPS];       // largest bounds, as ordered() has them
  float sums[GROUP][WARPS];     // of weight that may be left out
};
static_assert(sizeof(Selection) <= SELECTION_BYTES, "selection fits its memory");

// Marks a row that may have omitted too much; its step is repeated with every chunk. Done by one warp.
DEVICE void raise_doubt(Worker& w, int m, int head, float taken) {
  const int s = w.control->sequence[m];
  if (SPARSE && w.lane == 0 && w.control->budget[s] && load4(w.p->omitted + m * HEADS + head) - taken > w.p->most_omitted)
    *(volatile int*)(w.p->doubt + s) = 1;
}

// log2 of the sum of 2**a and 2**b, and of those of the adjacent lane.
DEVICE float add_logs(float a, float b) {
  float top = fmaxf(a, b);
  top = fmaxf(top, shuffle_xor(top, 1));
  if (top == -INFINITY) top = 0.0f;
  float sum = power_of_two(a - top) + power_of_two(b - top);
  sum += shuffle_xor(sum, 1);
  return top + log2f(sum);
}

// A warp's part of the bounds: eight whole pages for 16 (row, head) pairs of one KV head.
struct Piece {
  Unit unit;
  int from, pages;  // the first page; and all of the sequence
};
DEVICE bool find_piece(const Control& c, int index, Piece& piece) {
#pragma unroll 1
  for (int s = 0; s < c.sequences; ++s) {
    if (!c.budget[s]) continue;
    const int pages = c.position[c.first[s]] / PAGE;
    const int tiles = (c.count[s] * GROUP + 15) / 16, pieces = (pages + 7) / 8 * tiles * KV_HEADS;
    if (index < pieces) {
      piece.unit.sequence = s;
      piece.unit.head = index % KV_HEADS;
      piece.unit.row = index / KV_HEADS % tiles * 16;
      piece.unit.end = c.count[s] * GROUP;
      piece.from = index / KV_HEADS / tiles * 8;
      piece.pages = pages;
      return true;
    }
    index -= pieces;
  }
  return false;
}
DEVICE int count_pieces(const Control& c) {
  int pieces = 0;
#pragma unroll 1
  for (int s = 0; s < c.sequences; ++s)
    if (c.budget[s]) pieces += (c.position[c.first[s]] / PAGE + 7) / 8 * ((c.count[s] * GROUP + 15) / 16) * KV_HEADS;
  return pieces;
}
// Copies its bounds into this warp's part of the first reserved stage; past the end the last page is repeated.
constexpr int BOUNDS_WIDTH = 2 * HEAD_DIM, BOUNDS_BYTES = 8 * BOUNDS_WIDTH * 2;
constexpr int BOUNDING = STAGE / BOUNDS_BYTES < WARPS ? STAGE / BOUNDS_BYTES : WARPS;  // warps that take part
DEVICE u16* bounds_at(const Worker& w) { return (u16*)(w.ring.stages + w.ring.at.stage * STAGE + w.warp * BOUNDS_BYTES); }
DEVICE void ask_bounds(const Worker& w, int layer, const Piece& piece) {
  warp_sync();
  if (w.lane == 0) expect_copies(own_barrier(w), BOUNDS_BYTES);
  warp_sync();
  if (BULK && w.lane >= 8) return;
  const int place = BULK ? w.lane : w.lane / 4;
  const int page = piece.from + place < piece.pages ? piece.from + place : piece.pages - 1;
  const int held = w.p->tables[(s64)w.control->table[piece.unit.sequence] * w.p->table_stride + page];
  copy_kept<4>(bounds_at(w) + place * BOUNDS_WIDTH,
               w.p->bounds + layer * w.p->bound_layer_stride + ((s64)held * KV_HEADS + piece.unit.head) * BOUNDS_WIDTH,
               BOUNDS_WIDTH * 2, own_barrier(w));
  end_copies(own_barrier(w));
}
// A key's score is at most the product of the query with the page's largest keys where the query is positive and with its smallest
// where it is negative: tensor cores compute that for eight pages and 16 (row, head) pairs at once. A warp stores, for each chunk
// of its part, log2 of the largest possible weight.
DEVICE void bound_chunks(Worker& w, const Piece& piece, u32 tag) {
  const Rows rows = rows_of(w, piece.unit);
  const float score_scale = 1.4426950408889634f / sqrtf((float)HEAD_DIM);
  const uint4 zero = {0, 0, 0, 0};
  const u16* q0 = w.p->queries + rows.m0 * QUERY_WIDTH + rows.h0 * HEAD_DIM + w.j * 8;
  const u16* q1 = w.p->queries + rows.m1 * QUERY_WIDTH + rows.h1 * HEAD_DIM + w.j * 8;
  uint4 a[K_STEPS], b[K_STEPS];
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    a[step] = rows.has0 ? load16(q0 + step * 32) : zero;
    b[step] = rows.has1 ? load16(q1 + step * 32) : zero;
  }
  await_own(w);
  const u16* at = bounds_at(w) + w.g * BOUNDS_WIDTH + w.j * 8;
  float most[4] = {0.0f, 0.0f, 0.0f, 0.0f}, more[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // two sums, so that one need not wait for the other
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    const uint4 high = *(const uint4*)(at + step * 32), low = *(const uint4*)(at + HEAD_DIM + step * 32);
    const uint4 &x = a[step], &y = b[step];
    const u32 p[4] = {positive_halves(x.x), positive_halves(x.y), positive_halves(x.z), positive_halves(x.w)};
    const u32 o[4] = {positive_halves(y.x), positive_halves(y.y), positive_halves(y.z), positive_halves(y.w)};
    mma_attention(most, p[0], o[0], p[1], o[1], high.x, high.y);
    mma_attention(more, x.x ^ p[0], y.x ^ o[0], x.y ^ p[1], y.y ^ o[1], low.x, low.y);
    mma_attention(most, p[2], o[2], p[3], o[3], high.z, high.w);
    mma_attention(more, x.z ^ p[2], y.z ^ o[2], x.w ^ p[3], y.w ^ o[3], low.z, low.w);
  }
  fence_reads();
  const int first = piece.from + w.j * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    most[i] = first + (i & 1) < piece.pages ? (most[i] + more[i]) * score_scale + BOUND_SLACK + 6.0f : -INFINITY;  // 64 keys
  float* to0 = w.p->chunk_bounds + ((s64)rows.m0 * HEADS + rows.h0) * w.p->partial_stride;
  float* to1 = w.p->chunk_bounds + ((s64)rows.m1 * HEADS + rows.h1) * w.p->partial_stride;
  if (piece.from < NEAR_CHUNKS) {
    if (rows.has0) *(float2*)(to0 + first) = make_float2(tagged(most[0], tag), tagged(most[1], tag));
    if (rows.has1) *(float2*)(to1 + first) = make_float2(tagged(most[2], tag), tagged(most[3], tag));
  } else {
    const float sum0 = add_logs(most[0], most[1]), sum1 = add_logs(most[2], most[3]);
    const int chunk = NEAR_CHUNKS + (first - NEAR_CHUNKS) / (CHUNK / PAGE);
    if (rows.has0 && !(w.j & 1)) to0[chunk] = tagged(sum0, tag);
    if (rows.has1 && !(w.j & 1)) to1[chunk] = tagged(sum1, tag);
  }
}

// Sum of the values of the lanes before this one; `all` becomes the sum of the warp.
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
// By one warp: the `count` smallest keys, in the order of their chunks; among equal keys the first. Finds an upper edge bit by bit,
// until exactly as many keys are below it, or all bits are known and only some of the equal keys are needed.
template <int EACH>  // groups of eight keys that a lane looks at
DEVICE void choose_smallest(const Worker& w, Selection& sel, int chunks, int count) {
  int keys[EACH * 8];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const uint4 k = sel.keys[w.lane * EACH + i];
    const u32 words[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      keys[8 * i + 2 * e] = words[e] & 0xffff;
      keys[8 * i + 2 * e + 1] = words[e] >> 16;
    }
  }
  int least = keys[0];
#pragma unroll
  for (int i = 1; i < EACH * 8; ++i) least = keys[i] < least ? keys[i] : least;
  // Each lane has a key that is no larger than this: if no more are needed, the edge is not beyond it.
  int edge = 0, less = 0, bit = count <= 32 ? highest_bit(warp_max(least) | 1) : 15;
#pragma unroll 1
  for (; bit >= 0 && less < count; --bit) {
    const int higher = edge + (1 << bit);
    int part[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < EACH * 8; ++i) part[i & 3] += (keys[i] - higher) >> 31;
    const int below = -warp_sum(part[0] + part[1] + part[2] + part[3]);
    if (below <= count) { edge = higher; less = below; }
  }
  // All below the edge are chosen; of those at the edge, the first.
  u32 below = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < EACH * 8; ++i) below |= (u32)((keys[i] - edge) >> 31) & 1u << i;
  if (less < count) {
#pragma unroll
    for (int i = 0; i < EACH * 8; ++i) equal |= (u32)(keys[i] == edge) << i;
  }
  int all;
  const int before = sum_before(w, count_bits(below) | count_bits(equal) << 16, all);
  int at = before & 0xffff, left = count - less - (before >> 16);
  at += count - less - (left > 0 ? left : 0);
#pragma unroll 1
  while (below | equal) {
    const int i = lowest_bit(below | equal), chunk = w.lane * EACH * 8 + i;
    if (below >> i & 1) sel.chosen[at++] = chunk;
    else if (left-- > 0) {
      sel.chosen[at++] = chunk;
      if (left == 0) sel.edge = chunk;
    }
    below &= ~(1u << i);
    equal &= ~(1u << i);
  }
  if (w.lane == 0) {
    sel.last = less == count ? edge - 1 : edge;
    if (less == count) sel.edge = chunks;
  }
}


// Copies the pages of all chunks of a sequence into attention's scratch, so that chosen ones need no lookup.
DEVICE void list_pages(const Worker& w, int sequence, int chunks) {
  static_assert(MOST_CHUNKS * 16 <= 2 * ATTENTION_BYTES, "attention's scratch holds them");
  uint4* all = (uint4*)w.scratch;
  for (int i = w.thread; i < chunks; i += LOOK) {
    const int j = i + COMPUTE;
    const uint4 first = pages_of(*w.p, *w.control, sequence, i);
    const uint4 second = pages_of(*w.p, *w.control, sequence, j < chunks ? j : i);
    all[i] = first;
    if (j < chunks) all[j] = second;
  }
}

// A thread's two chunks of a KV head of row m: their bounds for each query head, loaded until all have this layer's tag (`tag`; 0 if a
// barrier has ensured that). Chunks that are always attended to have none.
struct Bounds { float2 of[GROUP]; };
DEVICE Bounds take_bounds(const Worker& w, int m, int head, int first, int end, u32 tag) {
  const float* from = w.p->chunk_bounds + ((s64)m * HEADS + head * GROUP) * w.p->partial_stride + first;
  const u32 wanted0 = first >= 1 && first < end ? 3 : 0, wanted1 = first + 1 < end ? 3 : 0;
  uint2 raw[GROUP];
  u32 off;
  do {
    off = 0;
#pragma unroll
    for (int h = 0; h < GROUP; ++h) raw[h] = wanted0 | wanted1 ? poll8(from + h * w.p->partial_stride) : make_uint2(0, 0);
#pragma unroll
    for (int h = 0; h < GROUP; ++h) off |= ((raw[h].x ^ tag) & wanted0) | ((raw[h].y ^ tag) & wanted1);
    if (off) spin();
  } while (off);
  Bounds b;
#pragma unroll
  for (int h = 0; h < GROUP; ++h) b.of[h] = make_float2(wanted0 ? untagged(raw[h].x) : -INFINITY, wanted1 ? untagged(raw[h].y) : -INFINITY);
  return b;
}
// The best bound of a query head over all warps.
DEVICE float best_bound(const Selection& sel, int h) {
  int top = sel.tops[h][0];
#pragma unroll
  for (int i = 1; i < WARPS; ++i) top = sel.tops[h][i] > top ? sel.tops[h][i] : top;
  return unordered(top);
}
// Writes the chunks of the unit's KV head for row m, in order, to `sel.chosen`: the first, the last, and those with the highest
// bounds relative to the best of any query head. Then picks this unit's chunk.
template <int LOOKS>
DEVICE void choose_chunks(Worker& w, Selection& sel, Share& share, int m, u32 tag) {
  const Control& c = *w.control;
  const int chunks = chunks_to(c.position[m]), end = chunks - RECENT, mine = w.thread * 2;
  Bounds bounds[LOOKS];
#pragma unroll
  for (int look = 0; look < LOOKS; ++look)
    bounds[look] = take_bounds(w, m, share.unit.head, look * LOOK + mine, end, tag);
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    float top = fmaxf(bounds[0].of[h].x, bounds[0].of[h].y);
#pragma unroll
    for (int look = 1; look < LOOKS; ++look)
      top = fmaxf(top, fmaxf(bounds[look].of[h].x, bounds[look].of[h].y));
    const int best = warp_max(ordered(top));
    if (w.lane == 0) sel.tops[h][w.warp] = best;
  }
  compute_sync();
  float behind[LOOKS][2];
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
    const float top = best_bound(sel, h);
#pragma unroll
    for (int look = 0; look < LOOKS; ++look) {
      const float x = top - bounds[look].of[h].x, y = top - bounds[look].of[h].y;
      behind[look][0] = h == 0 ? x : fminf(behind[look][0], x);
      behind[look][1] = h == 0 ? y : fminf(behind[look][1], y);
    }
  }
  const auto key = [&](int chunk, float by) -> u32 {  // one more than how far it is behind
    if (chunk < 1 || chunk >= end) return chunk < chunks ? 0 : KEY_MOST + 2;
    return 1 + (by * KEY_SCALE < (float)KEY_MOST ? (int)(by * KEY_SCALE) : KEY_MOST);
  };
#pragma unroll
  for (int look = 0; look < LOOKS; ++look) {
    const int chunk = look * LOOK + mine;
    ((u32*)sel.keys)[look * COMPUTE + w.thread] = key(chunk, behind[look][0]) | key(chunk + 1, behind[look][1]) << 16;
  }
  compute_sync();
  if (w.warp == 0) {
    choose_smallest<LOOKS * LOOK / 256>(w, sel, chunks, chunks_of(c, m));
    warp_sync();
    if (w.lane == 0) {
      share.unit.chunk = sel.chosen[share.unit.slot];
      share.pages = ((const uint4*)w.scratch)[share.unit.chunk];
    }
  }
  compute_sync();
}
// An upper bound of the weight of the omitted chunks.
DEVICE void account(Worker& w, Selection& sel, int m, int head, u32 tag) {
  const int chunks = chunks_to(w.control->position[m]), mine = w.thread * 2, last = sel.last, edge = sel.edge;
  const auto left_out = [&](int chunk, int key) { return (key > last || (key == last && chunk > edge)) && key <= KEY_MOST + 1; };
  float sums[GROUP];
#pragma unroll
  for (int h = 0; h < GROUP; ++h) sums[h] = 0.0f;
#pragma unroll 1
  for (int look = 0; look * LOOK < chunks; ++look) {
    const int chunk = look * LOOK + mine;
    const Bounds bounds = take_bounds(w, m, head, chunk, chunks - RECENT, tag);
    const u32 keys = ((const u32*)sel.keys)[look * COMPUTE + w.thread];
    const bool first = left_out(chunk, keys & 0xffff), second = left_out(chunk + 1, keys >> 16);
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
      const float top = best_bound(sel, h);
      if (first) sums[h] += exp2f(bounds.of[h].x - top);
      if (second) sums[h] += exp2f(bounds.of[h].y - top);
    }
  }
#pragma unroll
  for (int h = 0; h < GROUP; ++h) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) sums[h] += shuffle_xor(sums[h], mask);
    if (w.lane == 0) sel.sums[h][w.warp] = sums[h];
  }
  compute_sync();
  if (w.thread < GROUP) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += sel.sums[w.thread][i];
    w.p->omitted[m * HEADS + head * GROUP + w.thread] = sum > 0.0f ? best_bound(sel, w.thread) + log2f(sum) : -INFINITY;
  }
}

// Every chunk of the sequences that attend to all, then this block's part of the chosen ones. `listed`: whether the pages of the
// first unit's sequence are in the scratch.
DEVICE void attend_shares(Worker& w, int layer, u32 tag, bool listed) {
  Selection& sel = *(Selection*)((u8*)w.scratch + 2 * ATTENTION_BYTES);
  int chosen_for = -1;
  for (int number = 0;; ++number) {
    Share& share = share_at(w, number);
    if (share.kind == NONE) break;
    const int m = w.control->first[share.unit.sequence] + share.unit.row / GROUP, group = m * KV_HEADS + share.unit.head;
    const bool chooses = share.kind == CHOSEN && group != chosen_for;
    if (chooses) {
      if (!listed || number > 0) list_pages(w, share.unit.sequence, chunks_to(share.unit.last));
      if (chunks_to(share.unit.last) <= LOOK) choose_chunks<1>(w, sel, share, m, tag);
      else choose_chunks<2>(w, sel, share, m, tag);
      chosen_for = group;
    } else if (share.kind == CHOSEN) {
      if (w.thread == 0) {
        share.unit.chunk = sel.chosen[share.unit.slot];
        share.pages = find_pages(*w.p, *w.control, share.unit);
      }
      compute_sync();
    }
    refresh(w);
    ask_pages(w, layer, share);
    if (chooses && share.unit.slot == 0 && share.part == 0 && w.p->most_omitted < INFINITY) account(w, sel, m, share.unit.head, tag);
    refresh(w);
    const Queries queries = load_queries<DENSITY>(w, rows_of(w, share.unit));
    const auto given = [&]() -> const Queries& { return queries; };
    if (near(share)) attend_chunk<1, WARPS>(w, layer, share, (u8*)w.scratch, given);
    else attend_chunk<CHUNK / PAGE, WARPS>(w, layer, share, (u8*)w.scratch, given);
    compute_sync();  // scratch and slots are free
  }
}

// Waits for the queries.
DEVICE void attend(Worker& w, int layer) {
  if (!SPARSE) {
    if (tags_queries(w)) compute_sync();  // each unit waits for its own; the scratch is free
    else wait(w);
    mark(w);
    attend_all(w, layer);
    return;
  }
  const u32 tag = LAYERS > 1 ? tag_of(layer) : 0;  // of bounds: what a step of this kernel writes, it writes in every layer
  Piece piece;
  bool any = w.warp < BOUNDING && find_piece(*w.control, blockIdx.x + w.warp * gridDim.x, piece);
  borrow_stages(w);
  if (any) ask_bounds(w, layer, piece);
  const Share& first = w.listed[0];
  const bool listed = first.kind == CHOSEN;
  if (listed) list_pages(w, first.unit.sequence, chunks_to(first.unit.last));
  wait(w);
  mark(w);
  refresh(w);
  for (int next = blockIdx.x + (w.warp + BOUNDING) * gridDim.x; any; next += gridDim.x * BOUNDING) {
    bound_chunks(w, piece, tag);
    any = next < count_pieces(*w.control) && find_piece(*w.control, next, piece);
    if (any) ask_bounds(w, layer, piece);
  }
  mark(w);
  if (tag) {
    compute_sync();  // each choice waits for its own bounds; the stages are free, and the scratch holds the listed pages
  } else {
    arrive(w);
    wait(w);
  }
  mark(w);
  refresh(w);
  attend_shares(w, layer, tag, listed);
  refresh(w);
  return_stages(w);
}
