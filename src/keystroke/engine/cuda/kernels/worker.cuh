// The division of work in a block: its share of the weights, the ring that streams them, the barrier between blocks.
// Moves bytes and waits; computes nothing.

// This block's share of each matrix's units. The larger shares rotate over the blocks from matrix to matrix.
struct Span { int low, high; };
enum { QKV, OUTPUT, GATE_UP, DOWN, HEAD, MATRICES, DELTA_SPAN = MATRICES, DELTA_ROWS };
DEVICE Span share_of(int block, int units, int matrix) {
  const int blocks = gridDim.x, at = (block + matrix * 29) % blocks;
  Span s;
  s.low = at * units / blocks;
  s.high = (at + 1) * units / blocks;
  return s;
}

DEVICE Span share(int units, int matrix) { return share_of(blockIdx.x, units, matrix); }

// Rows of a narrow matrix go to the blocks with the smaller shares of another, one after another: this block's first, and the step to
// its next.
struct Every { int first, step; };
DEVICE Every rows_beside(int units, int matrix) {
  const int blocks = gridDim.x, at = (blockIdx.x + matrix * 29) % blocks, least = units / blocks, larger = units - least * blocks;
  const int before = at * units / blocks - at * least;  // blocks with larger shares
  const bool small = (at + 1) * units / blocks - at * units / blocks == least;
  return Every{small ? at - before : 1 << 30, blocks - larger};
}
DEVICE Every every_block() { return Every{(int)blockIdx.x, (int)gridDim.x}; }

// The same for a single row, of a matrix in parts of `part` units of which each needs an input of its own: no block's share
// crosses parts, if that costs no block another round. `together` units of a block are computed side by side. Some blocks may
// have none, so this is only for steps in which a block without a share waits as well: with checks (GUARDED) or because every
// phase waits (HYBRID).
constexpr bool WHOLE_SHARES = GUARDED || (SINGLE == 1 && HYBRID);
constexpr int whole_share(int units, int part, int together, int blocks) {
  const int least = (units + blocks - 1) / blocks, rounds = (least + together - 1) / together;
  for (int each = least; (each + together - 1) / together == rounds && 4 * each <= 5 * least + 4; ++each)
    if (part % each == 0) return each;
  return 0;
}
DEVICE Span share_parts(int block, int units, int part, int together, int matrix) {
  const int blocks = gridDim.x, each = WHOLE_SHARES ? whole_share(units, part, together, blocks) : 0;
  if (!each) return share_of(block, units, matrix);
  const int at = (block + matrix * 29) % blocks * each;
  return Span{at < units ? at : units, at + each < units ? at + each : units};
}
DEVICE Span share_output(int block) { return share_parts(block, Output::units, HIDDEN / 16, O_ALONE ? WARPS : 1, OUTPUT); }
// The part of the O projection's inner dimension that a block has, the first one if there are several; -1 without a share.
DEVICE int part_of(const Span& output) { return output.low < output.high ? output.low / (HIDDEN / 16) : -1; }

// The same for queries, keys and values by cost: a unit belongs to the block in whose equal part of all costs it begins.
DEVICE int qkv_unit(s64 cost) {  // the first that begins there or later
  constexpr s64 before = (s64)QK_UNITS * QK_COST;
  return (int)(cost <= before ? (cost + QK_COST - 1) / QK_COST : QK_UNITS + (cost - before + VALUE_COST - 1) / VALUE_COST);
}
DEVICE Span share_qkv(int at) {
  const int blocks = gridDim.x;
  if (QKV_UNITS <= blocks) return share(QKV_UNITS, QKV);  // one at most
  return Span{qkv_unit(at * QKV_COST / blocks), qkv_unit((at + 1) * QKV_COST / blocks)};
}

// A single row: blocks with fewer of those units attend first, and the first of them to the newest keys, which come last. Counts
// the blocks before this one into `place`, all threads together.
constexpr bool BY_PLACE = SINGLE == 1;
DEVICE void place_block(int thread, u32* place) {
  const auto units = [](int at) { const Span s = share_qkv(at); return s.high - s.low; };
  const int mine = blockIdx.x, own = units(mine);
  for (int at = thread; at < gridDim.x; at += BLOCK_THREADS) {
    const int other = units(at);
    if (other < own || (other == own && at < mine)) add_shared(place, 1);
  }
}

// The parts of a share of the QKV matrix before and after its unit `middle`.
DEVICE Span until(const Span& s, int middle) {
  return Span{s.low < middle ? s.low : middle, s.high < middle ? s.high : middle};
}
DEVICE Span beyond(const Span& s, int middle) {
  return Span{s.low > middle ? s.low - middle : 0, s.high > middle ? s.high - middle : 0};
}

