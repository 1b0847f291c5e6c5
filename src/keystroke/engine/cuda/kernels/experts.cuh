// Mixtures of experts: which experts the rows of a step use, and the products with them. Every block derives the same experts
// from the same scores. A row's result does not depend on other rows: an expert that several rows use is read once, and its
// products with rows that do not use it are discarded.

#if EXPERTS
// The rank of an expert among those of row m, or -1.
DEVICE int rank_of(const Worker& w, int m, int expert) {
  int found = -1;
#pragma unroll
  for (int k = 0; k < USED_EXPERTS; ++k) found = w.routing->expert[m][k] == expert ? k : found;
  return found;
}
// A single row lists its experts by rank, so that their number and every block's share of them are the same in all layers.
constexpr bool BY_RANK = SINGLE && !HOST_EXPERTS;
// The rank of slot `slot` for row m, or -1.
DEVICE int rank_in(const Worker& w, int m, int slot) { return BY_RANK ? slot : rank_of(w, m, w.routing->listed[slot]); }

DEVICE float router_bias(const Worker& w, int layer, int e) {
  return EXPERT_BIAS && e < EXPERTS ? w.p->router_biases[layer * EXPERTS + e] : 0.0f;
}
// Scores of this block's experts for every row of the operand. `bias` is that of the first one.
DEVICE void score_experts(Worker& w, int layer, float bias) {
  for_scores(w, ALL_EXPERTS, every_block(), [&](int e, int m, float sum) {
    const float added = e == blockIdx.x ? bias : router_bias(w, layer, e);
    w.p->expert_scores[m * ALL_EXPERTS + e] = tagged(sum + added, tag_of(layer));
  });
}

// Scores `from` on, as many as a lane has.
template <int N, bool ALIGNED>
DEVICE void load_scores(const u32* from, u32 (&raw)[N]) {
  if constexpr (ALIGNED) {
    ask(from, raw);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) raw[i] = relaxed_load(from + i);
  }
}

#if EARLY
template <int N>
DEVICE void add_parts(const Parameters& p, int m, int from, u32 tag, float (&scores)[N]);
// Whether several warps add up a single row's scores before one of them ranks them.
constexpr bool ADDED_TOGETHER = SINGLE && EARLY_WARPS > 1;
#else
constexpr bool ADDED_TOGETHER = false;
#endif
// The experts of row m with the highest scores, in descending order, and their weights; done by one warp, with room for `scores` (or these,
// if they were added together). Scores
// that differ only in the last EXPERT_BITS bits count as equal, and the first expert wins: one number then encodes score and expert.
constexpr int EXPERT_BITS = EXPERTS > 256 ? 9 : EXPERTS > 128 ? 8 : EXPERTS > 64 ? 7 : 6;
constexpr int EXPERT_TURNS = (ALL_EXPERTS + COMPUTE - 1) / COMPUTE;
DEVICE void rank_experts(Worker& w, int m, u32 tag, float* scores) {
  constexpr int EACH = EXPERTS / 32, MASK = (1 << EXPERT_BITS) - 1, LEAST = -2147483647 - 1;
  static_assert(EXPERTS % 32 == 0 && EXPERTS <= 512, "every lane has as many experts");
  float each[EACH];
  float factor = 1.0f;  // of all scores
#if EARLY
  if constexpr (ADDED_TOGETHER) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) each[i] = scores[w.lane * EACH + i];
  } else {
    add_parts(*w.p, m, w.lane * EACH, tag, each);
  }
#else
  constexpr bool ALIGNED = SINGLE || ALL_EXPERTS % 4 == 0;
  const u32* from = (const u32*)w.p->expert_scores + m * ALL_EXPERTS + w.lane * EACH;
  u32 raw[EACH], shared = SHARED_EXPERT ? relaxed_load(from - w.lane * EACH + EXPERTS) : 0;
  load_scores<EACH, ALIGNED>(from, raw);
  while (true) {
    u32 off = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) off |= raw[i] ^ tag;
    if (!(off & 3)) break;
    spin();
    load_scores<EACH, ALIGNED>(from, raw);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) each[i] = untagged(raw[i]);
#endif
  warp_sync();
  int keys[EACH], mine = 0;  // the k-th best, of lane k
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    keys[i] = (ordered(each[i]) & ~MASK) | (MASK - (w.lane * EACH + i));
    if (!ADDED_TOGETHER) scores[w.lane * EACH + i] = each[i];
  }
