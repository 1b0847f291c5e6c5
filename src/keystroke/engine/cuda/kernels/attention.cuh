// Attention over the pages of a sequence, one chunk of keys at a time; results are partial.
// Law: a key's chunk depends on its place alone, so a row's sums never depend on the rows beside it.

// A block takes one KV head of one sequence over one chunk of keys. Each warp scores a part of them, then gathers an
// eighth of the head's dimensions over all. Pages that no row of this step writes to come through the ring, ahead of
// their use, like weights; the few others are read where they lie.
constexpr int K_STEPS = HEAD_DIM / 32;           // 16 bytes of a query each, to a lane
constexpr int V_TILES = HEAD_DIM / 64;
constexpr int PAGE_BYTES = PAGE * HEAD_DIM * KV_BYTES;  // of one head's keys or values
constexpr int DENSITY = 2 / KV_BYTES;            // numbers of a page in the room of 16 bits, and pages in a stage of the ring
static_assert(DENSITY * PAGE_BYTES <= STAGE, "a stage of the ring holds a page");
DEVICE bool find_unit(const Control& c, int index, Unit& unit) {
  for (int s = 0; s < c.sequences; ++s) {
    if (SPARSE && c.budget[s]) continue;
    const int last = c.position[c.first[s] + c.count[s] - 1];
    const int chunks = chunks_to(last), tiles = (c.count[s] * GROUP + 15) / 16;
    const int units = chunks * tiles * KV_HEADS;
    if (index < units) {
      unit.sequence = s;
      unit.head = index % KV_HEADS;
      unit.row = index / KV_HEADS % tiles * 16;
      unit.chunk = unit.slot = index / KV_HEADS / tiles;
      unit.last = last;
      unit.end = c.count[s] * GROUP;
      return true;
    }
    index -= units;
  }
  return false;
}
// Pages of a unit's keys, one or four; entries past the end are never used.
DEVICE uint4 find_pages(const Parameters& p, const Control& c, const Unit& unit) {
  const int* table = p.tables + (s64)c.table[unit.sequence] * p.table_stride;
  if (unit.chunk < NEAR_CHUNKS) return make_uint4(table[unit.chunk], 0, 0, 0);
  return load16(table + NEAR_CHUNKS + (unit.chunk - NEAR_CHUNKS) * (CHUNK / PAGE));
}
DEVICE int first_key(const Unit& unit) {
  return unit.chunk < NEAR_CHUNKS ? unit.chunk * PAGE : NEAR + (unit.chunk - NEAR_CHUNKS) * CHUNK;
}
DEVICE int live_pages(const Unit& unit) {  // those that hold keys at all
  const int most = unit.chunk < NEAR_CHUNKS ? 1 : CHUNK / PAGE, live = (unit.last - first_key(unit)) / PAGE + 1;
  return live < most ? live : most;
}
DEVICE int cold_pages(const Control& c, const Unit& unit) {  // the leading ones that this step leaves as they are
  const int cold = c.position[c.first[unit.sequence]] / PAGE - first_key(unit) / PAGE, live = live_pages(unit);
  return cold < 0 ? 0 : cold < live ? cold : live;
}
DEVICE u32 page_at(const uint4& pages, int i) { return i == 0 ? pages.x : i == 1 ? pages.y : i == 2 ? pages.z : pages.w; }
DEVICE s64 page_start(const Parameters& p, int layer, u32 page, int head) {
  return layer * p.kv_layer_stride + ((s64)page * KV_HEADS + head) * (PAGE * HEAD_DIM);
}

