// Top-k and top-p: the last token that each row may still choose. Tokens are ordered by their distance from the best, then by id,
// as in engine/sampler.py; a filter keeps a prefix of that order, so one edge describes it. Counts and sums are integers, so
// the order of addition does not matter.

constexpr int BINS = 1024;
constexpr int PASSES = 3;  // over ten bits of a key each
constexpr int UNITS = 20;  // bits of a weight's fixed point in each of its two words

DEVICE void best_of_all(Worker& w, int m, float& best, int& token);  // choice.cuh

struct Edge { u32 key; int id; };
constexpr u32 LEAST_KEY = 5u << 23, HOPELESS = (132u << 23) - LEAST_KEY;
// Shared memory of the filters: bins of two words each, then the edge of each row, which the draw uses.
DEVICE u32* filter_bins(const Worker& w) { return (u32*)w.scratch; }
DEVICE Edge* filter_edges(const Worker& w) { return (Edge*)(filter_bins(w) + 2 * BINS); }
static_assert(2 * BINS * 4 + MAX_ROWS * 12 <= SCRATCH_BYTES, "filtering fits the scratch");

DEVICE bool inside(u32 key, int id, const Edge& edge) { return key < edge.key || (key == edge.key && id <= edge.id); }
// A token's distance from the best, as an integer in the same order. 30 bits: from 2**-122 to 32, which no noise can make up for.
DEVICE u32 key_of(float relative) {
  const u32 bits = (u32)__float_as_int(relative) & 0x7fffffffu;
  const u32 key = (bits < LEAST_KEY ? LEAST_KEY : bits) - LEAST_KEY;
  return key < HOPELESS ? key : HOPELESS;
}
DEVICE float distance_of(u32 key) { return __uint_as_float(key + LEAST_KEY); }
DEVICE void weight_of(u32 key, u32& high, u32& low) {
  const float one = (float)(1 << UNITS), weight = expf(-distance_of(key)) * one;
  high = (u32)weight;
  low = (u32)((weight - (float)high) * one);
}

// The bin that contains unit `wanted`, which becomes the index inside it. Every warp computes it.
DEVICE u64 sum_before_u64(const Worker& w, u64 value, u64& all) {
  u64 before = 0;
  all = value;
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {
    const u64 other = shuffle_xor_u64(all, mask);
    if (w.lane & mask) before += other;
    all += other;
  }
  return before;
}
DEVICE int find_place(const Worker& w, const u64* bins, u64& wanted) {
  int from = 0, found = 0;
#pragma unroll
  for (int each = BINS / 32; each; each = each == 1 ? 0 : 1) {  // 32 runs of bins, then the 32 bins of one run
    u64 own = 0, all;
    for (int i = 0; i < each; ++i) own += load_u64(bins + from + w.lane * each + i);
    const u64 before = sum_before_u64(w, own, all);
    found = before < wanted && wanted <= before + own ? w.lane : -1;
    u64 less = found >= 0 ? before : 0;
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      const int other = shuffle_xor_int(found, mask);
      const u64 other_less = shuffle_xor_u64(less, mask);
      if (other > found) { found = other; less = other_less; }
    }
    if (found < 0) { found = 31; less = all; wanted = all + 1; }  // cannot be: a row has something to choose
    wanted -= less;
    from += found * each;
  }
  return from;
}

// The id of token number `wanted` with exactly this key. Rare, so every block searches for itself.
DEVICE int find_tie(Worker& w, int m, float top, float inverse, u32 key, int wanted) {
  const float* row = w.p->logits + (s64)m * VOCAB;
  const int low = (int)((s64)w.thread * VOCAB / COMPUTE), high = (int)((s64)(w.thread + 1) * VOCAB / COMPUTE);
  int* counts = (int*)filter_bins(w);
  int own = 0, all;
  for (int id = low; id < high; ++id) own += key_of((load4(row + id) - top) * inverse) == key;
  int before = sum_before(w, own, all);
  compute_sync();
  if (w.lane == 0) counts[w.warp] = all;
  compute_sync();
  for (int i = 0; i < w.warp; ++i) before += counts[i];
  if (before < wanted && wanted <= before + own)
    for (int id = low; id < high; ++id)
      if (key_of((load4(row + id) - top) * inverse) == key && ++before == wanted) counts[WARPS] = id;
  compute_sync();
  return counts[WARPS];
}