#pragma unroll 1  // one warp runs this while all blocks wait: a loop has fewer instructions to fetch
  for (int k = 0; k < TOP_EXPERTS; ++k) {
    int best = keys[0];
#pragma unroll
    for (int i = 1; i < EACH; ++i) best = keys[i] > best ? keys[i] : best;
    best = warp_max(best);
#pragma unroll
    for (int i = 0; i < EACH; ++i) keys[i] = keys[i] == best ? LEAST : keys[i];
    if (w.lane == k) mine = best;
  }
  const int expert = MASK - (mine & MASK);
  if (w.lane < TOP_EXPERTS) {
    w.routing->expert[m][w.lane] = (u16)expert;
    if (BY_RANK) w.routing->listed[w.lane] = (u16)expert;
  }
  if (BY_RANK && SHARED_EXPERT && w.lane == 0) w.routing->listed[TOP_EXPERTS] = EXPERTS;
  warp_sync();
  if (BY_RANK && w.lane == 0) barrier_arrive(w.routed);  // the streaming warp needs no weights
#if EARLY
  if (SINGLE) barrier_wait(early_there(w, BEFORE_EXPERTS), w.parity);
  factor = early_norm(w, false, m).x * (1.0f / ACTIVATION_SCALE);
#endif
  const float top = scores[w.routing->expert[m][0]];
  const float power = w.lane < TOP_EXPERTS ? __expf((scores[expert] - top) * factor) : 0.0f;
  float all = power;
  if (EXPERT_SOFTMAX_OF_ALL) {
    all = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) all += __expf((each[i] - top) * factor);
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) all += shuffle_xor(all, mask);
  warp_sync();
  if (w.lane < TOP_EXPERTS) w.routing->weight[m][w.lane] = power / all * EXPERT_SCALE;
  if (!SHARED_EXPERT) return;
  if (w.lane == TOP_EXPERTS) {
    float score[1];
#if EARLY
    if constexpr (ADDED_TOGETHER) score[0] = scores[EXPERTS];
    else add_parts(*w.p, m, EXPERTS, tag, score);
#else
    while ((shared ^ tag) & 3) {
      spin();
      shared = relaxed_load((const u32*)w.p->expert_scores + m * ALL_EXPERTS + EXPERTS);
    }
    score[0] = untagged(shared);
#endif
    w.routing->expert[m][TOP_EXPERTS] = EXPERTS;
    w.routing->weight[m][TOP_EXPERTS] = quotient(1.0f, 1.0f + __expf(-score[0] * factor));
  }
  warp_sync();
}

// Distinct experts of all rows, in ascending order.
DEVICE void list_experts(Worker& w, int layer) {
  Routing& r = *w.routing;
  compute_sync();
  for (int e = w.thread; e < EXPERT_TURNS * COMPUTE; e += COMPUTE) {
    bool used = false;
    if (e < ALL_EXPERTS)
      for (int m = 0; m < w.rows; ++m) used |= rank_of(w, m, e) >= 0;
#if HOST_EXPERTS
    const int place = used ? place_of(w, layer, e) : ON_HOST;
    used = place != ON_HOST;
#endif
    const u32 word = (u32)warp_sum(used ? (int)(1u << w.lane) : 0);
    if (w.lane == 0 && e < ALL_EXPERTS) r.used[e / 32] = word;
  }
  compute_sync();
  for (int e = w.thread; e < ALL_EXPERTS; e += COMPUTE) {
    int before = 0;
    for (int i = 0; i < e / 32; ++i) before += count_bits(r.used[i]);
    const u32 word = r.used[e / 32];
    before += count_bits(word & ((1u << e % 32) - 1));
    if (word >> e % 32 & 1) r.listed[before] = (u16)e;
#if HOST_EXPERTS
    if (word >> e % 32 & 1) r.place[before] = (u16)place_of(w, layer, e);
#endif
    if (e == ALL_EXPERTS - 1) r.slots = before + (word >> e % 32 & 1);
  }
}

