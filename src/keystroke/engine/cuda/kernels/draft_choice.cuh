// From the layer's result to a token of the head's vocabulary and its probability.
// Draws with the target's noise (choice.cuh), without its filters.

// For some rows of the head's vocabulary: the chosen one, and what its probability is computed from.
struct Choice {
  double score;
  int row;
  float logit, top, total;
};
DEVICE Choice no_choice() {
  Choice c;
  c.score = -INFINITY;
  c.row = 0x7fffffff;
  c.logit = c.top = -INFINITY;
  c.total = 0;
  return c;
}
DEVICE void join(Choice& c, const Choice& o) {
  if (o.score > c.score || (o.score == c.score && o.row < c.row)) { c.score = o.score; c.row = o.row; c.logit = o.logit; }
  const float top = fmaxf(c.top, o.top);
  c.total = (c.top > -INFINITY ? c.total * __expf(c.top - top) : 0.0f) + (o.top > -INFINITY ? o.total * __expf(o.top - top) : 0.0f);
  c.top = top;
}
DEVICE Choice of_warp(Choice c) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    Choice o;
    o.score = shuffle_xor_double(c.score, mask);
    o.row = shuffle_xor_int(c.row, mask);
    o.logit = shuffle_xor(c.logit, mask);
    o.top = shuffle_xor(c.top, mask);
    o.total = shuffle_xor(c.total, mask);
    join(c, o);
  }
  return c;
}
DEVICE void publish(const DraftParameters& p, const Choice& c) {
  p.best_score[blockIdx.x] = c.score;
  p.best[blockIdx.x] = make_float4(__uint_as_float((u32)c.row), c.logit, c.top, c.total);
}

// Logits of this block's rows, and its choice among them for the token at `position`.
DEVICE void project_rows(Worker& w, const DraftParameters& p, int position) {
  const Control& control = *w.control;
  const Span span = w.spans[HEAD];
  if (span.low < span.high) put_normed(w, p.norms + OF_RESULT * HIDDEN, 0, w.operand, [&](int i) { return pair_of(p.result + i); });
  compute_sync();
  multiply<Head>(w, span.low, span.high, [](int, int) { return 0; }, [&](int unit, int, int g, int, float low, float high) {
    const int row = unit * 16 + g;
    p.logits[row] = low;
    p.logits[row + 8] = high;
  });
  compute_sync();
  const float inverse = control.inverse_temperature[0];
  const int end = span.high * 16 < VOCAB ? span.high * 16 : VOCAB;
  Choice mine = no_choice();
  for (int row = span.low * 16 + w.thread; row < end; row += COMPUTE) {
    Choice one;
    one.row = row;
    one.logit = one.top = load4(p.logits + row);
    one.total = 1;
    one.score = one.logit;
    if (inverse != 0.0f) {
      const u32 bits = noise_bits(p.vocabulary[row], (u32)position, control.seed_low[0], control.seed_high[0]);
      const double uniform = ((double)bits + 0.5) * 2.3283064365386963e-10;
      one.score = (double)(one.logit * inverse) - log(-log1p(-uniform));
    }
    join(mine, one);
  }
  mine = of_warp(mine);
  Choice* all = (Choice*)w.scratch;
  if (w.lane == 0) all[w.warp] = mine;
  compute_sync();
  if (w.thread == 0) {
    for (int i = 1; i < WARPS; ++i) join(mine, all[i]);
    publish(p, mine);
  }
}
// The choice among all blocks, returned to every thread of every block.
DEVICE Choice choose(Worker& w, const DraftParameters& p) {
  Choice* known = (Choice*)w.scratch;
  if (w.warp == 0) {
    Choice c = no_choice();
    for (int i = w.lane; i < gridDim.x; i += 32) {
      const uint4 raw = load16(p.best + i);
      Choice o;
      o.score = *(const volatile double*)(p.best_score + i);
      o.row = (int)raw.x;
      o.logit = __uint_as_float(raw.y);
      o.top = __uint_as_float(raw.z);
      o.total = __uint_as_float(raw.w);
      join(c, o);
    }
    c = of_warp(c);
    if (w.lane == 0) *known = c;
  }
  compute_sync();
  return *known;
}
