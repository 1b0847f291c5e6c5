// The layer's matrix products: what each needs in the operand, and where its results go.
// One function per phase; decode.cu calls them in order.

DEVICE float activation_value(u16 v) { return HALF ? f16_value(v) : bf16_value(v); }
// Products of this block's rows (`mine`) of a narrow matrix of floats, of `count` in all, with every row of the operand: put(row, m,
// product). Every warp has an eighth of the columns.
DEVICE float add_quad(float sum, const float4& r, const uint2& v) {
  const float first = fmaf(r.y, activation_value((u16)(v.x >> 16)), r.x * activation_value((u16)v.x));
  return sum + fmaf(r.w, activation_value((u16)(v.y >> 16)), fmaf(r.z, activation_value((u16)v.y), first));
}
template <class Put>
DEVICE void for_scores(Worker& w, int count, const Every& mine, const Put& put) {
  constexpr int QUADS = HIDDEN / 4, PART = (QUADS + WARPS - 1) / WARPS;
  float* parts = w.scratch;  // [rows][WARPS], of each of two products in turn
  for (int e = mine.first, turn = 0; e < count; e += mine.step, turn ^= MAX_ROWS * WARPS) {
    barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
    const float4* weights = (const float4*)(w.ring.stages + w.ring.at.stage * STAGE);
    const int end = (w.warp + 1) * PART < QUADS ? (w.warp + 1) * PART : QUADS;
    for (int m = 0; m < w.rows; ++m) {
      const uint2* x = (const uint2*)(w.operand + m * w.p->x_stride);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < (PART + 31) / 32; ++i) {
        const int at = w.warp * PART + i * 32 + w.lane;
        if (at >= end) continue;
        sum = add_quad(sum, weights[at], x[at]);
      }
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
      if (w.lane == 0) parts[turn + m * WARPS + w.warp] = sum;
    }
    compute_sync();
    if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
    w.ring.at.advance(w.ring.count);
    if (w.thread < w.rows) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += parts[turn + w.thread * WARPS + i];
      put(e, w.thread, sum * (1.0f / ACTIVATION_SCALE));
    }
  }
}

// Residual stream: fixed-point sums do not depend on the order in which blocks add to them.
DEVICE s64 counted(float v) { return to_s64(v * FIXED_ONE) * (1 << COUNT_BITS) + 1; }
DEVICE bool complete(const uint4& raw, u32 sums) { return (((raw.x ^ sums) | (raw.z ^ sums)) & ((1 << COUNT_BITS) - 1)) == 0; }
// Two conversions of 32 bits, which GPUs do faster than one of 64; rounded once, as that, for numbers below 65,536.
DEVICE float value_of(u32 low, u32 high) {
  constexpr float upper = (float)(1 << (32 - COUNT_BITS)) / FIXED_ONE;
  return fmaf((float)(int)high, upper, (float)(low >> COUNT_BITS) * (1.0f / FIXED_ONE));
}
DEVICE void add_residual(Worker& w, int m, int row, float v) {
  if (!(fabsf(v) < LARGEST_TERM)) { w.p->barrier[2] = 1; v = 0.0f; }
  add_s64(w.p->residual + (s64)m * HIDDEN + row, counted(v));
}

// Whether turn i of all threads over `count` items has one for this thread.
DEVICE bool within(const Worker& w, int i, int count) { return (i + 1) * COMPUTE <= count || i * COMPUTE + w.thread < count; }

constexpr int NORM_PAIRS = (HIDDEN / 2 + COMPUTE - 1) / COMPUTE;
struct NormWeights { float2 v[NORM_PAIRS]; };
DEVICE NormWeights load_norm(Worker& w, int index) {
  NormWeights n;
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    const int at = i * COMPUTE + w.thread;
    n.v[i] = within(w, i, HIDDEN / 2) ? ((const float2*)(w.p->norms + (s64)index * HIDDEN))[at] : make_float2(0, 0);
  }
  return n;
}
// Numbers that lack sums are loaded again, all at once: the barrier before this does not wait for memory.
DEVICE void normalise_row(Worker& w, const NormWeights& weights, u32 sums, int m, u16* to, int matrix) {
  const s64* from = w.p->residual + m * HIDDEN + w.thread * 2;
  uint4 raw[NORM_PAIRS];
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    raw[i] = make_uint4(sums, 0, sums, 0);
    if (within(w, i, HIDDEN / 2)) raw[i] = poll16(from + i * COMPUTE * 2);
  }
  while (true) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < NORM_PAIRS; ++i) all &= complete(raw[i], sums);
    if (all) break;
    spin();