// One filter for all rows that use it: by count (top-k), or by weight (top-p) over what the first has left.
template <bool BY_WEIGHT>
DEVICE void find_edges(Worker& w) {
  const Control& c = *w.control;
  Edge* edges = filter_edges(w);
  u32* low_bins = filter_bins(w);
  u32* high_bins = low_bins + BINS;
  u64 wanted[MAX_ROWS / WARPS];  // of row m, in warp m % WARPS
  u32 prefix[MAX_ROWS / WARPS];
  const int low = (int)((s64)blockIdx.x * VOCAB / gridDim.x), high = (int)((s64)(blockIdx.x + 1) * VOCAB / gridDim.x);
  u32* prefixes = (u32*)(edges + MAX_ROWS);  // of every row, for all warps
  for (int pass = 0; pass < PASSES; ++pass) {
    const int shift = 20 - 10 * pass;
    for (int m = 0; m < w.rows; ++m) {
      const int s = c.sequence[m];
      const float inverse = c.inverse_temperature[s];
      const bool asks = inverse != 0.0f && (BY_WEIGHT ? c.top_p[s] < 1.0f : c.top_k[s] > 0 && c.top_k[s] < VOCAB);
      if (!asks) continue;
      float top;
      int ignored;
      best_of_all(w, m, top, ignored);
      compute_sync();
      for (int i = w.thread; i < 2 * BINS; i += COMPUTE) low_bins[i] = 0;
      compute_sync();
      const u32 wanted_prefix = pass ? prefixes[m] : 0;
      for (int id = low + w.thread; id < high; id += COMPUTE) {
        const u32 key = key_of((load4(w.p->logits + (s64)m * VOCAB + id) - top) * inverse);
        if ((pass && key >> (shift + 10) != wanted_prefix) || !inside(key, id, edges[m])) continue;
        const int bin = key >> shift & (BINS - 1);
        if (BY_WEIGHT) {
          u32 more, less;
          weight_of(key, more, less);
          if (more) add_shared(&high_bins[bin], more);
          if (less) add_shared(&low_bins[bin], less);
        } else {
          add_shared(&low_bins[bin], 1);
        }
      }
      compute_sync();
      u64* to = w.p->histogram + (((s64)BY_WEIGHT * PASSES + pass) * MAX_ROWS + m) * BINS;
      for (int i = w.thread; i < BINS; i += COMPUTE) {
        const u64 sum = ((u64)high_bins[i] << UNITS) + low_bins[i];
        if (sum) add_s64((s64*)to + i, (s64)sum);
      }
    }
    arrive(w);
    wait(w);
#pragma unroll
    for (int i = 0; i < MAX_ROWS / WARPS; ++i) {
      const int m = w.warp + i * WARPS;
      if (m >= w.rows) continue;
      const int s = c.sequence[m];
      const bool asks = c.inverse_temperature[s] != 0.0f && (BY_WEIGHT ? c.top_p[s] < 1.0f : c.top_k[s] > 0 && c.top_k[s] < VOCAB);
      if (!asks) continue;
      const u64* bins = w.p->histogram + (((s64)BY_WEIGHT * PASSES + pass) * MAX_ROWS + m) * BINS;
      if (pass == 0) {
        prefix[i] = 0;
        wanted[i] = c.top_k[s];
        if (BY_WEIGHT) {
          u64 own = 0, all;
          for (int b = 0; b < BINS / 32; ++b) own += load_u64(bins + b * 32 + w.lane);
          sum_before_u64(w, own, all);
          const double share = ceil((double)c.top_p[s] * (double)all);
          wanted[i] = share < 1.0 ? 1 : (u64)share < all ? (u64)share : all;
        }
      }
      const int bin = find_place(w, bins, wanted[i]);
      prefix[i] = prefix[i] << 10 | bin;
      if (w.lane == 0) prefixes[m] = prefix[i];
      if (pass == PASSES - 1) {
        // How many tokens have exactly this key, and how many of them are kept.
        u64 each = 1;
        if (BY_WEIGHT) {
          u32 more, less;
          weight_of(prefix[i], more, less);
          each = ((u64)more << UNITS) + less;
        }
        const u64 ties = each ? load_u64(bins + bin) / each : 1, taken = each ? (wanted[i] + each - 1) / each : 1;
        if (w.lane == 0) {
          if (edges[m].key != prefix[i]) edges[m].id = VOCAB;
          edges[m].key = prefix[i];
          if (taken < ties && prefix[i] < HOPELESS) edges[m].id = -(int)taken;  // to be looked up
        }
      }
    }
    compute_sync();
  }
  for (int m = 0; m < w.rows; ++m) {
    const int s = c.sequence[m];
    if (edges[m].id >= 0) continue;
    float top;
    int ignored;
    best_of_all(w, m, top, ignored);
    const int id = find_tie(w, m, top, c.inverse_temperature[s], edges[m].key, -edges[m].id);
    compute_sync();
    if (w.thread == 0) edges[m].id = id;
    compute_sync();
  }
}
// Called long before the histogram is needed, so that a barrier is in between.
DEVICE void clear_histogram(Worker& w) {
  const int each = w.rows * BINS;
  for (int i = blockIdx.x * COMPUTE + w.thread; i < 2 * PASSES * each; i += gridDim.x * COMPUTE)
    w.p->histogram[(s64)(i / each) * MAX_ROWS * BINS + i % each] = 0;
}
// Computes the edge of every row that draws. Returns the barriers passed.
DEVICE_APART u32 find_all_edges(Worker w) {
  const Control& c = *w.control;
  bool by_count = false, by_weight = false;
  for (int s = 0; s < c.sequences; ++s) {
    by_count |= c.top_k[s] > 0;
    by_weight |= c.top_p[s] < 1.0f;
  }
  compute_sync();  // the scratch is free
  if (w.thread < MAX_ROWS) {
    filter_edges(w)[w.thread].key = 0xffffffffu;
    filter_edges(w)[w.thread].id = VOCAB;
  }
  compute_sync();
  if (by_count) find_edges<false>(w);
  if (by_weight) find_edges<true>(w);
  return w.arrivals;
}
