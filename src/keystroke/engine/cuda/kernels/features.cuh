// Exports what a draft head reads of its target: the residual stream before some layers, one row for each row of the step.
// The step does not depend on it.

constexpr float FEATURE_SCALE = 0.015625f;  // keeps float16 far from overflow, as activations of quantised weights

// Called while no block adds to the residual stream of `sums` sums: between the first norm of a layer and its projection.
DEVICE void export_features(Worker& w, int layer, u32 sums) {
  const Parameters& p = *w.p;
  if (!p.features) return;
  int place = -1;
  for (int i = 0; i < FEATURE_LAYERS; ++i) place = p.feature_layers[i] == layer ? i : place;
  if (place < 0) return;
  for (int m = gridDim.x - 1 - blockIdx.x; m < w.rows; m += gridDim.x) {  // the first blocks normalise rows for all
    const s64* from = p.residual + (s64)m * HIDDEN + w.thread * 2;
    float2 v[NORM_PAIRS];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NORM_PAIRS; ++i) {
      v[i] = make_float2(0, 0);
      if (!within(w, i, HIDDEN / 2)) continue;
      uint4 raw = poll16(from + i * COMPUTE * 2);
      while (!complete(raw, sums)) {
        spin();
        raw = poll16(from + i * COMPUTE * 2);
      }
      v[i] = make_float2(value_of(raw.x, raw.y), value_of(raw.z, raw.w));
      sum += v[i].x * v[i].x + v[i].y * v[i].y;
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
    float* parts = w.small + 64;  // not where rows are normalised
    compute_sync();
    if (w.lane == 0) parts[w.warp] = sum;
    compute_sync();
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += parts[i];
    const float inverse = inverse_root(sum / HIDDEN + NORM_EPS) * FEATURE_SCALE;
    u32* to = (u32*)(p.features + ((s64)m * p.feature_count + place) * HIDDEN);
#pragma unroll
    for (int i = 0; i < NORM_PAIRS; ++i)
      if (within(w, i, HIDDEN / 2)) to[i * COMPUTE + w.thread] = pack_f16(v[i].x * inverse, v[i].y * inverse);
  }
}