#pragma unroll
    for (int i = 0; i < NORM_PAIRS; ++i)
      if (!complete(raw[i], sums)) raw[i] = poll16(from + i * COMPUTE * 2);
  }
  float2 v[NORM_PAIRS];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    v[i] = make_float2(value_of(raw[i].x, raw[i].y), value_of(raw[i].z, raw[i].w));  // 0 where there is none
    sum += v[i].x * v[i].x + v[i].y * v[i].y;
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  float* parts = w.small + (m & 1) * WARPS;
  if (w.lane == 0) parts[w.warp] = sum;
  compute_sync();
  sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += parts[i];
  const float inverse = inverse_root(sum / HIDDEN + NORM_EPS);
  const bool before = matrix == QKV || (DELTA_LAYERS && matrix == DELTA_SPAN);
  if (EARLY && matrix != HEAD && w.thread == 0) keep_norm(w, before, m, make_float2(inverse, (sum / HIDDEN + NORM_EPS) * inverse));
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    const int at = i * COMPUTE + w.thread;
    if (!within(w, i, HIDDEN / 2)) continue;
    const float2 plain = make_float2(v[i].x * inverse, v[i].y * inverse);
    ((u32*)to)[at] = pack_activation(plain.x * weights.v[i].x, plain.y * weights.v[i].y);
    if (EARLY && before) keep_early(w, m, at, pack_activation(plain.x, plain.y));
  }
}

// Copies `width` columns of 16-bit activations from device memory into the operand, from column `to` on; each row after
// ready(m) returns.
template <class Ready>
DEVICE void load_rows(Worker& w, const u16* from, int stride, int to, int width, const Ready& ready) {
  if (w.thread == 0) expect_copies(w.arrival, w.rows * width * 2);
  if (asks(w.lane))
    for (int m = w.warp; m < w.rows; m += WARPS) {
      ready(m);
      fence_copies();
      copy_kept(w.operand + m * w.p->x_stride + to, from + (s64)m * stride, width * 2, w.arrival);
    }
  end_copies(w.arrival);
  barrier_wait(w.arrival, w.loads++ & 1);
}

// Whether complete sums alone keep a single row's phases apart: every block has a part of every matrix, or checks in its place
// (GUARDED), and all it passes on is tagged or counted. The O projection's sums are then announced before they are computed,
// which takes as long as the announcement.
constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int LEAST_QKV = least(QKV_UNITS, (int)(QKV_COST / (QK_COST > VALUE_COST ? QK_COST : VALUE_COST)));
constexpr int LEAST_UNITS = least(least(LEAST_QKV, Output::units), USED_EXPERTS * least(GateUp::units, Down::units));
DEVICE bool announces_sums_early() { return GUARDED || (SINGLE && TAGS && !HOST_EXPERTS && gridDim.x <= LEAST_UNITS); }

// Fills the operand with the normalised residual rows, of `sums` sums each. Waits for the previous phase.
DEVICE void normalise(Worker& w, int index, int sums, int matrix) {
  const NormWeights weights = load_norm(w, index);
  const Span span = w.spans[matrix];
  // Every block has scores; early ones before attention too.
  const bool needed = span.low < span.high || (MIXTURE && matrix == GATE_UP) || (DELTA_LAYERS && matrix == DELTA_SPAN) || (EARLY && matrix == QKV);
  wait_early(w);
  if (normalises_all(w)) {
    if (needed)
      for (int m = 0; m < w.rows; ++m) normalise_row(w, weights, sums, m, w.operand + (s64)m * w.p->x_stride, matrix);
  } else {
    // With more rows, each block normalises at most one and counts it as done; the others wait for that counter only.
    u32* done = w.p->barrier + NORMED;
    for (int m = blockIdx.x; m < w.rows; m += gridDim.x) {
      normalise_row(w, weights, sums, m, w.p->normed + (s64)m * HIDDEN, matrix);
      compute_sync();
      if (w.thread == 0) release_add(&done[m], 1);
    }
    if (needed)
      load_rows(w, w.p->normed, HIDDEN, 0, HIDDEN, [&](int m) {
        while (acquire_load(&done[m]) <= index) spin();
      });
  }
}

