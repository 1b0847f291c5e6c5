// Attention over the pages of a sequence, one chunk of keys at a time; results are partial.
// A key's chunk depends on its position only, so a row's sums never depend on other rows.

// A block processes one KV head of one sequence over one chunk of keys. Each warp scores a part of them, then sums the values of an
// eighth of the head's dimensions. Pages that this step does not write to are streamed through the ring like weights (with
// sparse attention: once they are chosen, see below); the few others are read from device memory, or sent by the blocks that
// compute them.
constexpr int K_STEPS = HEAD_DIM / 32;           // 16 bytes of a query each, to a lane
// With sparse attention there may be more blocks than chunks: VALUE_PARTS of them then score the same keys, and each sums a part of
// the dimensions of the values.
constexpr int DIMENSIONS = HEAD_DIM / VALUE_PARTS;
constexpr int V_TILES = DIMENSIONS / 64;
constexpr int PAGE_BYTES = PAGE * HEAD_DIM * KV_BYTES;  // of one head's keys or values
constexpr int DENSITY = 2 / KV_BYTES;            // numbers of a page in the room of 16 bits, and pages in a stage of the ring
// With small shared memory a stage of the ring holds no page: all pages are then read from device memory.
enum { IN_RING = DENSITY * PAGE_BYTES <= STAGE };
constexpr int RECENT = 3;  // the last chunks of a row are always attended to: no row chooses among pages that its step writes to
DEVICE int chunks_of(const Control& c, int m) {  // partial results that row m has
  const int all = chunks_to(position_of(c, m)), budget = SPARSE ? c.budget[c.sequence[m]] : 0;
  return budget && budget < all ? budget : all;
}
// This block's unit `number`: first those of sequences that attend to every chunk, then the chosen chunks, distributed by row and
// head. A chunk that is not among a row's last is chosen in each layer.
DEVICE int find_unit(const Control& c, int number, Unit& unit, short& part) {
  // Queries that are sent are received once if all units of a block have the same head.
  const int aligned = SINGLE == 2 && QUERY_TAGS && gridDim.x >= KV_HEADS ? gridDim.x / KV_HEADS * KV_HEADS : gridDim.x;
  SHARED_MEMORY(memory);
  const int place = BY_PLACE ? *(const int*)(memory + PLACE_AT) : blockIdx.x;
  if (place >= aligned) return NONE;
  int index = place + number * aligned, chosen = 0;
  for (int s = 0; s < c.sequences; ++s) {
    if (SPARSE && c.budget[s]) {
      for (int m = c.first[s]; m < c.first[s] + c.count[s]; ++m) chosen += chunks_of(c, m) * KV_HEADS;
      continue;
    }
    const int last = position_of(c, c.first[s] + c.count[s] - 1);
    const int chunks = chunks_to(last), tiles = (c.count[s] * GROUP + 15) / 16;
    const int units = chunks * tiles * KV_HEADS * VALUE_PARTS;
    if (index < units) {
      if (BY_PLACE) index = units - 1 - index;
      part = index % VALUE_PARTS;
      index /= VALUE_PARTS;
      unit.sequence = s;
      unit.head = index % KV_HEADS;
      unit.row = index / KV_HEADS % tiles * 16;
      unit.chunk = unit.slot = index / KV_HEADS / tiles;
      unit.last = last;
      unit.end = c.count[s] * GROUP;
      return FIXED;
    }
    index -= units;
  }
  if (!SPARSE) return NONE;
  chosen *= VALUE_PARTS;
  int at = (int)((s64)blockIdx.x * chosen / gridDim.x) + index / gridDim.x;
  if (at >= (int)((s64)(blockIdx.x + 1) * chosen / gridDim.x)) return NONE;
  part = at % VALUE_PARTS;
  at /= VALUE_PARTS;
  for (int m = 0;; ++m) {
    const int s = c.sequence[m], count = chunks_of(c, m);
    if (!c.budget[s]) continue;
    if (at < count * KV_HEADS) {
      unit.sequence = s;
      unit.head = at / count;
      unit.slot = at % count;
      unit.row = (m - c.first[s]) * GROUP;
      unit.end = unit.row + GROUP;
      unit.last = position_of(c, m);
      unit.chunk = chunks_to(unit.last) - count + unit.slot;
      return unit.slot < count - RECENT ? CHOSEN : FIXED;
    }
    at -= count * KV_HEADS;
  }
}
// The pages of a chunk, one or four; entries past the end are not used.
DEVICE uint4 pages_of(const Parameters& p, const Control& c, int sequence, int chunk) {
  const int* table = p.tables + (s64)c.table[sequence] * p.table_stride;
  if (chunk < NEAR_CHUNKS) return make_uint4(table[chunk], 0, 0, 0);
  return load16(table + NEAR_CHUNKS + (chunk - NEAR_CHUNKS) * (CHUNK / PAGE));
}
DEVICE uint4 find_pages(const Parameters& p, const Control& c, const Unit& unit) { return pages_of(p, c, unit.sequence, unit.chunk); }
DEVICE int first_key(const Unit& unit) {
  return unit.chunk < NEAR_CHUNKS ? unit.chunk * PAGE : NEAR + (unit.chunk - NEAR_CHUNKS) * CHUNK;
}
DEVICE int live_pages(const Unit& unit) {  // those that hold keys at all
  const int most = unit.chunk < NEAR_CHUNKS ? 1 : CHUNK / PAGE, live = (unit.last - first_key(unit)) / PAGE + 1;
  return live < most ? live : most;
}
DEVICE int cold_pages(const Control& c, const Unit& unit) {  // the leading ones that this step leaves as they are, and that are copied
  if (!SPARSE && !IN_RING) return 0;
  const int cold = position_of(c, first_row(c, unit.sequence)) / PAGE - first_key(unit) / PAGE, live = live_pages(unit);
  return cold < 0 ? 0 : cold < live ? cold : live;
}
// Whether all keys of a unit lie before the windows of all its rows, the first of which looks back farthest.
DEVICE bool out_of_sight(const Control& c, int layer, const Unit& unit) {
  const int end = first_key(unit) + (unit.chunk < NEAR_CHUNKS ? PAGE : CHUNK);
  return end <= oldest_key(layer, position_of(c, first_row(c, unit.sequence) + unit.row / GROUP));
}
DEVICE u32 page_at(const uint4& pages, int i) { return i == 0 ? pages.x : i == 1 ? pages.y : i == 2 ? pages.z : pages.w; }
DEVICE s64 page_start(const Parameters& p, int layer, u32 page, int head) {
  return layer * p.kv_layer_stride + ((s64)page * KV_HEADS + head) * (PAGE * HEAD_DIM);
}

