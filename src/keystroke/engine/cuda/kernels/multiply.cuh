// Packed weights times the rows in the operand, on tensor cores, in every format (packing.py).
// The caller's `finish` stores the results.

// Weights of four bits, a sign and the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6. The bits of a weight in a float16, at 0x8e00, are that
// number times 2**-14. Each half of a word of codes holds four weights: one lies there already and one three bits lower; of the
// others the signs are at 0x4000 and 0x2000 and the numbers at 0x38 and 0x07. Shifts to the left run beside logical operations,
// byte permutations in their place. Each 32 columns of a row have a power of two, stored as the upper byte of a float16.
DEVICE void float4_codes(u32 word, u32* to) {
  to[0] = word & 0x8e008e00u;
  to[1] = word * 8 & 0x8e008e00u;
  to[2] = and_or(word * 2, 0x80008000u, word * 64 & 0x0e000e00u);
  to[3] = and_or(word * 4, 0x80008000u, word * 512 & 0x0e000e00u);
}
DEVICE void float4_weights(const u8* block, int lane, u32 (&a)[16]) {
  const uint4 q = *(const uint4*)(block + lane * 16);
  const u32 powers = *(const u32*)(block + 512 + (lane >> 2) * 4), minus_zero = 0x80008000u;
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 lower = permute_bytes(powers, 0, half ? 0x2424 : 0x0404), upper = permute_bytes(powers, 0, half ? 0x3434 : 0x1414);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      u32* to = a + half * 8 + step * 4;
      float4_codes(words[half * 2 + step], to);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = fma_f16x2(to[i], i % 2 ? upper : lower, minus_zero);
    }
  }
}
// Products with powers applied to sums of 32 columns: fewer instructions than applying them to weights, and also exact.
DEVICE void multiply_float4(const u8* block, const u16* const (&x)[TILES_N], int k, int lane, float (&acc)[TILES_N][4]) {
  const uint4 q = *(const uint4*)(block + lane * 16);
  const u32 powers = *(const u32*)(block + 512 + (lane >> 2) * 4);
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 a[8];
    float4_codes(words[half * 2], a);
    float4_codes(words[half * 2 + 1], a + 4);
    const float low = f16_value((u16)permute_bytes(powers, 0, half ? 0x4424 : 0x4404));
    const float high = f16_value((u16)permute_bytes(powers, 0, half ? 0x4434 : 0x4414));
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const uint4 v = *(const uint4*)(x[n] + k + half * 32);
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      mma_weights(part, a[0], a[1], a[2], a[3], v.x, v.y);
      mma_weights(part, a[4], a[5], a[6], a[7], v.z, v.w);
      acc[n][0] += part[0] * low;
      acc[n][1] += part[1] * low;
      acc[n][2] += part[2] * high;
      acc[n][3] += part[3] * high;
    }
  }
}

// Codes of four bits lie in one word, of six bits in three (the third one holds the rest of the last two codes). Each half of a word
// has one code of each register. Codes of rows g come out in the low bits, those of rows g + 8 four bits higher.
template <int BITS>
DEVICE void narrow_codes(u32 first, u32 second, u32 third, u32 (&to)[8]) {
  if (BITS == 4) {
    to[0] = first & 0x000f000fu;
    to[1] = first & 0x00f000f0u;
    to[2] = first >> 8 & 0x000f000fu;
    to[3] = first >> 8 & 0x00f000f0u;
    to[4] = second & 0x000f000fu;
    to[5] = second & 0x00f000f0u;
    to[6] = second >> 8 & 0x000f000fu;
    to[7] = second >> 8 & 0x00f000f0u;
  } else {
    to[0] = first & 0x003f003fu;
    to[1] = first >> 6 & 0x03f003f0u;
    to[2] = second & 0x003f003fu;
    to[3] = second >> 6 & 0x03f003f0u;
    to[4] = third >> 10 & 0x003f003fu;
    to[5] = third & 0x03f003f0u;
    to[6] = and_or(third << 2, 0x00300030u, first >> 6 & 0x000f000fu);
    to[7] = and_or(third << 4, 0x00300030u, second & 0x03c003c0u);
  }
}