// The streaming warp's part: this block's share of one layer's pages, in the order of use.
DEVICE Share first_share(const Parameters& p, const Control& c) {
  Share s;
  s.pages = make_uint4(0, 0, 0, 0);
  s.any = find_unit(c, blockIdx.x, s.unit);
  if (s.any) s.pages = find_pages(p, c, s.unit);
  return s;
}
DEVICE Share next_share(const Parameters& p, const Control& c, int& index) {
  Share s;
  s.pages = make_uint4(0, 0, 0, 0);
  index += gridDim.x;
  s.any = find_unit(c, index, s.unit);
  if (s.any) s.pages = find_pages(p, c, s.unit);
  return s;
}
DEVICE void bring_pages(Streamer& s, const Parameters& p, const Control& c, int layer, const Unit& unit, const uint4& pages) {
  const int cold = cold_pages(c, unit);
  const auto place = [&](int i) {
    const s64 at = page_start(p, layer, page_at(pages, i < cold ? i : i - cold), unit.head);
    return (i < cold ? p.keys : p.values) + at;
  };
  for (int i = 0; i < 2 * cold; i += DENSITY) bring(s, place(i), PAGE_BYTES, KV8 ? place(i + 1) : nullptr);
}
DEVICE void stream_pages(Streamer& s, const Parameters& p, const Control& c, int layer, const Share& first) {
  Share now = first;
  int index = blockIdx.x;
  while (now.any) {
    const Share next = next_share(p, c, index);  // looked up while the ring is waited for
    bring_pages(s, p, c, layer, now.unit, now.pages);
    now = next;
  }
}

// What a thread needs to know of the two rows it scores, g and g + 8 of the unit.
struct Rows {
  bool has0, has1;
  int m0, m1, h0, h1, limit0, limit1;
};
DEVICE Rows rows_of(Worker& w, const Unit& unit) {
  const int first = w.control->first[unit.sequence], live = unit.end;
  const int r0 = unit.row + w.g, r1 = r0 + 8;
  Rows r;
  r.has0 = r0 < live; r.has1 = r1 < live;
  r.m0 = first + (r.has0 ? r0 / GROUP : 0); r.m1 = first + (r.has1 ? r1 / GROUP : 0);
  r.h0 = unit.head * GROUP + r0 % GROUP; r.h1 = unit.head * GROUP + r1 % GROUP;
  r.limit0 = r.has0 ? w.control->position[r.m0] : -1; r.limit1 = r.has1 ? w.control->position[r.m1] : -1;
  return r;
}
// 16 bytes of a page, from the ring or from where it lies.
DEVICE uint4 page16(bool cold, const Stored* stage, const Stored* page, int at) {
  return cold ? *(const uint4*)(stage + at) : load16(page + at);
}
// Of 16 queries (or rows of weights) and eight keys (or dimensions of values): c += the products of what 16 bytes of a
// page hold with the DENSITY times 16 bytes beside them.
DEVICE void multiply_page(float (&c)[4], const uint4* a, const uint4* b, const uint4& raw) {
  if (KV8) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    const u32 offset = 0x64806480u;  // a byte under 0x64 is the float16 1024 + byte
    u32 v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = sub_f16x2(permute_bytes(words[i], 0x64u, 0x4140u), offset);
      v[2 * i + 1] = sub_f16x2(permute_bytes(words[i], 0x64u, 0x4342u), offset);
    }
    mma_f16(c, a[0].x, b[0].x, a[0].y, b[0].y, v[0], v[1]);
    mma_f16(c, a[0].z, b[0].z, a[0].w, b[0].w, v[2], v[3]);
    mma_f16(c, a[DENSITY - 1].x, b[DENSITY - 1].x, a[DENSITY - 1].y, b[DENSITY - 1].y, v[4], v[5]);
    mma_f16(c, a[DENSITY - 1].z, b[DENSITY - 1].z, a[DENSITY - 1].w, b[DENSITY - 1].w, v[6], v[7]);
  } else {
    mma_bf16(c, a[0].x, b[0].x, a[0].y, b[0].y, raw.x, raw.y);
    mma_bf16(c, a[0].z, b[0].z, a[0].w, b[0].w, raw.z, raw.w);
  }
}
// The i-th page that came for a unit: its keys, then its values, DENSITY in a stage.
DEVICE const Stored* await_page(Worker& w, int i) {
  barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
  return (const Stored*)(w.ring.stages + w.ring.at.stage * STAGE + i % DENSITY * PAGE_BYTES);
}
DEVICE void leave_page(Worker& w, int i) {
  if (i % DENSITY != DENSITY - 1) return;
  warp_sync();
  if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
  w.ring.at.advance(w.ring.count);
}
// One chunk of 64 T keys: a warp scores 8 T of them, then gathers an eighth of the dimensions over all.
template <int T>
DEVICE void attend_chunk(Worker& w, int layer, const Unit& unit, const uint4& pages, int cold) {
  constexpr int STRIDE = 64 * T + PAD;
  const float score_scale = 1.4426950408889634f / sqrtf((float)HEAD_DIM);
  const float nothing = -INFINITY;
  const uint4 zero = {0, 0, 0, 0};
  u16* scores = (u16*)w.scratch;
  float* largest = (float*)(scores + 16 * SCORE_STRIDE);
  float* totals = largest + WARPS * 16;
  const int start = first_key(unit), live = live_pages(unit);
  const Rows r = rows_of(w, unit);
  const u16* q0 = w.p->queries + r.m0 * QUERY_WIDTH + r.h0 * HEAD_DIM + w.j * 8 * DENSITY;
  const u16* q1 = w.p->queries + r.m1 * QUERY_WIDTH + r.h1 * HEAD_DIM + w.j * 8 * DENSITY;
  uint4 a[K_STEPS], b[K_STEPS];
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    const int at = step / DENSITY * DENSITY * 32 + step % DENSITY * 8;
    a[step] = r.has0 ? load16(q0 + at) : zero;
    b[step] = r.has1 ? load16(q1 + at) : zero;
  }
  float s[T][4];