// This block's units are the same in every layer: the first are looked up once.
DEVICE Share look_up(const Parameters& p, const Control& c, int number) {
  Share s;
  s.pages = make_uint4(0, 0, 0, 0);
  s.part = 0;
  s.kind = find_unit(c, number, s.unit, s.part);
  if (s.kind == FIXED) s.pages = find_pages(p, c, s.unit);
  return s;
}
// The streaming warp: this block's pages of one layer, in the order of use.
DEVICE void bring_pages(Streamer& s, const Parameters& p, const Control& c, int layer, const Unit& unit, const uint4& pages) {
  const int cold = cold_pages(c, unit);
  const auto place = [&](int i) {
    const s64 at = page_start(p, layer, page_at(pages, i < cold ? i : i - cold), unit.head);
    return (i < cold ? p.keys : p.values) + at;
  };
  for (int i = 0; i < 2 * cold; i += DENSITY) bring(s, place(i), PAGE_BYTES, KV8 ? place(i + 1) : nullptr);
}
DEVICE void stream_pages(Streamer& s, const Parameters& p, const Control& c, int layer, const Share* listed) {
  for (int number = 0;; ++number) {
    const Share now = number < LISTED ? listed[number] : look_up(p, c, number);
    if (now.kind == NONE) return;
    if (WINDOW && out_of_sight(c, layer, now.unit)) continue;
    bring_pages(s, p, c, layer, now.unit, now.pages);
  }
}

// Whether a tile has rows g + 8.
constexpr bool UPPER = !SINGLE || GROUP > 8;
// What a thread needs about the two rows it scores, g and g + 8 of the unit.
struct Rows {
  bool has0, has1;
  int m0, m1, h0, h1, limit0, limit1;
};
DEVICE Rows rows_of(const Worker& w, const Unit& unit) {
  const int first = first_row(*w.control, unit.sequence), live = unit.end;
  const int r0 = unit.row + w.g, r1 = r0 + 8;
  Rows r;
  r.has0 = r0 < live; r.has1 = r1 < live;
  r.m0 = first + (r.has0 ? r0 / GROUP : 0); r.m1 = first + (r.has1 ? r1 / GROUP : 0);
  r.h0 = unit.head * GROUP + r0 % GROUP; r.h1 = unit.head * GROUP + r1 % GROUP;
  r.limit0 = r.has0 ? position_of(*w.control, r.m0) : -1; r.limit1 = r.has1 ? position_of(*w.control, r.m1) : -1;
  return r;
}
// Which eight dimensions of a query a thread's step-th 16 bytes hold: those that match its part of a key, 16 bytes of DEPTH
// times 8.
template <int DEPTH>
DEVICE int query_at(int j, int step) { return step / DEPTH * DEPTH * 32 + j * 8 * DEPTH + step % DEPTH * 8; }
struct Queries { uint4 a[K_STEPS], b[K_STEPS]; };  // of those two rows
template <int DEPTH>
DEVICE Queries load_queries(const Worker& w, const Rows& r) {
  const uint4 zero = {0, 0, 0, 0};
  const u16* q0 = w.p->queries + r.m0 * QUERY_WIDTH + r.h0 * HEAD_DIM;
  const u16* q1 = w.p->queries + r.m1 * QUERY_WIDTH + r.h1 * HEAD_DIM;
  Queries q;
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    q.a[step] = r.has0 ? load16(q0 + query_at<DEPTH>(w.j, step)) : zero;
    q.b[step] = r.has1 ? load16(q1 + query_at<DEPTH>(w.j, step)) : zero;
  }
  return q;
}
// Page i of a unit: its keys, then its values, DENSITY in a stage.
DEVICE const Stored* await_page(Worker& w, int i) {
  barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
  return (const Stored*)(w.ring.stages + w.ring.at.stage * STAGE + i % DENSITY * PAGE_BYTES);
}
// An arrival does not wait for pending loads, nor does the copy engine: hence the fence. PARTY warps read a page; each arrives for
// as many as make eight.
template <int PARTY>
DEVICE void leave_page(Worker& w, int i) {
  if (SPARSE || i % DENSITY != DENSITY - 1) return;
  fence_reads();
  warp_sync();
  if (w.lane < WARPS / PARTY) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
  w.ring.at.advance(w.ring.count);
}
// Far keys of few rows: a block's units follow each other with the same queries, which are loaded once (`stage_queries`), and pages
// are released without a fence. In the kernel for many rows both would need too many registers.
enum { LONG_RUNS = TILES_N == 1 };
enum { PAIRED = HEAD_DIM <= 128 };  // half of the warps would need too many registers for larger heads
// Releases a page whose loads by this warp are all part of `seen`. A fence would also wait for the last unit's stores; an arrival
// whose address depends on a value waits only for that value. Lane 0's stands for all, which load together.
DEVICE void leave_seen_page(Worker& w, int i, u32 seen) {
  if (!LONG_RUNS) return leave_page<WARPS>(w, i);
  if (SPARSE || i % DENSITY != DENSITY - 1) return;
  warp_sync();
  if (w.lane == 0) barrier_arrive_behind(&w.ring.empty[w.ring.at.stage], seen, (u32)(w.p->x_stride >> 31));
  w.ring.at.advance(w.ring.count);
}
// Releases the ring stages of a unit.
DEVICE void pass_pages(Worker& w, const Unit& unit) {
  for (int i = 0; i < 2 * cold_pages(*w.control, unit); i += DENSITY) w.ring.at.advance(w.ring.count);
}