// FOUR_K: scale and offset of rows g and g + 8 in the first 32 columns, then in the others, as format 3 has them. The number of the
// block in its unit says where the two numbers of a row lie: each of four blocks has those of the rows 2 n, 2 n + 1 and 8 more behind
// its bytes, so all blocks are alike, and a stage holds all four or none. The float16 with the upper byte 0x64 is 1024 + its lower
// byte; with 0x34, 0.25 + that byte * 2**-12, as the numbers of offsets are so much larger. So scales and offsets are rounded once.
DEVICE void scales_of_bytes(const u8* block, int number, int lane, u32 (&pairs)[4]) {
  const int g = lane >> 2;
  const uint2 bytes = *(const uint2*)(block + 512 + g * 8);
  const uint2 steps = *(const uint2*)(block + 576 + (g / 2 - (number & 3)) * block_bytes(FOUR_K) + g % 2 * 8);
  const u32 words[2] = {bytes.x, bytes.y}, zero = 0x34006400u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    pairs[2 * half] = fma_f16x2(sub_f16x2(permute_bytes(words[half], 0x3464u, 0x5140u), zero), steps.x, 0x80008000u);
    pairs[2 * half + 1] = fma_f16x2(sub_f16x2(permute_bytes(words[half], 0x3464u, 0x5342u), zero), steps.y, 0x80008000u);
  }
}

// Weights in the stored formats, 16 rows by 64 columns: code * scale + offset. A code in the low bits of a float16 is the
// number code * 2**-24, exactly; scales are 2**24 times as large, so one multiply-add gives the weight, rounded once to 11
// bits. For codes of less than 8 bits, those of rows g + 8 are 16 times as large and their scales 16 times smaller. `number` is that
// of the block in its unit, modulo 4.
template <int F>
DEVICE void stored_weights(const u8* block, int number, int lane, u32 (&a)[16]) {
  if constexpr (F == MXFP4) return float4_weights(block, lane, a);
  constexpr int BITS = code_bits(F);
  const u8* grid = block + 128 * BITS + (group_k(F) == 32 ? lane >> 2 : lane >> 1) * (minima(F) ? 16 : 8);
  u32 scale[4], offset[4];  // of rows g and g + 8 in the first 32 columns, then in the others
  if (minima(F)) {
    u32 pairs[4];
    if (F == FOUR_K) {
      scales_of_bytes(block, number, lane, pairs);
    } else {
      const uint4 v = *(const uint4*)grid;
      pairs[0] = v.x; pairs[1] = v.y; pairs[2] = v.z; pairs[3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale[i] = low_twice(pairs[i]);
      offset[i] = high_twice(pairs[i]);
    }
  } else {  // zero is the middle of the range: 32 or 128, times 2**-24
    const uint2 v = *(const uint2*)grid;
    const u32 pairs[2] = {v.x, v.y};
    const u32 low = BITS == 8 ? 0x80808080u : 0x80208020u, high = BITS == 8 ? low : 0x82008200u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[2 * i] = low_twice(pairs[i]);
      scale[2 * i + 1] = high_twice(pairs[i]);
      offset[2 * i] = fma_f16x2(scale[2 * i], low, 0x80008000u);
      offset[2 * i + 1] = fma_f16x2(scale[2 * i + 1], high, 0x80008000u);
    }
  }
  if (BITS == 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = *(const uint4*)(block + half * 512 + lane * 16);
      const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[half * 8 + 2 * i] = fma_f16x2(permute_bytes(words[i], 0, 0x4140u), scale[2 * half], offset[2 * half]);
        a[half * 8 + 2 * i + 1] = fma_f16x2(permute_bytes(words[i], 0, 0x4342u), scale[2 * half + 1], offset[2 * half + 1]);
      }
    }
    return;
  }
  const uint4 q = *(const uint4*)(block + lane * 16);
  const u32 words[4] = {q.x, q.y, q.z, q.w};
  uint2 third = make_uint2(0, 0);
  if (BITS == 6) third = *(const uint2*)(block + 512 + lane * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 codes[8];
    narrow_codes<BITS>(words[half * 2], words[half * 2 + 1], half ? third.y : third.x, codes);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[half * 8 + i] = fma_f16x2(codes[i], scale[2 * half + i % 2], offset[2 * half + i % 2]);
  }
}