// The position of row m, and the first row of a sequence of this step.
DEVICE int position_of(const Control& c, int m) {
  const int position = c.position[SINGLE ? 0 : m];
  ASSUME(position >= 0 && (SINGLE != 1 || position < NEAR));
  return position;
}
DEVICE int first_row(const Control& c, int sequence) { return SINGLE ? 0 : c.first[sequence]; }

// The ring between the streaming warp and the computing warps.
struct Place {
  int stage;
  u32 phase;
  DEVICE_METHOD void advance(int count) {
    if (++stage == count) { stage = 0; phase ^= 1; }
  }
};
struct Ring {
  u8* stages;
  u64* full;
  u64* empty;
  int count;
  Place at;
};
struct Streamer {
  Ring ring;
  Place oldest;  // of the chunks under way
  int under_way;
  int in_flight;
  u64 policy;
};

// Copy one chunk of bytes into the next stage of the ring once it is free; or two chunks of this length, adjacent.
DEVICE void bring(Streamer& s, const void* from, int bytes, const void* second = nullptr) {
  Ring& ring = s.ring;
  const int all = second ? 2 * bytes : bytes;
  // At least one, and fewer than the ring has stages: as many would never end, and see attend_pair.
  while (s.under_way > 0 && ((s.under_way + 1) * all > s.in_flight || s.under_way >= ring.count - 1)) {
    barrier_wait(&ring.full[s.oldest.stage], s.oldest.phase);
    s.oldest.advance(ring.count);
    --s.under_way;
  }
  ++s.under_way;
  const int stage = ring.at.stage;
  barrier_wait(&ring.empty[stage], ring.at.phase ^ 1);
  if (!BULK) warp_sync();  // all lanes copy side by side, whoever saw first that they may
  expect_copies(&ring.full[stage], all);
  copy(ring.stages + stage * STAGE, from, bytes, &ring.full[stage], s.policy);
  if (second) copy(ring.stages + stage * STAGE + bytes, second, bytes, &ring.full[stage], s.policy);
  end_copies(&ring.full[stage]);
  ring.at.advance(ring.count);
}

// Reserve a stage that the computing warps fill themselves, once it is free; weights continue after it.
DEVICE void lend(Streamer& s) {
  Ring& ring = s.ring;
  while (s.under_way >= ring.count - 1) {
    barrier_wait(&ring.full[s.oldest.stage], s.oldest.phase);
    s.oldest.advance(ring.count);
    --s.under_way;
  }
  ++s.under_way;
  barrier_wait(&ring.empty[ring.at.stage], ring.at.phase ^ 1);
  barrier_arrive(&ring.full[ring.at.stage]);
  ring.at.advance(ring.count);
}

// Units low ... high - 1 of a matrix, every `step`-th, as many at a time as a stage holds; larger ones in parts.
struct Stretch {
  const u8* matrix;
  int low, high, step;
  int unit_bytes, together;
  int part, last;  // bytes of a part, and of the last one at most
};
template <class M>
DEVICE Stretch stretch(const u8* matrix, const Span& span) {
  constexpr int part = M::per_chunk * block_bytes(M::format);
  if (M::together > 1) return Stretch{matrix, span.low, span.high, M::together, (int)M::unit_bytes, M::together, STAGE, STAGE};
  return Stretch{matrix, span.low, span.high, 1, (int)M::unit_bytes, 1, part, part + TAIL};
}
DEVICE Stretch rows_of_floats(const float* matrix, int rows, const Every& mine) {
  return Stretch{(const u8*)matrix, mine.first, rows, mine.step, HIDDEN * 4, 1, STAGE, STAGE};
}
DEVICE void stream(Streamer& s, const Stretch& t) {
  for (int unit = t.low; unit < t.high; unit += t.step) {
    const u8* from = t.matrix + (s64)unit * t.unit_bytes;
    for (int left = t.unit_bytes * (t.high - unit < t.together ? t.high - unit : t.together); left > 0;) {
      const int bytes = left > t.last ? t.part : left;
      bring(s, from, bytes);
      from += bytes;
      left -= bytes;
    }
  }
}
template <class M>
DEVICE void stream(Streamer& s, const u8* matrix, const Span& span) { stream(s, stretch<M>(matrix, span)); }