// With sparse attention only the computing warps know which pages they need, so they load them themselves: half a page of keys for
// each warp, and the values that this block sums, into stages reserved in the ring. Weights continue after them.
constexpr int HALF_PAGE = PAGE * HEAD_DIM / 2;
constexpr int HALVES = STAGE / (HALF_PAGE * KV_BYTES);  // that a stage holds
constexpr int SLOTS = LENT * HALVES;
constexpr int ASKING = SLOTS < WARPS ? SLOTS : WARPS;  // warps for whose halves there is room
static_assert(!SPARSE || SLOTS >= 4, "a page of keys and one of values fit");
// Pages of a chunk that are copied through the ring, or as halves; the others are read from device memory.
DEVICE int brought_pages(const Control& c, const Unit& unit) {
  const int cold = cold_pages(c, unit);
  return SPARSE && cold > ASKING / 2 ? ASKING / 2 : cold;
}
DEVICE Stored* slot_at(const Worker& w, int i) {
  const int stage = w.ring.at.stage + i / HALVES;
  return (Stored*)(w.ring.stages + (stage < w.ring.count ? stage : stage - w.ring.count) * STAGE) + i % HALVES * HALF_PAGE;
}
// A block without units of attention only needs room for bounds.
DEVICE int lent_stages(const Share* listed) { return !SPARSE ? 0 : listed[0].kind == NONE ? 1 : LENT; }
DEVICE void borrow_stages(Worker& w) {
  Place at = w.ring.at;
  for (int i = 0, lent = lent_stages(w.listed); i < lent; ++i, at.advance(w.ring.count)) barrier_wait(&w.ring.full[at.stage], at.phase);
}
DEVICE void return_stages(Worker& w) {
  warp_sync();
  for (int i = 0, lent = lent_stages(w.listed); i < lent; ++i, w.ring.at.advance(w.ring.count))
    if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
}
// There is a barrier for each warp, for the values of each page, and for the keys of a chunk of one page. `turns` has a bit for each
// page, one for those keys, and one for the warp's own.
DEVICE u64* own_barrier(const Worker& w) { return w.brought + w.warp; }
DEVICE u64* page_barrier(const Worker& w, int page) { return w.brought + WARPS + page; }
constexpr int NEAR_TURN = CHUNK / PAGE, OWN_TURN = NEAR_TURN + 1;
DEVICE u64* near_barrier(const Worker& w) { return page_barrier(w, NEAR_TURN); }
DEVICE void await_own(Worker& w) {
  barrier_wait(own_barrier(w), w.turns >> OWN_TURN & 1);
  w.turns ^= 1u << OWN_TURN;
}
DEVICE void ask_half(const Worker& w, u64* barrier, int slot, const Stored* from) {
  expect_copies(barrier, HALF_PAGE * KV_BYTES);
  copy(slot_at(w, slot), from, HALF_PAGE * KV_BYTES, barrier, streaming_policy());
  end_copies(barrier);
}
// Half i of the values, of 2 / VALUE_PARTS for each page, has its own slot while there are any; others reuse those of the keys
// once these are scored.
constexpr int GATHERED = 2 / VALUE_PARTS;
template <bool NEAR_CHUNK>
DEVICE int value_slot(int i) { return NEAR_CHUNK ? 2 + i : WARPS + i < SLOTS ? WARPS + i : i; }
DEVICE s64 half_start(const Worker& w, int layer, const Share& share, int page, int half) {
  return page_start(*w.p, layer, page_at(share.pages, page), share.unit.head) + half * HALF_PAGE;
}
DEVICE void ask_values(const Worker& w, int layer, const Share& share, int slot) {
  const int page = w.warp / GATHERED;
  ask_half(w, page_barrier(w, page), slot, w.p->values + half_start(w, layer, share, page, VALUE_PARTS == 1 ? w.warp & 1 : share.part));
}
DEVICE void ask_pages(const Worker& w, int layer, const Share& share) {
  const int pages = brought_pages(*w.control, share.unit);
  const bool near = share.unit.chunk < NEAR_CHUNKS;
  if (!asks(w.lane) || w.warp >= 2 * pages) return;
  ask_half(w, near ? near_barrier(w) : own_barrier(w), w.warp, w.p->keys + half_start(w, layer, share, w.warp / 2, w.warp & 1));
  if (w.warp < GATHERED * pages && (near || WARPS + w.warp < SLOTS))
    ask_values(w, layer, share, near ? value_slot<true>(w.warp) : value_slot<false>(w.warp));
}
DEVICE void ask_later_values(const Worker& w, int layer, const Share& share, int cold) {
  if (WARPS + GATHERED * (CHUNK / PAGE) <= SLOTS) return;  // all were asked for at once
  fence_reads();
  warp_sync();
  if (asks(w.lane) && w.warp < GATHERED * cold && WARPS + w.warp >= SLOTS) ask_values(w, layer, share, value_slot<false>(w.warp));
}

// The address of a page's keys and values as if the whole page were there: in the ring, or the half that this warp reads.
template <int T>
DEVICE const Stored* await_keys(Worker& w, int page) {
  if (!SPARSE) return await_page(w, page);
  if (T == 1) barrier_wait(near_barrier(w), w.turns >> NEAR_TURN & 1);
  else await_own(w);
  const int half = T == 1 ? w.warp / 4 : w.warp & 1;
  return slot_at(w, T == 1 ? half : w.warp) - half * HALF_PAGE;
}
template <int T>
DEVICE const Stored* await_values(Worker& w, const Share& share, int page, int cold) {
  if (!SPARSE) return await_page(w, cold + page);
  barrier_wait(page_barrier(w, page), w.turns >> page & 1);
  const int half = VALUE_PARTS == 1 ? w.warp / 4 : share.part;
  return slot_at(w, value_slot<T == 1>(page * GATHERED + half % GATHERED)) - half * HALF_PAGE;
}

// For 16 queries (or rows of weights) and eight keys (or dimensions of values): c += the products of 16 bytes of a page with the
// DENSITY times 16 bytes that match them.
struct Pair { uint4 a, b; };
DEVICE void multiply_page(float (&c)[4], const Pair (&q)[DENSITY], const uint4& raw) {
  if (KV8) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    const u32 offset = 0x64806480u;  // a byte under 0x64 is the float16 1024 + byte
    u32 v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = sub_f16x2(permute_bytes(words[i], 0x64u, 0x4140u), offset);
      v[2 * i + 1] = sub_f16x2(permute_bytes(words[i], 0x64u, 0x4342u), offset);
    }
    const Pair& r = q[DENSITY - 1];
    mma_f16(c, q[0].a.x, q[0].b.x, q[0].a.y, q[0].b.y, v[0], v[1]);
    mma_f16(c, q[0].a.z, q[0].b.z, q[0].a.w, q[0].b.w, v[2], v[3]);
    mma_f16(c, r.a.x, r.b.x, r.a.y, r.b.y, v[4], v[5]);
    mma_f16(c, r.a.z, r.b.z, r.a.w, r.b.w, v[6], v[7]);
  } else {
    mma_bf16(c, q[0].a.x, q[0].b.x, q[0].a.y, q[0].b.y, raw.x, raw.y);
    mma_bf16(c, q[0].a.z, q[0].b.z, q[0].a.w, q[0].b.w, raw.z, raw.w);
  }
}