// One block of packed weights times the operand: acc[16 x COLUMNS] += W[16 x k] x[k x COLUMNS]. `number` as for `stored_weights`.
template <int F>
DEVICE void multiply_block(const u8* block, int number, const u16* const (&x)[TILES_N], int k, int lane, float (&acc)[TILES_N][4]) {
  if (F == 0) {
    const uint4 a = *(const uint4*)(block + lane * 16), b = *(const uint4*)(block + 512 + lane * 16);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const uint4 v = *(const uint4*)(x[n] + k);
      mma_weights(acc[n], a.x, a.y, a.z, a.w, v.x, v.y);
      mma_weights(acc[n], b.x, b.y, b.z, b.w, v.z, v.w);
    }
  } else if (F == 1) {
    const uint4 q = *(const uint4*)(block + lane * 16);
    const u32 offset = 0x64806480u;  // 1024 + 128 in both halves: bytes are stored plus 128
    u32 a[8];
    const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = sub_f16x2(permute_bytes(words[i], 0x64u, 0x4140u), offset);
      a[2 * i + 1] = sub_f16x2(permute_bytes(words[i], 0x64u, 0x4342u), offset);
    }
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const uint4 v = *(const uint4*)(x[n] + k);
      mma_weights(acc[n], a[0], a[1], a[2], a[3], v.x, v.y);
      mma_weights(acc[n], a[4], a[5], a[6], a[7], v.z, v.w);
    }
  } else if (F == MXFP4) {
    multiply_float4(block, x, k, lane, acc);
  } else if (stored(F)) {
    u32 a[16];
    stored_weights<F>(block, number, lane, a);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = *(const uint4*)(x[n] + k + half * 32);
        const u32* m = a + half * 8;
        mma_weights(acc[n], m[0], m[1], m[2], m[3], v.x, v.y);
        mma_weights(acc[n], m[4], m[5], m[6], m[7], v.z, v.w);
      }
  } else {
    const uint4 q = *(const uint4*)(block + lane * 16);
    const uint2 grid = *(const uint2*)(block + 512 + (lane >> 2) * 8);  // scale, zero of row g; of row g + 8
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    const u32 zero_low = high_twice(grid.x), zero_high = high_twice(grid.y);
    // A nibble below these bits is the float16 1024 + q, or 1024 + 16 q if it is four bits higher; zeros are stored as 1024 + z.
    // So row g needs one subtraction and row g + 8 one multiply-add; both are exact.
    const u32 unit = 0x64006400u, sixteenth = 0x2c002c00u;
    const u32 offset_high = sub_f16x2(0x63806380u, zero_high);  // 960 - (1024 + z)
    float part[2][TILES_N][4];  // two sums, so that one need not wait for the other
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[0][n][i] = part[1][n][i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 a[8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 w0 = words[half * 2 + i], w1 = w0 >> 8;
        a[4 * i] = sub_f16x2(and_or(w0, 0x000f000fu, unit), zero_low);
        a[4 * i + 1] = fma_f16x2(and_or(w0, 0x00f000f0u, unit), sixteenth, offset_high);
        a[4 * i + 2] = sub_f16x2(and_or(w1, 0x000f000fu, unit), zero_low);
        a[4 * i + 3] = fma_f16x2(and_or(w1, 0x00f000f0u, unit), sixteenth, offset_high);
      }
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        const uint4 v = *(const uint4*)(x[n] + k + half * 32);
        mma_weights(part[half][n], a[0], a[1], a[2], a[3], v.x, v.y);
        mma_weights(part[half][n], a[4], a[5], a[6], a[7], v.z, v.w);
      }
    }
    const float scale_low = f16_value((u16)grid.x), scale_high = f16_value((u16)grid.y);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      acc[n][0] += (part[0][n][0] + part[1][n][0]) * scale_low;
      acc[n][1] += (part[0][n][1] + part[1][n][1]) * scale_low;
      acc[n][2] += (part[0][n][2] + part[1][n][2]) * scale_high;
      acc[n][3] += (part[0][n][3] + part[1][n][3]) * scale_high;
    }
  }
}

// Scales and biases of rows g and g + 8 of the unit whose sums this warp adds next.
struct Tail { float scale_low, scale_high, bias_low, bias_high; };
// Whether this warp adds the sums of unit `number`.
DEVICE bool adds(const Worker& w, int number) { return number % (WARPS / ADDERS) == w.warp / ADDERS; }
// One unit, the index-th of this block's share, followed by `left` more: the warps divide its blocks, and each stores its sums.
// Row m of the operand begins at column(m).
template <class M, class Column>
DEVICE void multiply_unit(Worker& w, Tail& mine, int index, int left, const Column& column) {
  constexpr int F = M::format;
  constexpr int TURNS = M::per_chunk / WARPS;
  constexpr int REST = M::blocks - (M::chunks - 1) * M::per_chunk;  // blocks of the last chunk
  ASSUME(w.unit >= 0);
  float acc[2][TILES_N][4];  // two sums, so that one need not wait for the other
  const u16* x[TILES_N];
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[0][n][i] = acc[1][n][i] = 0.0f;
    // Columns past the last row repeat it; their sums are never read.
    const int m = n * 8 + w.g < w.rows ? n * 8 + w.g : w.rows - 1;
    x[n] = w.operand + m * w.p->x_stride + column(m) + w.warp * block_k(F) + w.j * 8;
  }
  // A turn adds to the sum of its number in the unit modulo two, independent of the division into chunks. An odd number of turns
  // in a chunk requires the loop to be unrolled for that.