#pragma unroll
  for (int t = 0; t < T; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
#pragma unroll 1
  for (int p = 0; p < live; ++p) {
    const Stored* stage = p < cold ? await_page(w, p) : (const Stored*)w.ring.stages;
    if (T == 1 || p == w.warp / 2) {
      const Stored* page = w.p->keys + page_start(*w.p, layer, page_at(pages, p), unit.head);
      const int from = (T == 1 ? w.warp * 8 : (w.warp & 1) * 32) * HEAD_DIM + w.j * 8 * DENSITY;
#pragma unroll
      for (int t = 0; t < T; ++t) {
        const int key = T == 1 ? w.g : (w.g / 2) * 8 + t * 2 + (w.g & 1);  // so that a thread's scores belong to adjacent keys
#pragma unroll
        for (int step = 0; step < K_STEPS; step += DENSITY)
          multiply_page(s[t], a + step, b + step, page16(p < cold, stage, page, from + key * HEAD_DIM + step * 32));
      }
    }
    if (p < cold) leave_page(w, p);
  }
  const int mine = T == 1 ? w.warp * 8 + w.j * 2 : w.warp * 32 + w.j * 8;  // this thread's first key of the chunk
  float top0 = nothing, top1 = nothing;
#pragma unroll
  for (int t = 0; t < T; ++t)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = start + mine + t * 2 + e;
      s[t][e] = key <= r.limit0 ? s[t][e] * score_scale : nothing;
      s[t][e + 2] = key <= r.limit1 ? s[t][e + 2] * score_scale : nothing;
      top0 = fmaxf(top0, s[t][e]);
      top1 = fmaxf(top1, s[t][e + 2]);
    }
  top0 = fmaxf(top0, shuffle_xor(top0, 1)); top0 = fmaxf(top0, shuffle_xor(top0, 2));
  top1 = fmaxf(top1, shuffle_xor(top1, 1)); top1 = fmaxf(top1, shuffle_xor(top1, 2));
  if (w.j == 0) { largest[w.warp * 16 + w.g] = top0; largest[w.warp * 16 + w.g + 8] = top1; }
  compute_sync();
  top0 = top1 = nothing;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    top0 = fmaxf(top0, largest[i * 16 + w.g]);
    top1 = fmaxf(top1, largest[i * 16 + w.g + 8]);
  }
  const float from0 = top0 == nothing ? 0.0f : top0, from1 = top1 == nothing ? 0.0f : top1;
  float sum0 = 0, sum1 = 0;
  u32 packed0[T], packed1[T];
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[t][e] = power_of_two(s[t][e] - (e < 2 ? from0 : from1));
    sum0 += s[t][0] + s[t][1];
    sum1 += s[t][2] + s[t][3];
    packed0[t] = pack_attention(s[t][0], s[t][1]);
    packed1[t] = pack_attention(s[t][2], s[t][3]);
  }
  sum0 += shuffle_xor(sum0, 1); sum0 += shuffle_xor(sum0, 2);
  sum1 += shuffle_xor(sum1, 1); sum1 += shuffle_xor(sum1, 2);
  if (w.j == 0) { totals[w.warp * 16 + w.g] = sum0; totals[w.warp * 16 + w.g + 8] = sum1; }
  u32* to0 = (u32*)(scores + w.g * STRIDE + mine);
  u32* to1 = (u32*)(scores + (w.g + 8) * STRIDE + mine);