// A thread's part of eight keys, and of eight dimensions of a page's values, from the ring or from device memory.
constexpr int K_PARTS = K_STEPS / DENSITY, V_PARTS = 2 / DENSITY;
struct Keys { uint4 part[K_PARTS]; };
template <bool COLD>
DEVICE Keys load_keys(const Stored* from) {
  Keys k;
#pragma unroll
  for (int i = 0; i < K_PARTS; ++i) {
    const Stored* at = from + i * DENSITY * 32;
    k.part[i] = COLD ? *(const uint4*)at : load16(at);
  }
  return k;
}
struct Values { uint4 part[V_PARTS][V_TILES]; };
template <bool COLD>
DEVICE Values load_values(const Stored* from) {
  Values v;
#pragma unroll
  for (int i = 0; i < V_PARTS; ++i)
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) {
      const Stored* at = from + n * 8 * PAGE + i * 32;
      v.part[i][n] = COLD ? *(const uint4*)at : load16(at);
    }
  return v;
}
// A number that depends on all of them, and so is available when they are.
DEVICE u32 seen_of(const Values& v) {
  u32 seen = 0;
#pragma unroll
  for (int i = 0; i < V_PARTS; ++i)
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) seen |= v.part[i][n].x;
  return seen;
}
DEVICE u32 seen_of(const Keys& k) {
  u32 seen = 0;
#pragma unroll
  for (int i = 0; i < K_PARTS; ++i) seen |= k.part[i].x;
  return seen;
}
template <int T>
DEVICE u32 seen_of(const float (&scores)[T][4]) {
  u32 seen = 0;
#pragma unroll
  for (int t = 0; t < T; ++t) seen |= __float_as_int(scores[t][0]);
  return seen;
}
// The operand of a thread's i-th part of a key.
struct Met { Pair q[DENSITY]; };
DEVICE Met beside(const Queries& queries, int i) {
  Met m;
#pragma unroll
  for (int e = 0; e < DENSITY; ++e) m.q[e] = {queries.a[i * DENSITY + e], queries.b[i * DENSITY + e]};
  return m;
}
// A page's values, weighted by the scores of a tile (its row g, from this page's first key on).
DEVICE void weigh(float (&out)[V_TILES][4], const u16* scores, int stride, int j, const Values& v) {
#pragma unroll
  for (int i = 0; i < V_PARTS; ++i) {
    Pair p[DENSITY];
#pragma unroll
    for (int e = 0; e < DENSITY; ++e) {
      const u16* row = scores + i * 32 + j * 8 * DENSITY + e * 8;
      p[e] = {*(const uint4*)row, UPPER ? *(const uint4*)(row + 8 * stride) : make_uint4(0, 0, 0, 0)};
    }
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) multiply_page(out[n], p, v.part[i][n]);
  }
}
// Scores of this warp's 32 keys of a page, four times eight.
template <bool COLD, int T>
DEVICE void score_page(const Worker& w, float (&s)[T][4], const Queries& queries, const Stored* page) {
  const Stored* from = page + ((w.warp & 1) * 32 + (w.g / 2) * 8 + (w.g & 1)) * HEAD_DIM + w.j * 8 * DENSITY;
#pragma unroll
  for (int i = 0; i < K_PARTS; ++i) {
    const Met m = beside(queries, i);
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const Stored* at = from + t * 2 * HEAD_DIM + i * DENSITY * 32;  // so that a thread's scores belong to adjacent keys
      multiply_page(s[t], m.q, COLD ? *(const uint4*)at : load16(at));
    }
  }
}