#pragma unroll TURNS % 2 ? M::chunks : 1
  for (int chunk = 0; chunk < M::chunks - 1; ++chunk) {
    const u8* stage = w.ring.stages + w.ring.at.stage * STAGE + w.warp * block_bytes(F);
    barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
      multiply_block<F>(stage + i * WARPS * block_bytes(F), w.warp, x, (chunk * M::per_chunk + i * WARPS) * block_k(F), w.lane, acc[(chunk * TURNS + i) & 1]);
    warp_sync();
    if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
    w.ring.at.advance(w.ring.count);
  }
  {
    const int member = M::together > 1 ? index % M::together : 0;  // of the units in this stage
    const u8* stage = w.ring.stages + w.ring.at.stage * STAGE + member * (int)M::unit_bytes;
    barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
#pragma unroll
    for (int i = 0; i < (REST + WARPS - 1) / WARPS; ++i) {
      const int k = ((M::chunks - 1) * M::per_chunk + i * WARPS) * block_k(F);
      float(&sum)[TILES_N][4] = acc[((M::chunks - 1) * TURNS + i) & 1];
      if ((i + 1) * WARPS <= REST) {
        multiply_block<F>(stage + (i * WARPS + w.warp) * block_bytes(F), w.warp, x, k, w.lane, sum);
      } else if (SINGLE && i > 0) {
        // Warps without a block multiply another by zeros: a branch here would keep this turn from overlapping with the others.
        const bool has = w.warp < REST - i * WARPS;
        const u16* mine[TILES_N];
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) mine[n] = has ? x[n] + k : (const u16*)(w.small + ZEROS_AT) + w.j * 8;
        multiply_block<F>(stage + ((has ? i * WARPS : 0) + w.warp) * block_bytes(F), w.warp, mine, 0, w.lane, sum);
      } else if (w.warp < REST - i * WARPS) {
        multiply_block<F>(stage + (i * WARPS + w.warp) * block_bytes(F), w.warp, x, k, w.lane, sum);
      }
    }
    if (adds(w, w.unit)) {
      const float* tail = (const float*)(stage + REST * block_bytes(F)) + (w.lane & 7);
      mine.scale_low = tail[0]; mine.scale_high = tail[8]; mine.bias_low = tail[16]; mine.bias_high = tail[24];
    }
    if (M::together <= 1 || member == M::together - 1 || left == 0) {
      warp_sync();
      if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
      w.ring.at.advance(w.ring.count);
    }
  }
  const int buffer = w.unit % BUFFERS;
  float* sums = w.scratch + buffer * REDUCTION;
  barrier_wait(&w.freed[buffer], (w.unit / BUFFERS & 1) ^ 1);
  ++w.unit;
  if constexpr (SINGLE) {
    if (w.j == 0) {
      sums[w.warp * 16 + w.g] = acc[0][0][0] + acc[1][0][0];
      sums[w.warp * 16 + w.g + 8] = acc[0][0][2] + acc[1][0][2];
    }
  } else {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const int at = (w.warp * 16 + w.g) * SUM_STRIDE + n * 8 + w.j * 2;
      *(float2*)(sums + at) = make_float2(acc[0][n][0] + acc[1][n][0], acc[0][n][1] + acc[1][n][1]);
      *(float2*)(sums + at + 8 * SUM_STRIDE) = make_float2(acc[0][n][2] + acc[1][n][2], acc[0][n][3] + acc[1][n][3]);
    }
  }
  warp_sync();
  if (w.lane == 0) barrier_arrive(&w.ready[buffer]);
}
struct One {
  DEVICE_METHOD float operator()(int, int) const { return 1.0f; }
};
// Adds the sums of unit `number` in the order of the warps; done by the warps whose turn it is.
template <class Finish, class BiasShare>
DEVICE void add_unit(Worker& w, const Tail& tail, int number, int unit, const Finish& finish, const BiasShare& share) {
  ASSUME(number >= 0);
  if (!adds(w, number)) return;
  const int buffer = number % BUFFERS;
  const float* sums = w.scratch + buffer * REDUCTION;
  barrier_wait(&w.ready[buffer], number / BUFFERS & 1);
  const int g = w.lane & 7;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = w.warp % ADDERS * 8 + (w.lane >> 3) + i * 4;
    if (m >= w.rows) continue;
    float low = 0, high = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) {
      low += sums[(k * 16 + g) * SUM_COLUMNS + m];
      high += sums[(k * 16 + g + 8) * SUM_COLUMNS + m];
    }
    const float part = share(unit, m);
    finish(unit, i, g, m, low * tail.scale_low + tail.bias_low * part, high * tail.scale_high + tail.bias_high * part);
  }
  warp_sync();
  if (w.lane == 0) barrier_arrive(&w.freed[buffer]);
}