// Determines which experts this layer's rows use, from the normalised rows in the operand, and signals the streaming warp.
DEVICE void choose_experts(Worker& w, int layer, float bias) {
  Routing& r = *w.routing;
  // A block without a share of anything could be two layers ahead of its streaming warp, which would then wait for ever.
  if (!BY_RANK && layer > 0 && w.thread == 0) barrier_wait(w.taken, (layer - 1) & 1);
  compute_sync();  // the operand is there, and nobody reads the last layer's routing
  if constexpr (EARLY && SINGLE) {  // the tenth warp has chosen, and weighs them by the norm
    show_early(w, BEFORE_EXPERTS);
    wait_early_scores(w, BEFORE_EXPERTS);
    return;
  }
  if (!EARLY) score_experts(w, layer, bias);
  float* scores = w.scratch + 2 * MAX_ROWS * WARPS + w.warp * EXPERTS;  // behind what `for_scores` needs
  for (int m = w.warp; m < w.rows; m += WARPS) rank_experts(w, m, tag_of(layer), scores);
  if constexpr (BY_RANK) {
    compute_sync();
    return;
  }
#if HOST_EXPERTS
  if (w.rows == 1) list_resident(w, layer);
  else list_experts(w, layer);
  compute_sync();
#else
  if (w.rows == 1) {  // its experts in any order; the warp that ranked them knows them
    if (w.thread < USED_EXPERTS) r.listed[w.thread] = r.expert[0][w.thread];
    if (w.thread == 0) r.slots = USED_EXPERTS;
  } else {
    list_experts(w, layer);
  }
  compute_sync();
#endif
  if (w.thread == 0) {
    ((Span*)w.spans)[GATE_UP] = share(r.slots * GateUp::units, GATE_UP);
    ((Span*)w.spans)[DOWN] = share(r.slots * Down::units, DOWN);
    barrier_arrive(w.routed);
  }
  compute_sync();
#if HOST_EXPERTS
  send_rows(w, layer);
#endif
}

// A block's share of the units of a step's experts: calls each(first unit, end, expert, unit 0 of that expert).
template <class M, class Each>
DEVICE void for_experts(const Routing& r, const Span& span, const Each& each) {
  for (int from = span.low; from < span.high;) {
    const int slot = from / M::units, end = (slot + 1) * M::units < span.high ? (slot + 1) * M::units : span.high;
    each(from, end, (int)r.listed[slot], slot * M::units);
    from = end;
  }
}

// Bytes of a layer's matrices of one kind: M of the experts that are on the GPU, S of a shared one with formats of its own.
template <class M, class S>
DEVICE s64 bytes_of_experts(const Parameters& p) {
  return (HOST_EXPERTS ? p.resident : SHARED_APART ? EXPERTS : ALL_EXPERTS) * M::bytes + (SHARED_APART ? S::bytes : 0);
}

// The streaming warp: units of the chosen experts from unit `low` of this block's share on, those of one expert at a time.
template <class M, class S>
DEVICE Stretch stretch_of_expert(const u8* at, const Span& span, int low, const Routing& r) {
  const int slot = low / M::units, zero = slot * M::units;
#if HOST_EXPERTS
  const int place = r.place[slot];
#else
  const int place = r.listed[slot];
#endif
  const Span part = {low - zero, (zero + M::units < span.high ? zero + M::units : span.high) - zero};
  if (SHARED_APART && r.listed[slot] == EXPERTS) return stretch<S>(at + place * M::bytes, part);
  return stretch<M>(at + place * M::bytes, part);
}