template <int PARTY>
DEVICE float largest_of(const float* of) {  // of what all warps say
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < PARTY; ++i) top = fmaxf(top, of[i * 16]);
  return top;
}
// A thread's part of a whole page: its keys, and the values of all keys in its dimensions.
struct Page { Keys keys; Values values; };
DEVICE int keys_at(const Worker& w) { return (w.warp * 8 + w.g) * HEAD_DIM + w.j * 8 * DENSITY; }
DEVICE int dimension_of(int eighth, int part) {  // the first of an eighth of those that are gathered
  return (VALUE_PARTS == 1 ? 0 : part * DIMENSIONS) + eighth * (DIMENSIONS / 8);
}
DEVICE int values_at(const Worker& w, int part) { return (dimension_of(w.warp, part) + w.g) * PAGE + w.j * 8 * DENSITY; }
DEVICE Page load_page(const Worker& w, int layer, const Share& share) {
  const s64 at = page_start(*w.p, layer, share.pages.x, share.unit.head);
  return {load_keys<false>(w.p->keys + at + keys_at(w)), load_values<false>(w.p->values + at + values_at(w, share.part))};
}
// What other blocks send for a unit of one page: its queries, then key and value of each of the sequence's `own` rows. Heads are
// normalised here if necessary; the block that attends to a key's own page then also stores the key there.
DEVICE void receive_heads(Worker& w, int layer, const Unit& unit, int first, int pairs, int own, int slot, u16* to) {
  const HeadPart of_queries = head_weights(w, layer, false), of_keys = head_weights(w, layer, true);  // asked for before the wait
  constexpr int SIDE = 2;  // heads that a warp waits for together
  for (int base = w.warp; base < pairs + own; base += SIDE * WARPS) {
    const auto row_of = [&](int i) { return base + i * WARPS - pairs; };  // of a key; those of queries are negative
    const auto token_of = [&](int i) { return first + (row_of(i) < 0 ? (unit.row + base + i * WARPS) / GROUP : row_of(i)); };
    const auto has = [&](int i) { return i == 0 || row_of(i) < own; };
    const u32* from[SIDE];
    u32 low[SIDE][HEAD_EACH], high[SIDE][HEAD_EACH];
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const int head = row_of(i) < 0 ? unit.head * GROUP + (unit.row + base + i * WARPS) % GROUP : HEADS + unit.head;
      from[i] = w.p->sent + token_of(i) * QKV_ROWS + head * HEAD_DIM + w.lane * HEAD_EACH;
    }
    while (true) {
      u32 off = 0;
#pragma unroll
      for (int i = 0; i < SIDE; ++i) {
#pragma unroll
        for (int e = 0; e < HEAD_EACH; ++e) low[i][e] = high[i][e] = sent_tag(w);
        if (!has(i)) continue;
        ask(from[i], low[i]);
        ask(from[i] + HEAD_DIM / 2, high[i]);
      }
#pragma unroll
      for (int i = 0; i < SIDE; ++i) off |= off_tags(low[i], sent_tag(w)) | off_tags(high[i], sent_tag(w));
      if (!off) break;
      spin();
    }
    warp_sync();
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      if (!has(i)) break;
      const int row = row_of(i), m = token_of(i);
      HeadPart part;
#pragma unroll
      for (int e = 0; e < HEAD_EACH; ++e) part.v[e] = make_float2(untagged(low[i][e]), untagged(high[i][e]));
      normalise_head(w, layer, m, row < 0 ? of_queries : of_keys, part);
      const bool stores = row >= 0 && slot + row >= 0 && slot + row < PAGE;
      u16* place = to + (row < 0 ? row + pairs : pairs + 2 * row) * SENT_STRIDE;
#pragma unroll
      for (int e = 0; e < HEAD_EACH; ++e) {
        const int d = w.lane * HEAD_EACH + e;
        place[d] = bf16(part.v[e].x);
        place[d + HEAD_DIM / 2] = bf16(part.v[e].y);
        if (!stores) continue;
        store_key(w, layer, m, unit.head, d, part.v[e].x);
        store_key(w, layer, m, unit.head, d + HEAD_DIM / 2, part.v[e].y);
      }
    }
  }
}
DEVICE void receive(Worker& w, int layer, const Unit& unit, int first, int pairs, int own, int slot, u16* to) {
  constexpr int QUADS = HEAD_DIM / 4;
  const int step = QK_NORM ? 2 : 1, begin = QK_NORM ? pairs + 1 : 0;  // values alone, or all
  const int total = (pairs + 2 * own - begin + step - 1) / step * QUADS;
  const int at = QK_NORM ? COMPUTE - 1 - w.thread : w.thread;  // the last warps have fewer heads
  const auto index_of = [&](int at) { return begin + at / QUADS * step; };
  const auto ask = [&](int at) {
    const int i = index_of(at), pair = unit.row + i, rest = i - pairs;
    const int m = first + (rest < 0 ? pair / GROUP : rest / 2);
    const int head = rest < 0 ? unit.head * GROUP + pair % GROUP : HEADS + rest % 2 * KV_HEADS + unit.head;
    return poll16(w.p->sent + m * QKV_ROWS + head * HEAD_DIM + at % QUADS * 4);
  };
  uint4 v = make_uint4(0, 0, 0, 0);
  if (at < total) v = ask(at);  // on its way while heads are normalised
  if (QK_NORM) receive_heads(w, layer, unit, first, pairs, own, slot, to);
  for (int now = at; now < total; now += COMPUTE) {
    if (now != at) v = ask(now);
    while (missing(v, sent_tag(w))) {
      spin();
      v = ask(now);
    }
    *(uint2*)(to + index_of(now) * SENT_STRIDE + now % QUADS * 4) = upper_halves(v);
  }
  compute_sync();
}
DEVICE Queries received_queries(const Worker& w, int live, const u16* sent) {
  const uint4 zero = {0, 0, 0, 0};
  Queries q;
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    const u16* at = sent + w.g * SENT_STRIDE + query_at<1>(w.j, step);
    q.a[step] = w.g < live ? *(const uint4*)at : zero;
    q.b[step] = w.g + 8 < live ? *(const uint4*)(at + 8 * SENT_STRIDE) : zero;
  }
  return q;
}
// Replaces element `element` of eight by a 16-bit number (given in both halves); an element past those changes nothing.
DEVICE u32 with_half(u32 to, int element, u32 twice) {
  const u32 mask = element == 0 ? 0x0000ffffu : element == 1 ? 0xffff0000u : 0;
  return (to & ~mask) | (twice & mask);
}
DEVICE uint4 with_element(const uint4& to, int element, u32 twice) {
  return make_uint4(with_half(to.x, element, twice), with_half(to.y, element - 2, twice), with_half(to.z, element - 4, twice),
                    with_half(to.w, element - 6, twice));
}
// Inserts this step's own keys and values into a page that was read before they were available: the first of `own` is slot `slot`.
DEVICE void put_keys(const Worker& w, Keys& keys, int slot, int own, const u16* sent) {
  const int key = w.warp * 8 + w.g - slot;
  if (key >= 0 && key < own)
#pragma unroll
    for (int i = 0; i < K_PARTS; ++i) keys.part[i] = *(const uint4*)(sent + 2 * key * SENT_STRIDE + query_at<1>(w.j, i));
}
DEVICE void put_values(const Worker& w, Values& values, int slot, int own, const u16* sent) {
  for (int row = 0; row < own; ++row) {
    const int at = slot + row;
    if (at < 0 || at >= PAGE || at % 32 / 8 != w.j) continue;
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) {
      const u32 value = sent[(2 * row + 1) * SENT_STRIDE + w.warp * (HEAD_DIM / 8) + n * 8 + w.g];
#pragma unroll
      for (int i = 0; i < V_PARTS; ++i)
        values.part[i][n] = with_element(values.part[i][n], at / 32 == i ? at % 8 : 8, value * 0x10001u);
    }
  }
}