DEVICE void store_key(Worker& w, int layer, int m, int head, int d, float v) {
  const int slot = position_of(*w.control, m) % PAGE;
  store(w.p->keys + layer * w.p->kv_layer_stride + (((s64)w.pages[m] * KV_HEADS + head) * PAGE + slot) * HEAD_DIM + d, v);
}
DEVICE void store_value(Worker& w, int layer, int m, int head, int d, float v) {
  const int slot = position_of(*w.control, m) % PAGE;
  store(w.p->values + layer * w.p->kv_layer_stride + (((s64)w.pages[m] * KV_HEADS + head) * HEAD_DIM + d) * PAGE + slot, v);
}
DEVICE float2 rotate(float2 v, float2 angle) {
  return make_float2(v.x * angle.x - v.y * angle.y, v.y * angle.x + v.x * angle.y);
}

// Whether queries, keys and values of this step's rows are passed between blocks with the layer's tag: for few rows of a small
// layer. No block then waits for memory. (Of several rows only where their keys are near ones, in chunks of one page.)
DEVICE bool tags_queries(const Worker& w) {
  return QUERY_TAGS && w.rows <= SENT_ROWS && (SINGLE ? TAGS : w.tag && w.rows <= w.p->direct_rows);
}
// The tag of those. A single row with more partial results than can be tagged has it all the same.
DEVICE u32 sent_tag(const Worker& w) {
#if SINGLE
  return !TAGS ? 0 : HYBRID ? w.tag : w.layer_tag;
#else
  return w.tag;
#endif
}
// The tag of activations, which a single row of a hybrid has too: they are written in every layer.
DEVICE u32 activation_tag(const Worker& w) {
#if SINGLE
  return w.layer_tag;
#else
  return w.tag;
#endif
}
DEVICE void send(Worker& w, int m, int at, float v) { w.p->sent[m * QKV_ROWS + at] = (u32)bf16(v) << 16 | sent_tag(w); }
// Queries and keys before normalisation keep all bits except those of the tag.
DEVICE void send_raw(Worker& w, int m, int at, float v) { w.p->sent[m * QKV_ROWS + at] = raw_bits(v, sent_tag(w)); }

// The rotary angles of row m in this layer.
DEVICE const float2* angles_of(const Worker& w, int layer, int m) {
  return w.rope + (WINDOW_ROPE && windowed(layer) ? ROPE_ENTRIES : 0) + m * (HEAD_DIM / 2);
}

DEVICE void project_qkv(Worker& w, int layer) {
  const Span span = w.spans[QKV];
  compute_sync();  // the operand is there
  show_early(w, BEFORE_ATTENTION);
  const auto whole = [](int, int) { return 0; };
  const auto value = [&](int unit, int, int g, int m, float low, float high) {
    const int head = unit / (HEAD_DIM / 16), tile = unit % (HEAD_DIM / 16);
    if (tags_queries(w)) {
      send(w, m, (HEADS + KV_HEADS) * HEAD_DIM + unit * 16 + g, low);
      send(w, m, (HEADS + KV_HEADS) * HEAD_DIM + unit * 16 + g + 8, high);
    }
    store_value(w, layer, m, head, tile * 16 + g, low);
    store_value(w, layer, m, head, tile * 16 + g + 8, high);
  };
  const auto finish = [&](int unit, int i, int g, int m, float low, float high) {
    const int head = unit / (HEAD_DIM / 16), tile = unit % (HEAD_DIM / 16);
    if (!VALUES_APART && head >= HEADS + KV_HEADS + GATE_HEADS) {
      value(unit - (HEADS + KV_HEADS + GATE_HEADS) * HEAD_DIM / 16, i, g, m, low, high);
      return;
    }
    if (GATED && head >= HEADS + KV_HEADS) {
      float* to = w.p->gates + (s64)m * GATE_WIDTH + (head - HEADS - KV_HEADS) * HEAD_DIM + tile * 16 + g;
      to[0] = tagged(quotient(1.0f, 1.0f + __expf(-low)), sent_tag(w));
      to[8] = tagged(quotient(1.0f, 1.0f + __expf(-high)), sent_tag(w));
      return;
    }
    const int d = tile * 8 + g;  // a tile of Q or K holds eight dimensions and their rotary partners
    if (QK_NORM) {
      if (tags_queries(w)) {
        send_raw(w, m, head * HEAD_DIM + d, low);
        send_raw(w, m, head * HEAD_DIM + d + HEAD_DIM / 2, high);
        return;
      }
      float* to = w.p->raw + (s64)m * QKV_ROWS + head * HEAD_DIM + d;
      to[0] = __uint_as_float(raw_bits(low, 0));
      to[HEAD_DIM / 2] = __uint_as_float(raw_bits(high, 0));
      return;
    }
    const float2 v = rotate(make_float2(low, high), angles_of(w, layer, m)[d]);
    if (tags_queries(w)) {
      send(w, m, head * HEAD_DIM + d, v.x);
      send(w, m, head * HEAD_DIM + d + HEAD_DIM / 2, v.y);
      if (head < HEADS) return;
    }
    if (head < HEADS) {
      u16* to = w.p->queries + (s64)m * QUERY_WIDTH + head * HEAD_DIM + d;
      to[0] = query(v.x);
      to[HEAD_DIM / 2] = query(v.y);
    } else {
      store_key(w, layer, m, head - HEADS, d, v.x);
      store_key(w, layer, m, head - HEADS, d + HEAD_DIM / 2, v.y);
    }
  };
  const Span first = until(span, QK_UNITS);
  multiply<Qkv>(w, first.low, first.high, whole, finish);
  if constexpr (VALUES_APART) {
    const Span second = beyond(span, QK_UNITS);
    multiply<ValueRows>(w, second.low, second.high, whole, value);
  }
}