// A unit of attention: 16 (row, head of the group) pairs from `row` on of one KV head of one sequence, over one chunk of its
// keys. `last` is the position of the sequence's last row.
struct Unit {
  int sequence, head, chunk, row, last;
  int end;   // the pair after the last
  int slot;  // where the chunk's partial result goes
};
enum { NONE, FIXED, CHOSEN };  // of a share: whether there is one, and whether its chunk is chosen in each layer
struct Share { uint4 pages; Unit unit; short kind, part; };  // and the pages of those keys; which part of the dimensions is gathered
static_assert(sizeof(Share) == SHARE_BYTES, "shares fit their memory");

// The state of a computing warp during a step.
struct Worker {
  const Parameters* p;
  const Span* spans;
  Share* listed;  // of attention: the first, and others as they are needed
  Control* control;
  int* pages;
  float* small;
  float2* rope;
  float* scratch;
  u16* operand;
  Ring ring;
  u32 arrivals;  // barriers passed
  u64* ready;    // of each buffer of sums: all warps have written
  u64* freed;    // and the one that adds has read
  u64* brought;  // of what computing warps ask for themselves
  u32 turns;     // how often each of those was used, odd or even
  u64* arrival;  // of rows on their way into the operand
  u32 loads;     // how often it was used
  u32 tag;       // in the last two bits of partial results, which differs from that of the last layer with keys; 0: they are announced instead
#if SINGLE
  static constexpr int rows = 1;
  u32 layer_tag;  // of what is passed between blocks beside partial results
  static constexpr bool few = SINGLE == 1, fused = few, tags = TAGS && few;
#else
  int rows;
  bool few;      // no row has more than 32 partial results
  bool fused;    // and the rows are so few that every block combines those for itself
  bool tags;     // whether this step tags them
#endif
  u32 parity;    // of the layer's number
  u64* early;    // barriers of the warp that scores experts early,
  u16* early_rows;  // and this block's part of few rows before attention
  Routing* routing;
  u64* taken;    // the streaming warp no longer reads the last layer's
  u64* routed;   // arrived at when `routing` and the spans that follow from it are those of the layer
  int thread, warp, lane, g, j, unit, marks;
};

// Called before each phase, so that values derived from a worker's position are computed again instead of being kept in
// registers, of which there are too few.
DEVICE void refresh(Worker& w) {
#if !SINGLE
  w.rows = fresh(w.rows);
  w.few = fresh(w.few);
  w.fused = fresh(w.fused);
#endif
  w.thread = fresh(w.thread);
  ASSUME(w.thread >= 0 && w.thread < COMPUTE);
  w.warp = w.thread / 32;
  w.lane = w.thread % 32;
  w.g = w.lane / 4;
  w.j = w.lane % 4;
}

DEVICE void mark(Worker& w) {
#ifdef PROFILE
  if (w.thread == 0 && w.marks < PROFILE) w.p->profile[(s64)blockIdx.x * PROFILE + w.marks++] = clock64();
#endif
}