// What is known about a unit of one page before its queries arrive.
struct Known {
  Rows rows;
  bool written;     // whether the step writes to the page; if so,
  Page page;        // as it was before,
  int slot, own;    // which of its keys are the step's own,
  const u16* sent;  // and what those are
};
// One chunk of 64 T keys, for the result of `queries()`: an eighth of the work is to score 8 T of them, then to sum an eighth of the
// dimensions over all. PARTY warps do it, all eight or one half; results do not depend on which warp does which eighth. Pages are
// released once their content is in registers; reserved stages are released together after the layer's attention.
template <int T, int PARTY, bool KNOWN = false, class Ask>
DEVICE void attend_chunk(Worker& w, int layer, const Share& share, u8* scratch, const Ask& queries, const Known& known = {}) {
  constexpr int EACH = WARPS / PARTY;  // eighths of a warp, `first`, `first` + PARTY ...
  static_assert(EACH == 1 || T == 1, "far keys are shared by all warps");
  const int first = PARTY == WARPS ? w.warp : w.warp % PARTY;
  const auto meet = [&] {
    if (PARTY == WARPS) compute_sync();
    else half_sync(w.warp / PARTY);
  };
  constexpr int STRIDE = 64 * T + PAD;
  constexpr s64 PAGE_STEP = (s64)KV_HEADS * PAGE * HEAD_DIM;
  const float score_scale = 1.4426950408889634f / sqrtf((float)HEAD_DIM);
  const float nothing = -INFINITY;
  const Unit& unit = share.unit;
  const uint4& pages = share.pages;
  u16* scores = (u16*)scratch;
  float* largest = (float*)(scores + 16 * STRIDE);  // [WARPS][16]
  float* totals = largest + WARPS * 16;
  const int start = first_key(unit), live = live_pages(unit), cold = KNOWN ? !known.written : brought_pages(*w.control, unit);
  const Stored* keys = w.p->keys + page_start(*w.p, layer, 0, unit.head);
  const Stored* values = w.p->values + page_start(*w.p, layer, 0, unit.head);
  const auto value_at = [&](int e) { return (dimension_of(first + e * PARTY, share.part) + w.g) * PAGE + w.j * 8 * DENSITY; };
  float s[EACH][T][4];
#pragma unroll
  for (int e = 0; e < EACH; ++e)
#pragma unroll
    for (int t = 0; t < T; ++t) s[e][t][0] = s[e][t][1] = s[e][t][2] = s[e][t][3] = 0.0f;
  Values v[EACH];  // of a chunk that is one page: asked for together with its keys
  if (T == 1) {
    const auto key_at = [&](int e) { return ((first + e * PARTY) * 8 + w.g) * HEAD_DIM + w.j * 8 * DENSITY; };
    Keys k[EACH];
    if (cold) {
      const Stored* page = await_keys<T>(w, 0);
#pragma unroll
      for (int e = 0; e < EACH; ++e) k[e] = load_keys<true>(page + key_at(e));
      if constexpr (EACH == 1) leave_seen_page(w, 0, seen_of(k[0]));
      else leave_page<PARTY>(w, 0);
    } else if (KNOWN) {
      k[0] = known.page.keys;
      put_keys(w, k[0], known.slot, known.own, known.sent);
      v[0] = known.page.values;
    } else {
#pragma unroll
      for (int e = 0; e < EACH; ++e) k[e] = load_keys<false>(keys + pages.x * PAGE_STEP + key_at(e));
      if (EACH == 1) v[0] = load_values<false>(values + pages.x * PAGE_STEP + value_at(0));
    }
    const Queries q = queries();
#pragma unroll
    for (int i = 0; i < K_PARTS; ++i)
#pragma unroll
      for (int e = 0; e < EACH; ++e) multiply_page(s[e][0], beside(q, i).q, k[e].part[i]);
  } else {
#pragma unroll 1
    for (int p = 0; p < live; ++p) {
      if (p < cold) {
        if (SPARSE && p != w.warp / 2) continue;  // another warp's
        const Stored* page = await_keys<T>(w, p);
        if (p == w.warp / 2) score_page<true>(w, s[0], queries(), page);
        leave_seen_page(w, p, seen_of(s[0]));
      } else if (p == w.warp / 2) {
        score_page<false>(w, s[0], queries(), keys + page_at(pages, p) * PAGE_STEP);
      }
    }
  }
  if (SPARSE && T > 1) ask_later_values(w, layer, share, cold);
  // The first key of the chunk for this thread.
  const auto mine = [&](int e) { return T == 1 ? (first + e * PARTY) * 8 + w.j * 2 : first * 32 + w.j * 8; };
  const Rows limits = KNOWN ? known.rows : rows_of(w, unit);
  const int oldest0 = oldest_key(layer, limits.limit0), oldest1 = oldest_key(layer, limits.limit1);
  float top0 = nothing, top1 = nothing;
#pragma unroll
  for (int e = 0; e < EACH; ++e)
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = start + mine(e) + t * 2 + i;
        float(&c)[4] = s[e][t];
        c[i] = key <= limits.limit0 && (!WINDOW || key >= oldest0) ? c[i] * score_scale : nothing;
        top0 = fmaxf(top0, c[i]);
        if (!UPPER) continue;
        c[i + 2] = key <= limits.limit1 && (!WINDOW || key >= oldest1) ? c[i + 2] * score_scale : nothing;
        top1 = fmaxf(top1, c[i + 2]);
      }
  top0 = fmaxf(top0, shuffle_xor(top0, 1)); top0 = fmaxf(top0, shuffle_xor(top0, 2));
  if (UPPER) { top1 = fmaxf(top1, shuffle_xor(top1, 1)); top1 = fmaxf(top1, shuffle_xor(top1, 2)); }
  if (w.j == 0) {
    largest[first * 16 + w.g] = top0;
    if (UPPER) largest[first * 16 + w.g + 8] = top1;
  }
  meet();
  if (EACH > 1) {  // more than one eighth fits into the registers no earlier
    if (cold) {
      const Stored* page = await_page(w, 1);
#pragma unroll
      for (int e = 0; e < EACH; ++e) v[e] = load_values<true>(page + value_at(e));
      leave_page<PARTY>(w, 1);
    } else {
#pragma unroll
      for (int e = 0; e < EACH; ++e) v[e] = load_values<false>(values + pages.x * PAGE_STEP + value_at(e));
    }
  }
  top0 = largest_of<PARTY>(largest + w.g);
  if (UPPER) top1 = largest_of<PARTY>(largest + w.g + 8);
  const float from0 = top0 == nothing ? 0.0f : top0, from1 = top1 == nothing ? 0.0f : top1;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    float sum0 = 0, sum1 = 0;
    u32* to0 = (u32*)(scores + w.g * STRIDE + mine(e));
    u32* to1 = (u32*)(scores + (w.g + 8) * STRIDE + mine(e));