// For models that normalise each head of Q and K: one warp per head. A lane has dimensions lane * EACH + e and their rotary partners.
constexpr int HEAD_EACH = HEAD_DIM / 64;
struct HeadPart { float2 v[HEAD_EACH]; };
DEVICE HeadPart head_weights(const Worker& w, int layer, bool key) {
  const float* from = w.p->qk_norms + (s64)(layer * 2 + key) * HEAD_DIM + w.lane * HEAD_EACH;
  HeadPart weights;
#pragma unroll
  for (int e = 0; e < HEAD_EACH; ++e) weights.v[e] = make_float2(from[e], from[e + HEAD_DIM / 2]);
  return weights;
}
DEVICE void normalise_head(const Worker& w, int layer, int m, const HeadPart& weights, HeadPart& part) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < HEAD_EACH; ++e) sum += part.v[e].x * part.v[e].x + part.v[e].y * part.v[e].y;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  const float inverse = inverse_root(sum / HEAD_DIM + NORM_EPS);
#pragma unroll
  for (int e = 0; e < HEAD_EACH; ++e) {
    const int d = w.lane * HEAD_EACH + e;
    const float2 scaled = make_float2(part.v[e].x * inverse * weights.v[e].x, part.v[e].y * inverse * weights.v[e].y);
    part.v[e] = rotate(scaled, angles_of(w, layer, m)[d]);
  }
}
// Runs between the projection and attention if heads are not sent to the attending blocks.
DEVICE void normalise_heads(Worker& w, int layer) {
  const int total = w.rows * (HEADS + KV_HEADS);
  for (int at = blockIdx.x + w.warp * gridDim.x; at < total; at += gridDim.x * WARPS) {
    const int m = at / (HEADS + KV_HEADS), head = at % (HEADS + KV_HEADS);
    const float* from = w.p->raw + (s64)m * QKV_ROWS + head * HEAD_DIM;
    HeadPart part;
#pragma unroll
    for (int e = 0; e < HEAD_EACH; ++e) {
      const int d = w.lane * HEAD_EACH + e;
      part.v[e] = make_float2(load4(from + d), load4(from + d + HEAD_DIM / 2));
    }
    normalise_head(w, layer, m, head_weights(w, layer, head >= HEADS), part);
#pragma unroll
    for (int e = 0; e < HEAD_EACH; ++e) {
      const int d = w.lane * HEAD_EACH + e;
      const float2 v = part.v[e];
      if (head < HEADS) {
        u16* to = w.p->queries + (s64)m * QUERY_WIDTH + head * HEAD_DIM + d;
        to[0] = query(v.x);
        to[HEAD_DIM / 2] = query(v.y);
      } else {
        store_key(w, layer, m, head - HEADS, d, v.x);
        store_key(w, layer, m, head - HEADS, d + HEAD_DIM / 2, v.y);
      }
    }
  }
}

