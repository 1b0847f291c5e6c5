// Scores of experts before attention's output is in the residual stream, so that their weights are asked for while it is added and
// normalised.
//
// With R the router, g the weights of the norm before it, x the row before attention, O the output projection and a what attention gives,
// the scores are (R g) x + (R g O) a, divided by the norm of x + O a. That norm does not change their order. Both matrices are made when
// the model is loaded, in float16. A block has a part of the columns of O and so that part of a; its warps from the tenth on compute that
// part of eight scores each and send it to all blocks. All kernels add the same parts in the same order, so scores do not depend on
// other rows.

#if EARLY
constexpr int EARLY_GROUPS = (ALL_EXPERTS + 7) / 8, EARLY_INNER = QUERY_WIDTH / O_SPLIT;
#if DELTA_LAYERS
constexpr int EARLY_DELTA_INNER = DELTA_VALUES / O_SPLIT, EARLY_WIDEST = EARLY_INNER > EARLY_DELTA_INNER ? EARLY_INNER : EARLY_DELTA_INNER;
#else
constexpr int EARLY_DELTA_INNER = EARLY_INNER, EARLY_WIDEST = EARLY_INNER;
#endif
static_assert(HALF && !EXPERT_BIAS && !HOST_EXPERTS, "experts that can be scored early");
static_assert(HIDDEN % O_SPLIT == 0 && EARLY_COLUMNS % 32 == 0 && EARLY_INNER % 32 == 0 && EARLY_DELTA_INNER % 32 == 0, "routers come in pieces of 32 columns");

// How many blocks before this one have the same part of what attention gives. The first EARLY_BLOCKS of each part divide the groups of
// scores.
constexpr int EARLY_GROUP_AT = EARLY_AT + 2 * EARLY_STEPS * 8;
DEVICE void choose_group(int thread, u32* group) {
  const int mine = part_of(share_output(blockIdx.x));
  for (int at = thread; at < blockIdx.x; at += BLOCK_THREADS)
    if (part_of(share_output(at)) == mine) add_shared(group, 1);
}

// A piece of the routers of eight experts: 32 columns, as the lanes of a warp multiply with them.
DEVICE const uint4* early_piece(const u16* routers, s64 group, int columns, int piece, int lane) {
  return (const uint4*)(routers + group * columns * 8 + piece * 256) + lane;
}
// By one warp: eight routers times PIECES pieces of sixteen rows, whose pieces row(0 or 1, piece) gets for rows g and g + 8. Lane (g, j)
// gets the products of routers 2 j and 2 j + 1 with rows g, then g + 8.
template <int PIECES, class Rows, class Routers>
DEVICE float4 multiply_early(const Rows& row, const Routers& router) {
  constexpr int CHAINS = 4, BATCH = 8;
  float acc[CHAINS][4];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[c][i] = 0.0f;
#pragma unroll
  for (int first = 0; first < PIECES; first += BATCH) {
    uint4 low[BATCH], high[BATCH], r[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i < PIECES) {
        low[i] = row(0, first + i);
        high[i] = SINGLE ? low[i] : row(1, first + i);
        r[i] = router(first + i);
      }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i < PIECES) {
        mma_f16(acc[i * 2 % CHAINS], low[i].x, high[i].x, low[i].y, high[i].y, r[i].x, r[i].y);
        mma_f16(acc[i * 2 % CHAINS + 1], low[i].z, high[i].z, low[i].w, high[i].w, r[i].z, r[i].w);
      }
  }
  float sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = acc[0][i] + acc[1][i] + (acc[2][i] + acc[3][i]);
  return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// Scores of row m from expert `from` on, of which all parts have arrived.
template <int N>
DEVICE void add_parts(const Parameters& p, int m, int from, u32 tag, float (&scores)[N]) {
  u32 raw[O_SPLIT][N];
  const u32* parts = (const u32*)p.early_scores + (s64)m * O_SPLIT * EARLY_STRIDE + from;
  while (true) {
    u32 off = 0;
#pragma unroll
    for (int part = 0; part < O_SPLIT; ++part) ask(parts + part * EARLY_STRIDE, raw[part]);
#pragma unroll
    for (int part = 0; part < O_SPLIT; ++part)
#pragma unroll
      for (int i = 0; i < N; ++i) off |= raw[part][i] ^ tag;
    if (!(off & 3)) break;
    spin();
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    scores[i] = untagged(raw[0][i]);
#pragma unroll
    for (int part = 1; part < O_SPLIT; ++part) scores[i] += untagged(raw[part][i]);
  }
}