#pragma unroll
    for (int t = 0; t < T; ++t) {
      float(&c)[4] = s[e][t];
#pragma unroll
      for (int i = 0; i < (UPPER ? 4 : 2); ++i) c[i] = power_of_two(c[i] - (i < 2 ? from0 : from1));
      sum0 += c[0] + c[1];
      to0[t] = pack_attention(c[0], c[1]);
      if (!UPPER) continue;
      sum1 += c[2] + c[3];
      to1[t] = pack_attention(c[2], c[3]);
    }
    sum0 += shuffle_xor(sum0, 1); sum0 += shuffle_xor(sum0, 2);
    if (UPPER) { sum1 += shuffle_xor(sum1, 1); sum1 += shuffle_xor(sum1, 2); }
    float* total = totals + (first + e * PARTY) * 16 + w.g;
    if (w.j == 0) {
      total[0] = sum0;
      if (UPPER) total[8] = sum1;
    }
  }
  if (T == 1 && EACH == 1 && cold) {
    v[0] = load_values<true>(await_values<T>(w, share, 0, 1) + value_at(0));
    leave_seen_page(w, 1, seen_of(v[0]));
  } else if (T == 1 && KNOWN) {
    put_values(w, v[0], known.slot, known.own, known.sent);
  }
  meet();
  float out[EACH][V_TILES][4];
#pragma unroll
  for (int e = 0; e < EACH; ++e)
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) out[e][n][0] = out[e][n][1] = out[e][n][2] = out[e][n][3] = 0.0f;
  const u16* weights = scores + w.g * STRIDE;
  if (T == 1) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) weigh(out[e], weights, STRIDE, w.j, v[e]);
  } else {
#pragma unroll 1
    for (int p = 0; p < live; ++p) {
      if (p < cold) {
        v[0] = load_values<true>(await_values<T>(w, share, p, cold) + value_at(0));
        leave_seen_page(w, cold + p, seen_of(v[0]));
      } else {
        v[0] = load_values<false>(values + page_at(pages, p) * PAGE_STEP + value_at(0));
      }
      weigh(out[0], weights + p * PAGE, STRIDE, w.j, v[0]);
    }
  }
  if (SPARSE) {
    fence_reads();
    w.turns ^= ((1u << cold) - 1) | (T == 1 ? (u32)cold << NEAR_TURN : 0);
  }
  const Rows r = KNOWN ? known.rows : rows_of(w, unit);  // again: elsewhere nothing of it was kept
  const s64 at0 = ((s64)r.m0 * HEADS + r.h0) * w.p->partial_stride + unit.slot;
  const s64 at1 = ((s64)r.m1 * HEADS + r.h1) * w.p->partial_stride + unit.slot;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int d = dimension_of(first + e * PARTY, share.part) + w.j * 2;  // this thread's first dimension
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) {
      float(&c)[4] = out[e][n];
      if (KV8) {
        const float2 step = load8((const float2*)(w.p->value_steps + (layer * KV_HEADS + unit.head) * HEAD_DIM + d + n * 8));
        c[0] *= step.x; c[1] *= step.y;
        c[2] *= step.x; c[3] *= step.y;
      }
      if (r.has0) *(float2*)(w.p->partial + at0 * HEAD_DIM + d + n * 8) = make_float2(tagged(c[0], w.tag), tagged(c[1], w.tag));
      if (r.has1) *(float2*)(w.p->partial + at1 * HEAD_DIM + d + n * 8) = make_float2(tagged(c[2], w.tag), tagged(c[3], w.tag));
    }
  }
  if (first == 0 && w.j == 0 && (VALUE_PARTS == 1 || share.part == 0)) {
    const auto leave = [&](s64 at, int row) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += totals[i * 16 + row];
      w.p->partial_norm[at] = make_float2(tagged(largest_of<PARTY>(largest + row), w.tag), tagged(sum, w.tag));
    };
    if (r.has0) leave(at0, w.g);
    if (r.has1) leave(at1, w.g + 8);
  }
}
// A unit of one page whose queries, and the step's own keys and values, are sent by other blocks. The rest of a page that the step
// writes to is older than the step: it is loaded before they arrive.
DEVICE void attend_sent(Worker& w, int layer, const Share& listed, u8* scratch) {
  Share share = listed;  // in registers: what follows from it is found out before the wait
  if (SINGLE && GROUP <= 16) {
    share.unit.row = 0;
    share.unit.end = GROUP;
  }
  ASSUME(share.unit.chunk >= 0 && share.unit.chunk < NEAR_CHUNKS && share.unit.head >= 0 && share.unit.last >= 0);
  const Unit& unit = share.unit;
  const int first = first_row(*w.control, unit.sequence), pairs = unit.end - unit.row < 16 ? unit.end - unit.row : 16;
  u16* sent = (u16*)(scratch + SENT_AT);
  Known known;
  known.rows = rows_of(w, unit);
  known.written = cold_pages(*w.control, unit) == 0;
  known.own = known.written ? (SINGLE ? 1 : w.control->count[unit.sequence]) : 0;
  known.slot = position_of(*w.control, first) - first_key(unit);
  known.sent = sent + pairs * SENT_STRIDE;
  if (known.written) known.page = load_page(w, layer, share);
  receive(w, layer, unit, first, pairs, known.own, known.slot, sent);
  const Queries queries = received_queries(w, pairs, sent);
  attend_chunk<1, WARPS, true>(w, layer, share, scratch, [&]() -> const Queries& { return queries; }, known);
}

// Units of one sequence, KV head and tile of rows have the same queries: they are loaded once into the scratch, an eighth by each
// warp, in the order in which a warp's threads read them.
DEVICE void stage_queries(const Worker& w, const Unit& unit, uint4* to) {
  const Rows r = rows_of(w, unit);
  const bool second = w.warp & 1, has = second ? r.has1 : r.has0;
  const u16* from = w.p->queries + (second ? r.m1 : r.m0) * QUERY_WIDTH + (second ? r.h1 : r.h0) * HEAD_DIM;
  for (int at = w.warp; at < 2 * K_STEPS; at += WARPS)
    to[at * 32 + w.lane] = has ? load16(from + query_at<DENSITY>(w.j, at / 2)) : make_uint4(0, 0, 0, 0);
}
DEVICE Queries staged_queries(const Worker& w, const uint4* from) {
  Queries q;
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    q.a[step] = from[step * 64 + w.lane];
    q.b[step] = from[step * 64 + 32 + w.lane];
  }
  return q;
}