// A unit of a matrix that adds to the residual stream: 16 of its rows.
DEVICE void add_rows(Worker& w, int unit, int g, int m, float low, float high) {
  const int row = unit % (HIDDEN / 16) * 16 + g;
  add_residual(w, m, row, low);
  add_residual(w, m, row + 8, high);
}
DEVICE void project_output(Worker& w) {
  const Span span = w.spans[OUTPUT];
  const auto column = [](int unit, int) { return unit / (HIDDEN / 16) * Output::inner; };
  const auto finish = [&](int unit, int, int g, int m, float low, float high) { add_rows(w, unit, g, m, low, high); };
  compute_sync();  // the operand is there
  show_early(w, BEHIND_ATTENTION);
  if (announces_sums_early()) arrive_early(w);
  if constexpr (O_ALONE) multiply_alone<Output>(w, span.low, span.high, column, finish, span.low);
  else multiply<Output>(w, span.low, span.high, column, finish);
}
// Whether the operand holds any part of a row of activations at its own position; and whether activations are tagged.
DEVICE bool takes_whole(const Worker& w) { return SINGLE ? WHOLE : w.p->x_stride >= INTERMEDIATE + PAD; }
DEVICE bool tags_activations(const Worker& w) {
  return ACTIVATION_TAGS && takes_whole(w) && (SINGLE ? LAYERS > 1 : w.tag && w.rows <= w.p->direct_rows);
}
DEVICE void project_gate_up(Worker& w) {
  const Span span = w.spans[GATE_UP];
  compute_sync();  // the operand is there
  multiply<GateUp>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int m, float low, float high) {
    const s64 at = (s64)m * INTERMEDIATE + unit * 8 + g;
    const u16 v = activation(quotient(low, 1.0f + __expf(-low)) * high);
    if (tags_activations(w)) w.p->tagged[at] = (u32)v << 16 | activation_tag(w);
    else w.p->activated[at] = v;
  });
}
// Parts of few rows of activations, from `first` on, each at its own position in the operand: threads load them faster than the
// copy engine. Tagged values are loaded until the tag is this layer's. Waits for the previous phase after computing addresses; of
// tagged ones no block can write the next layer's before this one, which has read them, adds to the residual stream.
DEVICE void load_activated(Worker& w, int first, int parts) {
  constexpr int TURNS = (Down::inner / 4 + COMPUTE - 1) / COMPUTE;
  const bool tags = tags_activations(w);
  const int at = first * Down::inner + w.thread * 4;
  const u32* tagged = w.p->tagged + at;
  const u16* plain = w.p->activated + at;
  u16* to = w.operand + at;
  const u32 seen = GUARDED ? ask_readers(w) : 0;
  if (GUARDED) compute_sync();  // the operand is no longer needed
  else if (tags) wait_early(w);
  else wait(w);
  mark(w);
  for (int m = 0; m < w.rows; ++m)
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const int from = m * INTERMEDIATE + part * Down::inner;
      uint4 v[TURNS];
#pragma unroll
      for (int i = 0; i < TURNS; ++i)
        if (within(w, i, Down::inner / 4)) {
          if (tags) {
            v[i] = poll16(tagged + from + i * COMPUTE * 4);
          } else {
            const uint2 two = poll8(plain + from + i * COMPUTE * 4);
            v[i] = make_uint4(two.x, two.y, 0, 0);
          }
        }
#pragma unroll
      for (int i = 0; i < TURNS; ++i)
        if (within(w, i, Down::inner / 4)) {
          if (tags) {
            while (missing(v[i], activation_tag(w))) {
              spin();
              v[i] = poll16(tagged + from + i * COMPUTE * 4);
            }
            v[i] = make_uint4(permute_bytes(v[i].x, v[i].y, 0x7632), permute_bytes(v[i].z, v[i].w, 0x7632), 0, 0);
          }
          *(uint2*)(to + m * w.p->x_stride + part * Down::inner + i * COMPUTE * 4) = make_uint2(v[i].x, v[i].y);
        }
    }
  if (GUARDED) check_readers(w, seen);
}
// Waits for the previous phase. M is the format of this layer's matrix; its share and splits do not depend on it.
template <class M>
DEVICE void project_down(Worker& w) {
  constexpr int TILES = HIDDEN / 16;
  const Span span = w.spans[DOWN];
  const bool whole = takes_whole(w), direct = whole && (SINGLE || w.rows <= w.p->direct_rows);
  const auto finish = [&](int unit, int, int g, int m, float low, float high) { add_rows(w, unit, g, m, low, high); };
  if (direct) load_activated(w, span.low / TILES, span.low < span.high ? (span.high - 1) / TILES + 1 - span.low / TILES : 0);
  else {
    wait(w);
    mark(w);
  }
  for (int from = span.low; from < span.high;) {  // all at once, or as much as one part of the operand serves
    const int split = from / TILES, end = whole || (split + 1) * TILES > span.high ? span.high : (split + 1) * TILES;
    const int parts = whole ? (end - 1) / TILES + 1 - split : 1, at = split * Down::inner;
    if (from > span.low) compute_sync();  // the operand is no longer needed
    if (!direct) load_rows(w, w.p->activated + at, INTERMEDIATE, whole ? at : 0, parts * Down::inner, [](int) {});
    compute_sync();
    multiply<M>(w, from, end, [&](int unit, int) { return whole ? unit / TILES * Down::inner : 0; }, finish);
    from = end;
  }
}