// Units low ... high - 1 of a matrix times row m of the operand from column(unit, m) on. The sums of a unit are added LAG units
// later, so that the adding warp does not delay the others. For each row, finish(unit, i, g, m, low, high) gets rows g and g + 8 of
// the unit and row m of the operand (i counts a lane's rows). Biases are multiplied by share(unit, m).
template <class M, class Column, class Finish, class BiasShare = One>
DEVICE void multiply(Worker& w, int low, int high, const Column& column, const Finish& finish, const BiasShare& share = BiasShare{}) {
  Tail tail = {0, 0, 0, 0};
  for (int unit = low; unit < high; ++unit) {
    multiply_unit<M>(w, tail, unit - low, high - 1 - unit, [&](int m) { return column(unit, m); });
    if (unit - LAG >= low) add_unit(w, tail, w.unit - 1 - LAG, unit - LAG, finish, share);
  }
  const int rest = high - low < LAG ? high - low : LAG;
#pragma unroll 1
  for (int unit = high - rest; unit < high; ++unit) add_unit(w, tail, w.unit - (high - unit), unit, finish, share);
}

constexpr int ALONE_TURNS = SINGLE ? 4 : 2;  // unrolled: instructions that are used once a layer come from far away, so fewer are better
// The same for narrow units of which a block has many: each warp multiplies whole units, so that no sums are combined. Warps
// alternate from unit `base` on. column(unit, m) is where row m of the operand begins for the unit.
template <class M, class Column, class Finish, class BiasShare = One>
DEVICE void multiply_alone(Worker& w, int low, int high, const Column& column, const Finish& finish, int base,
                           const BiasShare& share = BiasShare{}) {
  constexpr int F = M::format;
  static_assert(M::together > 0, "a stage holds whole units");
#pragma unroll 1
  for (int from = low; from < high; from += M::together) {
    const int end = from + M::together < high ? from + M::together : high;
    barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
#pragma unroll 1
    for (int unit = from + ((w.warp - (from - base)) & (WARPS - 1)); unit < end; unit += WARPS) {  // the base + warp + 8 i
      const u8* packed = w.ring.stages + w.ring.at.stage * STAGE + (unit - from) * (int)M::unit_bytes;
      const u16* x[TILES_N];
      float acc[2][TILES_N][4];
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][n][i] = acc[1][n][i] = 0.0f;
        const int m = n * 8 + w.g < w.rows ? n * 8 + w.g : w.rows - 1;
        x[n] = w.operand + m * w.p->x_stride + column(unit, m) + w.j * 8;
      }
#pragma unroll ALONE_TURNS
      for (int i = 0; i < M::blocks; ++i) multiply_block<F>(packed + i * block_bytes(F), i, x, i * block_k(F), w.lane, acc[i & 1]);
      const float* tail = (const float*)(packed + M::blocks * block_bytes(F)) + w.g;
#pragma unroll
      for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int m = n * 8 + w.j * 2 + e;
          if (m >= w.rows) continue;
          const float part = share(unit, m);
          finish(unit, e, w.g, m, (acc[0][n][e] + acc[1][n][e]) * tail[0] + tail[16] * part,
                 (acc[0][n][e + 2] + acc[1][n][e + 2]) * tail[8] + tail[24] * part);
        }
    }
    warp_sync();
    if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
    w.ring.at.advance(w.ring.count);
  }
}