#pragma unroll
  for (int t = 0; t < T; ++t) { to0[t] = packed0[t]; to1[t] = packed1[t]; }
  compute_sync();
  float out[V_TILES][4];
#pragma unroll
  for (int n = 0; n < V_TILES; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
  const int d = w.warp * (HEAD_DIM / 8) + w.j * 2;  // this thread's first dimension
  float2 steps[V_TILES];
  if (KV8) {
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) steps[n] = load8((const float2*)(w.p->value_steps + (layer * KV_HEADS + unit.head) * HEAD_DIM + d + n * 8));
  }
#pragma unroll 1
  for (int p = 0; p < live; ++p) {
    const Stored* stage = p < cold ? await_page(w, cold + p) : (const Stored*)w.ring.stages;
    const Stored* page = w.p->values + page_start(*w.p, layer, page_at(pages, p), unit.head);
    const int from = (w.warp * (HEAD_DIM / 8) + w.g) * PAGE + w.j * 8 * DENSITY;
#pragma unroll
    for (int half = 0; half < 2; half += DENSITY) {
      const u16* row = scores + w.g * STRIDE + p * PAGE + half * 32 + w.j * 8 * DENSITY;
      uint4 a[DENSITY], b[DENSITY];
#pragma unroll
      for (int i = 0; i < DENSITY; ++i) {
        a[i] = *(const uint4*)(row + i * 8);
        b[i] = *(const uint4*)(row + 8 * STRIDE + i * 8);
      }
#pragma unroll
      for (int n = 0; n < V_TILES; ++n) multiply_page(out[n], a, b, page16(p < cold, stage, page, from + n * 8 * PAGE + half * 32));
    }
    if (p < cold) leave_page(w, cold + p);
  }
  if (KV8) {
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) {
      out[n][0] *= steps[n].x; out[n][1] *= steps[n].y;
      out[n][2] *= steps[n].x; out[n][3] *= steps[n].y;
    }
  }
  const s64 at0 = ((s64)r.m0 * HEADS + r.h0) * w.p->partial_stride + unit.slot;
  const s64 at1 = ((s64)r.m1 * HEADS + r.h1) * w.p->partial_stride + unit.slot;
#pragma unroll
  for (int n = 0; n < V_TILES; ++n) {
    if (r.has0) *(float2*)(w.p->partial + at0 * HEAD_DIM + d + n * 8) = make_float2(tagged(out[n][0], w.tag), tagged(out[n][1], w.tag));
    if (r.has1) *(float2*)(w.p->partial + at1 * HEAD_DIM + d + n * 8) = make_float2(tagged(out[n][2], w.tag), tagged(out[n][3], w.tag));
  }
  if (w.warp == 0 && w.j == 0) {
    sum0 = sum1 = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) { sum0 += totals[i * 16 + w.g]; sum1 += totals[i * 16 + w.g + 8]; }
    if (r.has0) w.p->partial_norm[at0] = make_float2(tagged(top0, w.tag), tagged(sum0, w.tag));
    if (r.has1) w.p->partial_norm[at1] = make_float2(tagged(top1, w.tag), tagged(sum1, w.tag));
  }
}

// Every chunk of the sequences that attend to all.
DEVICE void attend_all(Worker& w, int layer, Share now) {
  int index = blockIdx.x;
  while (now.any) {
    const Share next = next_share(*w.p, *w.control, index);
    const int cold = cold_pages(*w.control, now.unit);
    if (now.unit.chunk < NEAR_CHUNKS) attend_chunk<1>(w, layer, now.unit, now.pages, cold);
    else attend_chunk<CHUNK / PAGE>(w, layer, now.unit, now.pages, cold);
    now = next;
    if (now.any) compute_sync();  // the scratch is read; it is free
  }
}