// The same for queries that other blocks send, and keys and values of the step's own row, which go to their page, if this unit
// attends to it.
DEVICE void receive_far(Worker& w, int layer, const Unit& unit, bool written, uint4* to) {
  const int m = first_row(*w.control, unit.sequence), pairs = unit.end - unit.row < 16 ? unit.end - unit.row : 16;
  u16* sent = (u16*)w.scratch;
  compute_sync();  // the scratch is free
  receive(w, layer, unit, m, pairs, written, 0, sent);
  const u16* own = sent + pairs * SENT_STRIDE;
  if (written)
    for (int d = w.thread; d < HEAD_DIM; d += COMPUTE) {
      if (!QK_NORM) store_key(w, layer, m, unit.head, d, bf16_value(own[d]));
      store_value(w, layer, m, unit.head, d, bf16_value(own[SENT_STRIDE + d]));
    }
  const int row = w.g + (w.warp & 1) * 8;
  for (int at = w.warp; at < 2 * K_STEPS; at += WARPS)
    to[at * 32 + w.lane] =
        row < pairs ? *(const uint4*)(sent + row * SENT_STRIDE + query_at<DENSITY>(w.j, at / 2)) : make_uint4(0, 0, 0, 0);
  compute_sync();
}

// This block's unit `number`; those past the list are looked up in groups, by all computing warps together.
DEVICE Share& share_at(Worker& w, int number) {
  if (number < LISTED) return w.listed[number];
  if (number % LISTED == 0) {
    compute_sync();
    if (w.thread < LISTED) w.listed[LISTED + w.thread] = look_up(*w.p, *w.control, number + w.thread);
    compute_sync();
  }
  return w.listed[LISTED + number % LISTED];
}
// Two units of one page each, by half of the warps each: a unit is bound by latency, so two take little longer than one. The second
// half's pages come after the first half's. In a ring of three stages its values use the stage of the first half's keys; phases
// cannot be confused, as those are complete before its own keys are requested: one stage less than the ring has is in flight
// (`bring`).
DEVICE void attend_pair(Worker& w, int layer, const Share& low, const Share& high) {
  compute_sync();
  const int half = w.warp / (WARPS / 2);
  if (half) pass_pages(w, low.unit);
  const Share& mine = half ? high : low;
  const Queries queries = load_queries<DENSITY>(w, rows_of(w, mine.unit));
  attend_chunk<1, WARPS / 2>(w, layer, mine, (u8*)w.scratch + half * ATTENTION_BYTES, [&]() -> const Queries& { return queries; });
  if (!half) pass_pages(w, high.unit);
  compute_sync();  // the scratch is free; and nobody waits for a stage before all have seen what was there before
}
DEVICE bool near(const Share& share) { return share.kind != NONE && share.unit.chunk < NEAR_CHUNKS; }
// Whether a unit of far keys has the same queries as the one before it.
DEVICE bool same_queries(const Unit& last, const Unit& unit) {
  return last.chunk >= NEAR_CHUNKS && last.sequence == unit.sequence && last.head == unit.head && last.row == unit.row;
}
// The partial result of a unit without visible keys.
DEVICE void leave_nothing(const Worker& w, const Unit& unit) {
  const int first = first_row(*w.control, unit.sequence), pairs = unit.end - unit.row < 16 ? unit.end - unit.row : 16;
  for (int i = w.thread; i < pairs * HEAD_DIM; i += COMPUTE) {
    const int pair = unit.row + i / HEAD_DIM, head = unit.head * GROUP + pair % GROUP;
    const s64 at = ((s64)(first + pair / GROUP) * HEADS + head) * w.p->partial_stride + unit.slot;
    w.p->partial[at * HEAD_DIM + i % HEAD_DIM] = tagged(0.0f, w.tag);
    if (i % HEAD_DIM == 0) w.p->partial_norm[at] = make_float2(tagged(-INFINITY, w.tag), tagged(0.0f, w.tag));
  }
}
// Every chunk of the sequences that attend to all. Units alternate between two parts of the scratch, so that a warp may begin the
// next while others finish this one.
DEVICE void attend_all(Worker& w, int layer) {
  uint4* staged = (uint4*)((u8*)w.scratch + 2 * ATTENTION_BYTES);
  static_assert(SPARSE || 16 * HEAD_DIM * 2 <= SELECTION_BYTES, "queries fit where nothing is chosen");
  bool follows = false;  // whether the unit before was attended to
  int staged_head = -1, staged_row = -1;
  for (int number = 0, turn = 0;; ++number, turn ^= 1) {
    const Share& now = share_at(w, number);
    if (now.kind == NONE) return;
    if (WINDOW && out_of_sight(*w.control, layer, now.unit)) {
      leave_nothing(w, now.unit);
      follows = false;
      turn ^= 1;
      continue;
    }
    if (SINGLE == 2 && tags_queries(w)) {
      const bool written = cold_pages(*w.control, now.unit) < live_pages(now.unit);
      if (written || now.unit.head != staged_head || now.unit.row != staged_row) receive_far(w, layer, now.unit, written, staged);
      staged_head = now.unit.head;
      staged_row = now.unit.row;
      u8* scratch = (u8*)w.scratch + turn * ATTENTION_BYTES;
      const auto given = [&] { return staged_queries(w, staged); };
      if (near(now)) attend_chunk<1, WARPS>(w, layer, now, scratch, given);
      else attend_chunk<CHUNK / PAGE, WARPS>(w, layer, now, scratch, given);
      continue;
    }
    if (tags_queries(w)) {
      attend_sent(w, layer, now, (u8*)w.scratch + (WINDOW ? turn : number & 1) * ATTENTION_BYTES);
      continue;
    }
    if (PAIRED && number % 2 == 0) {
      const Share& next = share_at(w, number + 1);
      if (near(now) && near(next) && !(WINDOW && out_of_sight(*w.control, layer, next.unit))) {
        if constexpr (PAIRED) attend_pair(w, layer, now, next);
        ++number;
        continue;
      }
    }
    u8* scratch = (u8*)w.scratch + (WINDOW ? turn : number & 1) * ATTENTION_BYTES;
    if (LONG_RUNS && !near(now)) {
      if (number % LISTED == 0 || (WINDOW && !follows) || !same_queries((&now)[-1].unit, now.unit)) {
        compute_sync();  // the last ones were read
        stage_queries(w, now.unit, staged);
        compute_sync();
      }
      attend_chunk<CHUNK / PAGE, WARPS>(w, layer, now, scratch, [&] { return staged_queries(w, staged); });
      follows = true;
    } else {
      const Queries queries = load_queries<DENSITY>(w, rows_of(w, now.unit));
      const auto given = [&]() -> const Queries& { return queries; };
      if (LONG_RUNS || near(now)) attend_chunk<1, WARPS>(w, layer, now, scratch, given);
      else attend_chunk<CHUNK / PAGE, WARPS>(w, layer, now, scratch, given);
    }
  }
}