// Maps numbers to integers in the same order, and back.
DEVICE int ordered(float v) {
  const int bits = __float_as_int(v);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
DEVICE float unordered(int v) { return __uint_as_float((u32)(v ^ (v >> 31 & 0x7fffffff))); }

// Between blocks: `arrive` announces a phase when this block's part is done, `wait` waits for all parts.
DEVICE void arrive(Worker& w) {
  compute_sync();
  if (w.thread == 0) release_add(&w.p->barrier[0], 1);
  w.arrivals += gridDim.x;
}
// The same without waiting until writes have reached memory or all warps have written: tagged values show whether they have
// arrived, and the announcement takes longer than the writes.
DEVICE void arrive_early(Worker& w) {
  if (w.thread == 0) relaxed_add(&w.p->barrier[0], 1);
  w.arrivals += gridDim.x;
}
DEVICE void wait(Worker& w) {
  if (w.thread == 0)
    while (acquire_load(&w.p->barrier[0]) < w.arrivals) spin();
  compute_sync();
}
DEVICE void wait_early(Worker& w) {  // for what shows by itself whether it has arrived
  if (w.thread == 0)
    while (relaxed_load(&w.p->barrier[0]) < w.arrivals) spin();
  compute_sync();
}

// Where blocks announce that they have read the residual stream: asked early, waited for before this block adds to it. The
// block's next barrier passes it on. Loads and adds are relaxed: a thread's loads have ended when it reaches the barrier of the
// block before its arrival, and no thread passes the one behind the check before the check ends. Between two arrivals every
// block waits or checks, with or without a share, or its next arrival would be counted in place of another's of this phase.
DEVICE u32 ask_readers(const Worker& w) { return w.thread == 0 ? relaxed_load(&w.p->barrier[0]) : 0; }
DEVICE void check_readers(const Worker& w, u32 seen) {
  if (w.thread != 0) return;
  while (seen < w.arrivals) {
    spin();
    seen = relaxed_load(&w.p->barrier[0]);
  }
}

// Numbers whose last two bits are a tag of the layer that wrote them. A step writes an address in every layer or in none (also
// where there is nothing to say: `leave_nothing`, every rank of the experts), and leaves the last layer's tag, or 0 if it does
// not tag; so a layer never finds its own tag before the value is written.
DEVICE u32 tag_of(int layer, int layers = LAYERS) { return layer == layers - 1 ? 3 : 1 + (layer & 1); }
DEVICE u32 raw_bits(float v, u32 tag) { return ((u32)__float_as_int(v) & ~3u) | tag; }
DEVICE float tagged(float v, u32 tag) { return __uint_as_float(raw_bits(v, tag)); }
DEVICE float untagged(u32 bits) { return __uint_as_float(bits & ~3u); }
// Tagged numbers, as many as a thread has, in loads of 16 or 8 bytes where they can be.
template <int N>
DEVICE void ask(const void* from, u32 (&raw)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 v = poll16((const u32*)from + i);
      raw[i] = v.x; raw[i + 1] = v.y; raw[i + 2] = v.z; raw[i + 3] = v.w;
    }
  } else if constexpr (N == 2) {
    const uint2 v = poll8(from);
    raw[0] = v.x; raw[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) raw[i] = relaxed_load((const u32*)from + i);
  }
}
template <int N>
DEVICE u32 off_tags(const u32 (&raw)[N], u32 tag) {
  u32 off = 0;
#pragma unroll
  for (int e = 0; e < N; ++e) off |= raw[e] ^ tag;
  return off & 3;
}
// 16-bit numbers are stored above a 16-bit tag, four at a time: tests whether some lack this layer's tag, and extracts them.
DEVICE bool missing(const uint4& v, u32 tag) { return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 0xffff) != 0; }
DEVICE uint2 upper_halves(const uint4& v) { return make_uint2(permute_bytes(v.x, v.y, 0x7632), permute_bytes(v.z, v.w, 0x7632)); }

// Experts may be scored early by warps of their own (early_scores.cuh), which read rows before attention, then the operand. The computing
// warps say when these are there, and wait until they were read before they overwrite them; and wait for a single row's experts.
enum { BEFORE_ATTENTION, BEHIND_ATTENTION, BEFORE_EXPERTS, EARLY_STEPS };
DEVICE u64* early_there(const Worker& w, int step) { return w.early + step; }
DEVICE u64* early_done(const Worker& w, int step) { return w.early + EARLY_STEPS + step; }
DEVICE void show_early(Worker& w, int step) {  // behind a barrier of the block
  if (EARLY && w.thread == 0) barrier_arrive(early_there(w, step));
}
DEVICE void wait_early_scores(Worker& w, int step) {
  if (EARLY) barrier_wait(early_done(w, step), w.parity);
}
// Whether every block normalises all rows for itself. There is shared memory for early scores of EARLY_FEW.
DEVICE bool normalises_all(const Worker& w) { return SINGLE || (w.rows <= w.p->direct_rows && (!EARLY || w.rows <= EARLY_FEW)); }
// 1 / norm and norm of row m before attention and of the row behind it.
DEVICE float2* near_norm(const Worker& w, bool before, int m) { return (float2*)(w.small + NORMS_AT) + (before ? 0 : EARLY_FEW) + m; }
DEVICE float2* far_norm(const Worker& w, bool before, int m) { return w.p->early_norms + (before ? 0 : MAX_ROWS) + m; }
DEVICE float2 early_norm(const Worker& w, bool before, int m) {
  return normalises_all(w) ? *near_norm(w, before, m) : load8(far_norm(w, before, m));
}
DEVICE void keep_norm(const Worker& w, bool before, int m, float2 v) {
  if (normalises_all(w)) *near_norm(w, before, m) = v;
  else *far_norm(w, before, m) = v;
}
// Two numbers of row m before attention, divided by its norm, to where the early scores read them: this block's part, or all.
DEVICE u16* early_part(const Worker& w, int m) { return w.early_rows + m * EARLY_COLUMNS; }
DEVICE void keep_early(const Worker& w, int m, int pair, u32 v) {
  if (!normalises_all(w)) {
    ((u32*)(w.p->early_rows + (s64)m * HIDDEN))[pair] = v;
    return;
  }
  const int at = pair - part_of(w.spans[OUTPUT]) * (EARLY_COLUMNS / 2);
  if (at >= 0 && at < EARLY_COLUMNS / 2) ((u32*)early_part(w, m))[at] = v;
}