// Some models clamp gate and up, and have a steeper sigmoid and an up that is one larger.
DEVICE float gated(float gate, float up) {
  if (EXPERT_LIMIT > 0.0f) {
    gate = fminf(gate, EXPERT_LIMIT);
    up = fminf(fmaxf(up, -EXPERT_LIMIT), EXPERT_LIMIT);
    return quotient(gate, 1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
  }
  return quotient(gate, 1.0f + __expf(-gate)) * up;
}

// Gate and up of the chosen experts. An activation is multiplied by its expert's weight, so that the down projections only add.
DEVICE void activate_experts(Worker& w) {
  const Span span = w.spans[GATE_UP];
  const auto finish = [&](int unit, int, int g, int m, float low, float high) {
    const int k = rank_in(w, m, unit / GateUp::units);
    if (k < 0) return;
    const s64 at = (s64)m * INTERMEDIATE + k * EXPERT_WIDTH + unit % GateUp::units * 8 + g;
    const u16 v = activation(gated(low, high) * w.routing->weight[m][k]);
    if (tags_activations(w)) w.p->tagged[at] = (u32)v << 16 | activation_tag(w);
    else w.p->activated[at] = v;
  };
  const auto whole = [](int, int) { return 0; };
  if constexpr (GateUp::together <= 1 && !SHARED_APART) multiply<GateUp>(w, span.low, span.high, whole, finish);
  else
    for_experts<GateUp>(*w.routing, span, [&](int from, int end, int expert, int) {
      if (SHARED_APART && expert == EXPERTS) multiply<SharedGateUp>(w, from, end, whole, finish);
      else multiply<GateUp>(w, from, end, whole, finish);
    });
}

// Activations of `slots` experts from `first` on into the operand, for the rows that use them: each at its rank's position, or at
// the beginning of the row.
DEVICE void load_expert_activations(Worker& w, int first, int slots, bool whole, bool tags) {
  constexpr int QUADS = EXPERT_WIDTH / 4;
  // Turns whose loads are under way together. For a single row most blocks have one expert, which may need fewer.
  constexpr int TURNS = SINGLE ? least((QUADS + COMPUTE - 1) / COMPUTE, 4) : 4;
  const int total = slots * w.rows * QUADS;
  for (int base = w.thread; base < total; base += TURNS * COMPUTE) {
    uint4 v[TURNS];
    int from[TURNS];
    const auto ask = [&](int at) {
      if (tags) return poll16(w.p->tagged + at);
      const uint2 two = poll8(w.p->activated + at);
      return make_uint4(two.x, two.y, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int at = base + i * COMPUTE, part = at / QUADS, m = part % w.rows;
      from[i] = -1;
      if (at >= total) continue;
      const int k = rank_in(w, m, first + part / w.rows);
      if (k < 0) continue;
      from[i] = m * INTERMEDIATE + k * EXPERT_WIDTH + at % QUADS * 4;
      v[i] = ask(from[i]);
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (from[i] < 0) continue;
      if (tags) {
        while (missing(v[i], activation_tag(w))) {
          spin();
          v[i] = ask(from[i]);
        }
        const uint2 halves = upper_halves(v[i]);
        v[i].x = halves.x;
        v[i].y = halves.y;
      }
      const int m = from[i] / INTERMEDIATE, column = from[i] % INTERMEDIATE;
      *(uint2*)(w.operand + m * w.p->x_stride + (whole ? column : column % EXPERT_WIDTH)) = make_uint2(v[i].x, v[i].y);
    }
  }
}

// The experts' activations, if a row of the operand holds all of them. Waits for the previous phase.
DEVICE void receive_activations(Worker& w) {
  const Span span = w.spans[DOWN];
  const bool tags = tags_activations(w);
  // Tagged activations need no barrier: a block that still reads them has yet to add to the residual stream, without which no
  // other reaches the next layer's gate and up projection.
  if (tags) compute_sync();  // the operand is no longer needed
  else wait(w);
  mark(w);
  const u32 seen = tags ? ask_readers(w) : 0;
  if (takes_whole(w) && span.low < span.high)
    load_expert_activations(w, span.low / Down::units, (span.high - 1) / Down::units + 1 - span.low / Down::units, true, tags);
  if (tags) check_readers(w, seen);  // a block without a share too: its next announcement must not be counted as another's of this
  if (takes_whole(w)) compute_sync();
}
template <class M, class Column, class Finish, class BiasShare>
DEVICE void multiply_down(Worker& w, int from, int end, int base, const Column& column, const Finish& finish, const BiasShare& share) {
  if constexpr (M::blocks >= 3 * WARPS) multiply<M>(w, from, end, column, finish, share);  // long units are divided among warps
  else multiply_alone<M>(w, from, end, column, finish, base, share);
}
// The down projections of the chosen experts, added to the residual stream.
template <class M>
DEVICE void add_experts(Worker& w) {
  const Span span = w.spans[DOWN];
  const Routing& r = *w.routing;
  const bool whole = takes_whole(w);
  for_experts<M>(r, span, [&](int from, int end, int expert, int zero) {
    const int slot = zero / M::units;
    if (!whole) {
      compute_sync();  // the operand is no longer needed
      load_expert_activations(w, slot, 1, false, false);
      compute_sync();
    }
    const auto column = [&](int, int m) {
      const int k = whole ? rank_in(w, m, slot) : 0;
      return k > 0 ? k * EXPERT_WIDTH : 0;
    };
    const auto finish = [&](int unit, int, int g, int m, float low, float high) {
      if (rank_in(w, m, slot) >= 0) add_rows(w, unit, g, m, low, high);
    };
    const auto share = [&](int, int m) {  // of a bias: activations were multiplied by their expert's weight before
      const int k = EXPERT_BIAS ? rank_in(w, m, slot) : -1;
      return k < 0 ? 0.0f : w.routing->weight[m][k];
    };
    if (SHARED_APART && expert == EXPERTS) multiply_down<SharedDown>(w, from, end, span.low, column, finish, share);
    else multiply_down<M>(w, from, end, span.low, column, finish, share);
  });
}
#endif