// A block's warp `number` for such scores, group `mine` of all layers; the first also makes a single row's choice of experts.
DEVICE void score_early(Worker& w, int mine, int number, float* scores) {
  constexpr int TILES = SINGLE ? 1 : (COLUMNS + 15) / 16;
  const Parameters& p = *w.p;
  const int part = part_of(w.spans[OUTPUT]), lane = w.thread % 32, j = lane % 4, g = lane / 4;
  const bool scores_some = part >= 0 && mine < EARLY_GROUPS;
  const bool chooses = w.spans[GATE_UP].low < w.spans[GATE_UP].high || w.spans[DOWN].low < w.spans[DOWN].high;
  int deltas = 0;  // layers so far
  const auto clamped = [&](int m) { return m < w.rows ? m : w.rows - 1; };  // sums of rows that there are not are never read
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) {
    const u32 tag = tag_of(layer);
    const bool delta = is_delta(layer);
    const int inner = delta ? EARLY_DELTA_INNER : EARLY_INNER;
    const s64 group = ((s64)layer * O_SPLIT + part) * EARLY_GROUPS + mine;
    const float* scales = p.early_scales + layer * 2 * EARLY_STRIDE + mine * 8 + j * 2;  // of this lane's scores, of both matrices
    w.parity = layer & 1;
    float4 sums[TILES];
#if DELTA_LAYERS
    const bool aside = DELTA_ASIDE && number == EARLY_WARPS - 1;
    if (aside && delta) prefetch_delta_heads(w, deltas);
#endif
    barrier_wait(early_there(w, BEFORE_ATTENTION), w.parity);
#if DELTA_LAYERS
    if (aside) {
      if (delta) project_delta_aside(w, deltas++);
      warp_sync();
      if (lane == 0) barrier_arrive(early_done(w, BEFORE_ATTENTION));
    }
#endif
    if (scores_some)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int rows[2] = {clamped(tile * 16 + g), clamped(tile * 16 + g + 8)};
        const bool near = normalises_all(w);
        const float4 v = multiply_early<EARLY_COLUMNS / 32>(
            [&](int second, int piece) {
              const int m = rows[second];
              if (near) return *(const uint4*)(early_part(w, m) + piece * 32 + j * 8);
              return load16(p.early_rows + (s64)m * HIDDEN + part * EARLY_COLUMNS + piece * 32 + j * 8);
            },
            [&](int piece) { return *early_piece(p.early_before, group, EARLY_COLUMNS, piece, lane); });
        const float low = early_norm(w, true, rows[0]).y, high = early_norm(w, true, rows[1]).y;
        sums[tile] = make_float4(v.x * scales[0] * low, v.y * scales[1] * low, v.z * scales[0] * high, v.w * scales[1] * high);
      }
    // The router's pieces are in registers before the operand is there.
    float behind[2] = {0.0f, 0.0f};
    if (scores_some)
      for (int i = 0; i < 2; ++i) behind[i] = scales[EARLY_STRIDE + i];
    constexpr int HELD = EARLY_WIDEST / 32;
    uint4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (scores_some && i * 32 < inner) held[i] = *early_piece(p.early_behind, group, EARLY_WIDEST, i, lane);
    barrier_wait(early_there(w, BEHIND_ATTENTION), w.parity);
    if (scores_some)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int m = tile * 16 + g;
        const u16* x[2] = {w.operand + clamped(m) * p.x_stride + part * inner + j * 8, w.operand + clamped(m + 8) * p.x_stride + part * inner + j * 8};
        const auto row = [&](int second, int piece) { return *(const uint4*)(x[second] + piece * 32); };
        const auto router = [&](int piece) { return held[piece]; };
        const float4 v = EARLY_DELTA_INNER != EARLY_INNER && delta ? multiply_early<EARLY_DELTA_INNER / 32>(row, router) : multiply_early<EARLY_INNER / 32>(row, router);
        u32* to = (u32*)p.early_scores + ((s64)m * O_SPLIT + part) * EARLY_STRIDE + mine * 8 + j * 2;
        const float4 sum = sums[tile];
        if (m < w.rows) {
          to[0] = raw_bits(fmaf(v.x, behind[0], sum.x), tag);
          to[1] = raw_bits(fmaf(v.y, behind[1], sum.y), tag);
        }
        if (!SINGLE && m + 8 < w.rows) {
          to += 8 * O_SPLIT * EARLY_STRIDE;
          to[0] = raw_bits(fmaf(v.z, behind[0], sum.z), tag);
          to[1] = raw_bits(fmaf(v.w, behind[1], sum.w), tag);
        }
      }
    warp_sync();
    if (lane == 0) barrier_arrive(early_done(w, BEHIND_ATTENTION));
    if constexpr (ADDED_TOGETHER) {
      if (chooses) {
        for (int quad = number * 32 + lane; quad < EARLY_STRIDE / 4; quad += EARLY_WARPS * 32) {
          float sum[4];
          add_parts(p, 0, quad * 4, tag, sum);
          *(float4*)(scores + quad * 4) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
        warp_sync();
        early_sync();
      }
      if (number > 0) continue;
    }
    if constexpr (SINGLE) {
      if (chooses) rank_experts(w, 0, tag, scores);  // waits for the norm before the experts
      else if (number == 0) barrier_wait(early_there(w, BEFORE_EXPERTS), w.parity);
      warp_sync();
      if (number == 0 && lane == 0) barrier_arrive(early_done(w, BEFORE_EXPERTS));
    }
  }
}
#endif
