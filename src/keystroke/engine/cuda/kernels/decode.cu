// One launch is one step of the whole model: embedding, every layer, the head, the choice of tokens.
// Law: one block per multiprocessor stays for the step. In each, one warp streams this block's share of every
// weight matrix, in the order of use, through a ring in shared memory; it never waits for results, so memory
// stays busy while the other eight warps synchronise, normalise and attend. A row's result depends on that
// row's own tokens alone: every sum has a fixed order, whatever rows are computed beside it.
//
// Sizes come as macros (plan.py): HIDDEN HEADS KV_HEADS HEAD_DIM INTERMEDIATE VOCAB LAYERS TILES_N FORMAT
// HEAD_FORMAT O_SPLIT DOWN_SPLIT QK_NORM NORM_EPS.

constexpr int WARPS = 8;
constexpr int COMPUTE = 256;
constexpr int MAX_ROWS = 32;
constexpr int PAGE = 64;
constexpr int NEAR = 2048;             // keys up to here come in chunks of one page, so that many blocks share them;
constexpr int NEAR_CHUNKS = NEAR / PAGE;
constexpr int CHUNK = 256;             // later ones in chunks of this many. A key's chunk depends on its place alone.
constexpr int PAD = 32;     // staggers the rows of an operand over the banks of shared memory
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int QUERY_WIDTH = HEADS * HEAD_DIM;
constexpr int QKV_ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int COLUMNS = 8 * TILES_N;
constexpr float FIXED_ONE = 4294967296.0f;  // the residual stream counts in units of 2**-32
constexpr float LARGEST = 1.0e9f;
constexpr bool HALF = FORMAT != 0;            // quantised weights meet float16 activations
constexpr float ACTIVATION_SCALE = HALF ? 0.015625f : 1.0f;  // keeps float16 far from overflow

// Packed weights. A unit is 16 output rows over a range of the inner dimension, cut into blocks whose
// bytes lie in the order in which a warp's registers want them, then 16 scales and 16 biases.
constexpr int TAIL = 128;
constexpr int STAGE = 16384 + TAIL;
constexpr int block_k(int format) { return format == 2 ? 64 : 32; }
constexpr int block_bytes(int format) { return format == 0 ? 1024 : format == 1 ? 512 : 576; }
constexpr int blocks_per_stage(int format) { return 16384 / block_bytes(format) / 8 * 8; }  // an even share for each warp

template <int UNITS, int INNER, int FMT>
struct Matrix {
  static constexpr int units = UNITS;
  static constexpr int inner = INNER;
  static constexpr int format = FMT;
  static constexpr int blocks = INNER / block_k(FMT);
  static constexpr int chunks = (blocks + blocks_per_stage(FMT) - 1) / blocks_per_stage(FMT);
  static constexpr int per_chunk = blocks_per_stage(FMT);
  static constexpr s64 unit_bytes = (s64)blocks * block_bytes(FMT) + TAIL;
  static constexpr s64 bytes = unit_bytes * UNITS;
};
typedef Matrix<QKV_ROWS / 16, HIDDEN, FORMAT> Qkv;
typedef Matrix<HIDDEN / 16 * O_SPLIT, QUERY_WIDTH / O_SPLIT, FORMAT> Output;
typedef Matrix<INTERMEDIATE / 8, HIDDEN, FORMAT> GateUp;  // 8 rows of gate, then the same 8 of up
typedef Matrix<HIDDEN / 16 * DOWN_SPLIT, INTERMEDIATE / DOWN_SPLIT, FORMAT> Down;
typedef Matrix<(VOCAB + 15) / 16, HIDDEN, HEAD_FORMAT> Head;
constexpr s64 LAYER_BYTES = Qkv::bytes + Output::bytes + GateUp::bytes + Down::bytes;

struct Control {
  int rows, sequences, sampled, ticket;
  int token[MAX_ROWS], position[MAX_ROWS], sequence[MAX_ROWS];
  int first[MAX_ROWS], count[MAX_ROWS], pending[MAX_ROWS], table[MAX_ROWS];  // of each sequence
  float inverse_temperature[MAX_ROWS], log_min_p[MAX_ROWS];
  u32 seed_low[MAX_ROWS], seed_high[MAX_ROWS];
};
constexpr int CONTROL_WORDS = sizeof(Control) / 4;

struct Parameters {
  const u8* layers;
  const u8* head;
  const u16* embedding;
  const float* norms;     // [2 LAYERS + 1][HIDDEN]
  const float* qk_norms;  // [LAYERS][2][HEAD_DIM]
  const float2* rope;     // [context][HEAD_DIM / 2] cosine, sine
  const int* tables;      // [slots][table_stride] pages of each sequence
  u16* keys;              // [LAYERS][pages][KV_HEADS][PAGE][HEAD_DIM]
  u16* values;            // [LAYERS][pages][KV_HEADS][HEAD_DIM][PAGE]
  s64* residual;          // [MAX_ROWS][HIDDEN]
  u16* normed;            // [MAX_ROWS][HIDDEN]
  float* raw;             // [MAX_ROWS][QKV_ROWS]
  u16* queries;           // [MAX_ROWS][QUERY_WIDTH]
  float* partial;         // [MAX_ROWS][HEADS][partial_stride][HEAD_DIM]
  float2* partial_norm;   // [MAX_ROWS][HEADS][partial_stride] largest score, sum
  u16* attended;          // [MAX_ROWS][QUERY_WIDTH]
  u16* activated;         // [MAX_ROWS][INTERMEDIATE]
  float* logits;          // [MAX_ROWS][VOCAB]
  float* best_value;      // [blocks][MAX_ROWS]
  int* best_token;        // [blocks][MAX_ROWS]
  double* best_score;     // [blocks][MAX_ROWS]
  u32* barrier;           // arrivals, departures, fault
  const Control* control;
  Control* next;          // where the step after this one finds its rows, if it follows without the host
  int* result;            // host memory: ticket, fault, accepted[MAX_ROWS], chosen[MAX_ROWS]
  const int* stop;        // host memory
  s64* profile;           // [blocks][PROFILE] clock readings around every barrier, where compiled in
  s64 kv_layer_stride;
  int table_stride, partial_stride;
  int x_stride, stages, ring_offset;
  int in_flight;     // chunks the streaming warp keeps under way: enough for bandwidth, few enough for latency
  int direct_rows;   // up to this many rows every block normalises for itself
  int fused_rows;    // up to this many rows every block combines partial results for itself
};

// Shared memory, in this order: control, page of each row, barriers, rotary table, scratch, operand, ring.
constexpr int PAGES_AT = (CONTROL_WORDS * 4 + 127) / 128 * 128;
constexpr int BARRIERS_AT = PAGES_AT + 128;
constexpr int SMALL_AT = BARRIERS_AT + 256;
constexpr int MEETINGS_AT = SMALL_AT + 384;  // barriers of the sums: ready, then free
constexpr int SPANS_AT = MEETINGS_AT + 64;
constexpr int ROPE_AT = SMALL_AT + 512;
constexpr int SCRATCH_AT = ROPE_AT + COLUMNS * HEAD_DIM / 2 * 8;
constexpr int REDUCTION = WARPS * 16 * COLUMNS;  // floats of one unit's partial sums
constexpr int BUFFERS = TILES_N == 1 ? 4 : 2;     // units whose sums may be under way
constexpr int SCORE_STRIDE = CHUNK + PAD;
constexpr int ATTENTION_BYTES = 16 * SCORE_STRIDE * 2 + 2 * WARPS * 16 * 4;
constexpr int SUMS_BYTES = BUFFERS * REDUCTION * 4;
constexpr int SCRATCH_BYTES = SUMS_BYTES > ATTENTION_BYTES ? SUMS_BYTES : ATTENTION_BYTES;
constexpr int OPERAND_AT = (SCRATCH_AT + SCRATCH_BYTES + 127) / 128 * 128;

DEVICE void mma_weights(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (HALF) mma_f16(c, a0, a1, a2, a3, b0, b1);
  else mma_bf16(c, a0, a1, a2, a3, b0, b1);
}
DEVICE u32 pack_activation(float low, float high) {
  if (HALF) return pack_f16(low * ACTIVATION_SCALE, high * ACTIVATION_SCALE);
  return pack_bf16(low, high);
}
DEVICE u16 activation(float v) { return (u16)pack_activation(v, 0.0f); }
DEVICE int chunks_to(int position) {  // chunks that hold keys 0 ... position
  return position < NEAR ? position / PAGE + 1 : NEAR_CHUNKS + (position - NEAR) / CHUNK + 1;
}
DEVICE u16 bf16(float v) { return (u16)pack_bf16(v, 0.0f); }

// The share of each matrix's units that falls to this block. The larger shares move around between matrices.
struct Span { int low, high; };
enum { QKV, OUTPUT, GATE_UP, DOWN, HEAD, MATRICES };
DEVICE Span share(int units, int matrix) {
  const int blocks = gridDim.x, at = (blockIdx.x + matrix * 29) % blocks;
  Span s;
  s.low = at * units / blocks;
  s.high = (at + 1) * units / blocks;
  return s;
}

// The ring between the streaming warp and the computing ones.
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
  const Span* spans;
  Place oldest;  // the chunk that must have arrived before one more is asked for
  int spare;     // chunks that may still be asked for without looking at it
  u64 policy;
};

template <class M>
DEVICE void stream(Streamer& s, const u8* matrix, int which) {
  Ring& ring = s.ring;
  const Span span = s.spans[which];
  for (int unit = span.low; unit < span.high; ++unit) {
    const u8* from = matrix + unit * M::unit_bytes;
    for (int chunk = 0; chunk < M::chunks; ++chunk) {
      const bool last = chunk == M::chunks - 1;
      const int blocks = last ? M::blocks - chunk * M::per_chunk : M::per_chunk;
      const u32 bytes = blocks * block_bytes(M::format) + (last ? TAIL : 0);
      if (s.spare > 0) {
        --s.spare;
      } else {
        barrier_wait(&ring.full[s.oldest.stage], s.oldest.phase);
        s.oldest.advance(ring.count);
      }
      const int stage = ring.at.stage;
      barrier_wait(&ring.empty[stage], ring.at.phase ^ 1);
      barrier_expect(&ring.full[stage], bytes);
      bulk_copy(ring.stages + stage * STAGE, from, bytes, &ring.full[stage], s.policy);
      from += bytes;
      ring.at.advance(ring.count);
    }
  }
}

// A block's share of attention: 16 (row, head of the group) pairs from `row` on of one KV head of one sequence, over
// one chunk of its keys. `last` is the position of the sequence's last row.
struct Unit { int sequence, head, chunk, row, last; };

// Everything a computing warp carries through the step.
struct Worker {
  const Parameters* p;
  const Span* spans;
  Control* control;
  int* pages;
  float* small;
  float2* rope;
  float* scratch;
  u16* operand;
  Ring ring;
  u32 arrivals;  // barriers passed
  Unit first_unit;  // this block's first share of attention, the same in every layer
  uint4 first_pages;
  bool attends;
  u64* ready;    // of each buffer of sums: all warps have written
  u64* freed;    // and the one that adds has read
  int rows, thread, warp, lane, g, j, unit, marks;
};

DEVICE void mark(Worker& w) {
#ifdef PROFILE
  if (w.thread == 0 && w.marks < PROFILE) w.p->profile[(s64)blockIdx.x * PROFILE + w.marks++] = clock64();
#endif
}

DEVICE void arrive(Worker& w) {
  compute_sync();
  mark(w);
  if (w.thread == 0) release_add(&w.p->barrier[0], 1);
  w.arrivals += gridDim.x;
}
DEVICE void wait(Worker& w) {
  mark(w);
  if (w.thread == 0)
    while (acquire_load(&w.p->barrier[0]) < w.arrivals) spin();
  compute_sync();
  mark(w);
}

// One block of packed weights against the operand: acc[16 x COLUMNS] += W[16 x k] x[k x COLUMNS].
template <int F>
DEVICE void multiply_block(const u8* block, const u16* const (&x)[TILES_N], int k, int lane, float (&acc)[TILES_N][4]) {
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
  } else {
    const uint4 q = *(const uint4*)(block + lane * 16);
    const uint2 grid = *(const uint2*)(block + 512 + (lane >> 2) * 8);  // scale, zero of row g; of row g + 8
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    const u32 zero_low = permute_bytes(grid.x, 0, 0x3232), zero_high = permute_bytes(grid.y, 0, 0x3232);
    // A nibble under these bits is the float16 1024 + q, or 1024 + 16 q where it lies four bits higher; zeros
    // are stored as 1024 + z. So row g needs one subtraction, row g + 8 one multiply-add; both are exact.
    const u32 unit = 0x64006400u, sixteenth = 0x2c002c00u;
    const u32 offset_high = sub_f16x2(0x63806380u, zero_high);  // 960 - (1024 + z)
    float part[TILES_N][4];
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 a[8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 w0 = words[half * 2 + i], w1 = w0 >> 8;
        a[4 * i] = sub_f16x2((w0 & 0x000f000fu) | unit, zero_low);
        a[4 * i + 1] = fma_f16x2((w0 & 0x00f000f0u) | unit, sixteenth, offset_high);
        a[4 * i + 2] = sub_f16x2((w1 & 0x000f000fu) | unit, zero_low);
        a[4 * i + 3] = fma_f16x2((w1 & 0x00f000f0u) | unit, sixteenth, offset_high);
      }
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        const uint4 v = *(const uint4*)(x[n] + k + half * 32);
        mma_weights(part[n], a[0], a[1], a[2], a[3], v.x, v.y);
        mma_weights(part[n], a[4], a[5], a[6], a[7], v.z, v.w);
      }
    }
    const float scale_low = f16_value((u16)grid.x), scale_high = f16_value((u16)grid.y);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      acc[n][0] += part[n][0] * scale_low;
      acc[n][1] += part[n][1] * scale_low;
      acc[n][2] += part[n][2] * scale_high;
      acc[n][3] += part[n][3] * scale_high;
    }
  }
}

// One unit: the warps share its blocks; each leaves its sums and goes on, and one of them, another each time, adds
// them in the order of the warps and calls finish(i, g, m, low, high) for rows g and g + 8 of the tile and row m of
// the operand (i counts a lane's rows).
template <class M, class Finish>
DEVICE void multiply_unit(Worker& w, int column, const Finish& finish) {
  constexpr int F = M::format;
  constexpr int TURNS = M::per_chunk / WARPS;
  constexpr int REST = M::blocks - (M::chunks - 1) * M::per_chunk;  // blocks of the last chunk
  float acc[2][TILES_N][4];  // two sums, so that one need not wait for the other
  const u16* x[TILES_N];
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[0][n][i] = acc[1][n][i] = 0.0f;
    // Columns past the last row repeat it: their sums are never read.
    const int m = n * 8 + w.g < w.rows ? n * 8 + w.g : w.rows - 1;
    x[n] = w.operand + m * w.p->x_stride + column + w.warp * block_k(F) + w.j * 8;
  }
  const bool adds = w.unit % WARPS == w.warp;
  float scale_low = 0, scale_high = 0, bias_low = 0, bias_high = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < M::chunks - 1; ++chunk) {
    const u8* stage = w.ring.stages + w.ring.at.stage * STAGE + w.warp * block_bytes(F);
    barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
      multiply_block<F>(stage + i * WARPS * block_bytes(F), x, (chunk * M::per_chunk + i * WARPS) * block_k(F), w.lane, acc[i & 1]);
    warp_sync();
    if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
    w.ring.at.advance(w.ring.count);
  }
  {
    const u8* stage = w.ring.stages + w.ring.at.stage * STAGE;
    barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
#pragma unroll
    for (int i = 0; i < (REST + WARPS - 1) / WARPS; ++i)
      if ((i + 1) * WARPS <= REST || w.warp < REST - i * WARPS)
        multiply_block<F>(stage + (i * WARPS + w.warp) * block_bytes(F), x, ((M::chunks - 1) * M::per_chunk + i * WARPS) * block_k(F),
                          w.lane, acc[i & 1]);
    if (adds) {
      const float* tail = (const float*)(stage + REST * block_bytes(F)) + (w.lane & 7);
      scale_low = tail[0]; scale_high = tail[8]; bias_low = tail[16]; bias_high = tail[24];
    }
    warp_sync();
    if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
    w.ring.at.advance(w.ring.count);
  }
  const int buffer = w.unit % BUFFERS;
  const u32 parity = w.unit / BUFFERS & 1;
  ++w.unit;
  float* sums = w.scratch + buffer * REDUCTION;
  barrier_wait(&w.freed[buffer], parity ^ 1);
#pragma unroll
  for (int n = 0; n < TILES_N; ++n) {
    const int at = (w.warp * 16 + w.g) * COLUMNS + n * 8 + w.j * 2;
    *(float2*)(sums + at) = make_float2(acc[0][n][0] + acc[1][n][0], acc[0][n][1] + acc[1][n][1]);
    *(float2*)(sums + at + 8 * COLUMNS) = make_float2(acc[0][n][2] + acc[1][n][2], acc[0][n][3] + acc[1][n][3]);
  }
  warp_sync();
  if (w.lane == 0) barrier_arrive(&w.ready[buffer]);
  if (!adds) return;
  barrier_wait(&w.ready[buffer], parity);
  const int g = w.lane & 7;
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; ++i) {
    const int m = (w.lane >> 3) + i * 4;
    if (m >= w.rows) continue;
    float low = 0, high = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) {
      low += sums[(k * 16 + g) * COLUMNS + m];
      high += sums[(k * 16 + g + 8) * COLUMNS + m];
    }
    finish(i, g, m, low * scale_low + bias_low, high * scale_high + bias_high);
  }
  warp_sync();
  if (w.lane == 0) barrier_arrive(&w.freed[buffer]);
}

// Residual stream: fixed-point sums do not depend on the order in which blocks add to them.
DEVICE void add_residual(Worker& w, int m, int row, float v) {
  if (!(fabsf(v) < LARGEST)) { w.p->barrier[2] = 1; v = 0.0f; }
  add_s64(w.p->residual + (s64)m * HIDDEN + row, to_s64(v * FIXED_ONE));
}

constexpr int NORM_PAIRS = (HIDDEN / 2 + COMPUTE - 1) / COMPUTE;
struct NormWeights { float2 v[NORM_PAIRS]; };
DEVICE NormWeights load_norm(Worker& w, int index) {
  NormWeights n;
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    const int at = i * COMPUTE + w.thread;
    n.v[i] = at < HIDDEN / 2 ? ((const float2*)(w.p->norms + (s64)index * HIDDEN))[at] : make_float2(0, 0);
  }
  return n;
}
DEVICE void normalise_row(Worker& w, const NormWeights& weights, int m, u16* to) {
  float2 v[NORM_PAIRS];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    const int at = i * COMPUTE + w.thread;
    v[i] = make_float2(0, 0);
    if (at < HIDDEN / 2) {
      const uint4 raw = load16(w.p->residual + (s64)m * HIDDEN + at * 2);
      v[i].x = from_s64((s64)(((u64)raw.y << 32) | raw.x)) * (1.0f / FIXED_ONE);
      v[i].y = from_s64((s64)(((u64)raw.w << 32) | raw.z)) * (1.0f / FIXED_ONE);
    }
    sum += v[i].x * v[i].x + v[i].y * v[i].y;
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  float* sums = w.small + (m & 1) * WARPS;
  if (w.lane == 0) sums[w.warp] = sum;
  compute_sync();
  sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += sums[i];
  const float inverse = 1.0f / sqrtf(sum / HIDDEN + NORM_EPS);
#pragma unroll
  for (int i = 0; i < NORM_PAIRS; ++i) {
    const int at = i * COMPUTE + w.thread;
    if (at < HIDDEN / 2)
      ((u32*)to)[at] = pack_activation(v[i].x * inverse * weights.v[i].x, v[i].y * inverse * weights.v[i].y);
  }
}

// Rows of 16-bit activations from device memory into the operand, eight requests of a thread at a time.
template <int WIDTH>
DEVICE void load_rows(Worker& w, const u16* from, int stride) {
  constexpr int vectors = WIDTH / 8;
  const int total = vectors * w.rows;
  for (int base = w.thread; base < total; base += 8 * COMPUTE) {
    uint4 held[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = base + i * COMPUTE, m = at / vectors;
      if (at < total) held[i] = load16(from + (s64)m * stride + (at - m * vectors) * 8);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = base + i * COMPUTE, m = at / vectors;
      if (at < total) *(uint4*)(w.operand + (s64)m * w.p->x_stride + (at - m * vectors) * 8) = held[i];
    }
  }
}

// After this the operand holds the normalised residual rows. Waits for the previous phase.
DEVICE void normalise(Worker& w, int index) {
  const NormWeights weights = load_norm(w, index);
  wait(w);
  if (w.rows <= w.p->direct_rows) {
    for (int m = 0; m < w.rows; ++m) normalise_row(w, weights, m, w.operand + (s64)m * w.p->x_stride);
  } else {
    for (int m = blockIdx.x; m < w.rows; m += gridDim.x)
      normalise_row(w, weights, m, w.p->normed + (s64)m * HIDDEN);
    arrive(w);
    wait(w);
    load_rows<HIDDEN>(w, w.p->normed, HIDDEN);
  }
  compute_sync();
}

DEVICE void store_key(Worker& w, int layer, int m, int head, int d, float v) {
  const int slot = w.control->position[m] % PAGE;
  w.p->keys[layer * w.p->kv_layer_stride + (((s64)w.pages[m] * KV_HEADS + head) * PAGE + slot) * HEAD_DIM + d] = bf16(v);
}
DEVICE void store_value(Worker& w, int layer, int m, int head, int d, float v) {
  const int slot = w.control->position[m] % PAGE;
  w.p->values[layer * w.p->kv_layer_stride + (((s64)w.pages[m] * KV_HEADS + head) * HEAD_DIM + d) * PAGE + slot] = bf16(v);
}
DEVICE float2 rotate(float2 v, float2 angle) {
  return make_float2(v.x * angle.x - v.y * angle.y, v.y * angle.x + v.x * angle.y);
}

DEVICE void project_qkv(Worker& w, int layer) {
  const Span span = w.spans[QKV];
  for (int unit = span.low; unit < span.high; ++unit) {
    const int head = unit / (HEAD_DIM / 16), tile = unit % (HEAD_DIM / 16);
    multiply_unit<Qkv>(w, 0, [&](int, int g, int m, float low, float high) {
      if (head >= HEADS + KV_HEADS) {
        store_value(w, layer, m, head - HEADS - KV_HEADS, tile * 16 + g, low);
        store_value(w, layer, m, head - HEADS - KV_HEADS, tile * 16 + g + 8, high);
        return;
      }
      const int d = tile * 8 + g;  // a tile of Q or K holds eight dimensions and their rotary partners
      if (QK_NORM) {
        float* to = w.p->raw + (s64)m * QKV_ROWS + head * HEAD_DIM + d;
        to[0] = low;
        to[HEAD_DIM / 2] = high;
        return;
      }
      const float2 v = rotate(make_float2(low, high), w.rope[m * (HEAD_DIM / 2) + d]);
      if (head < HEADS) {
        u16* to = w.p->queries + (s64)m * QUERY_WIDTH + head * HEAD_DIM + d;
        to[0] = bf16(v.x);
        to[HEAD_DIM / 2] = bf16(v.y);
      } else {
        store_key(w, layer, m, head - HEADS, d, v.x);
        store_key(w, layer, m, head - HEADS, d + HEAD_DIM / 2, v.y);
      }
    });
  }
}

// Models that normalise each head of Q and K: one warp per head, between the projection and attention.
DEVICE void normalise_heads(Worker& w, int layer) {
  constexpr int EACH = HEAD_DIM / 64;
  const int total = w.rows * (HEADS + KV_HEADS);
  for (int at = blockIdx.x + w.warp * gridDim.x; at < total; at += gridDim.x * WARPS) {
    const int m = at / (HEADS + KV_HEADS), head = at % (HEADS + KV_HEADS);
    const float* from = w.p->raw + (s64)m * QKV_ROWS + head * HEAD_DIM;
    const float* weights = w.p->qk_norms + (s64)(layer * 2 + (head >= HEADS)) * HEAD_DIM;
    float2 v[EACH];
    float sum = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int d = w.lane * EACH + e;
      v[e] = make_float2(load4(from + d), load4(from + d + HEAD_DIM / 2));
      sum += v[e].x * v[e].x + v[e].y * v[e].y;
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
    const float inverse = 1.0f / sqrtf(sum / HEAD_DIM + NORM_EPS);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int d = w.lane * EACH + e;
      v[e] = make_float2(v[e].x * inverse * weights[d], v[e].y * inverse * weights[d + HEAD_DIM / 2]);
      v[e] = rotate(v[e], w.rope[m * (HEAD_DIM / 2) + d]);
      if (head < HEADS) {
        u16* to = w.p->queries + (s64)m * QUERY_WIDTH + head * HEAD_DIM + d;
        to[0] = bf16(v[e].x);
        to[HEAD_DIM / 2] = bf16(v[e].y);
      } else {
        store_key(w, layer, m, head - HEADS, d, v[e].x);
        store_key(w, layer, m, head - HEADS, d + HEAD_DIM / 2, v[e].y);
      }
    }
  }
}

// Attention: a block takes one KV head of one sequence over CHUNK keys. Each warp scores 32 keys, then
// gathers an eighth of the head's dimensions over all of them. Keys and values go straight to registers.
constexpr int K_STEPS = HEAD_DIM / 32;
constexpr int V_TILES = HEAD_DIM / 64;
DEVICE bool find_unit(Worker& w, int index, Unit& unit) {
  const Control& c = *w.control;
  for (int s = 0; s < c.sequences; ++s) {
    const int last = c.position[c.first[s] + c.count[s] - 1];
    const int chunks = chunks_to(last), tiles = (c.count[s] * GROUP + 15) / 16;
    const int units = chunks * tiles * KV_HEADS;
    if (index < units) {
      unit.sequence = s;
      unit.head = index % KV_HEADS;
      unit.row = index / KV_HEADS % tiles * 16;
      unit.chunk = index / KV_HEADS / tiles;
      unit.last = last;
      return true;
    }
    index -= units;
  }
  return false;
}
// Pages of a unit's keys, one or four; entries past the end are never used.
DEVICE uint4 find_pages(Worker& w, const Unit& unit) {
  const int* table = w.p->tables + (s64)w.control->table[unit.sequence] * w.p->table_stride;
  if (unit.chunk < NEAR_CHUNKS) return make_uint4(table[unit.chunk], 0, 0, 0);
  return load16(table + NEAR_CHUNKS + (unit.chunk - NEAR_CHUNKS) * (CHUNK / PAGE));
}
DEVICE int first_key(const Unit& unit) {
  return unit.chunk < NEAR_CHUNKS ? unit.chunk * PAGE : NEAR + (unit.chunk - NEAR_CHUNKS) * CHUNK;
}
DEVICE u32 page_at(const uint4& pages, int i) { return i == 0 ? pages.x : i == 1 ? pages.y : i == 2 ? pages.z : pages.w; }
DEVICE s64 page_start(Worker& w, int layer, u32 page, int head) {
  return layer * w.p->kv_layer_stride + ((s64)page * KV_HEADS + head) * (PAGE * HEAD_DIM);
}
// Ask for a unit's keys and values ahead of time: they come as far as the second-level cache.
DEVICE void fetch_ahead(Worker& w, int layer, const Unit& unit, const uint4& pages) {
  constexpr int LINES = PAGE * HEAD_DIM * 2 / 128;  // of one page's keys
#pragma unroll
  for (int i = 0; i < CHUNK / PAGE; ++i) {
    if (first_key(unit) + i * PAGE > unit.last || (i && unit.chunk < NEAR_CHUNKS)) break;
    const s64 at = page_start(w, layer, page_at(pages, i), unit.head);
    if (w.thread < LINES) prefetch(w.p->keys + at + w.thread * 64);
    else if (w.thread < 2 * LINES) prefetch(w.p->values + at + (w.thread - LINES) * 64);
  }
}
// What a thread needs to know of the two rows it scores, g and g + 8 of the unit.
struct Rows {
  bool has0, has1;
  int m0, m1, h0, h1, limit0, limit1;
};
DEVICE Rows rows_of(Worker& w, const Unit& unit) {
  const int first = w.control->first[unit.sequence], live = w.control->count[unit.sequence] * GROUP;
  const int r0 = unit.row + w.g, r1 = r0 + 8;
  Rows r;
  r.has0 = r0 < live; r.has1 = r1 < live;
  r.m0 = first + (r.has0 ? r0 / GROUP : 0); r.m1 = first + (r.has1 ? r1 / GROUP : 0);
  r.h0 = unit.head * GROUP + r0 % GROUP; r.h1 = unit.head * GROUP + r1 % GROUP;
  r.limit0 = r.has0 ? w.control->position[r.m0] : -1; r.limit1 = r.has1 ? w.control->position[r.m1] : -1;
  return r;
}
// One chunk of 8 * 8 * T keys: a warp scores 8 T of them, then gathers an eighth of the dimensions over all.
template <int T>
DEVICE void attend_chunk(Worker& w, int layer, const Unit& unit, const uint4& pages) {
  constexpr int KEYS = 64 * T, STEPS = KEYS / 32, STRIDE = KEYS + PAD;
  const float score_scale = 1.4426950408889634f / sqrtf((float)HEAD_DIM);
  const float nothing = -INFINITY;
  const uint4 zero = {0, 0, 0, 0};
  u16* scores = (u16*)w.scratch;
  float* largest = (float*)(scores + 16 * SCORE_STRIDE);
  float* totals = largest + WARPS * 16;
  const int start = first_key(unit);
  uint4 k[T][K_STEPS];
  {
    const int page = T == 1 ? 0 : w.warp / 2, within = T == 1 ? w.warp * 8 : (w.warp & 1) * 32;
    const u16* at = w.p->keys + page_start(w, layer, page_at(pages, page), unit.head) + within * HEAD_DIM + w.j * 8;
    const bool there = start + page * PAGE <= unit.last;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const int key = T == 1 ? w.g : (w.g / 2) * 8 + t * 2 + (w.g & 1);  // so that a thread's scores belong to adjacent keys
#pragma unroll
      for (int s = 0; s < K_STEPS; ++s) k[t][s] = there ? load16(at + key * HEAD_DIM + s * 32) : zero;
    }
  }
  const Rows r = rows_of(w, unit);
  const u16* q0 = w.p->queries + r.m0 * QUERY_WIDTH + r.h0 * HEAD_DIM + w.j * 8;
  const u16* q1 = w.p->queries + r.m1 * QUERY_WIDTH + r.h1 * HEAD_DIM + w.j * 8;
  uint4 a[K_STEPS], b[K_STEPS];
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    a[step] = r.has0 ? load16(q0 + step * 32) : zero;
    b[step] = r.has1 ? load16(q1 + step * 32) : zero;
  }
  float s[T][4];
#pragma unroll
  for (int t = 0; t < T; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
    for (int t = 0; t < T; ++t) {
      mma_bf16(s[t], a[step].x, b[step].x, a[step].y, b[step].y, k[t][step].x, k[t][step].y);
      mma_bf16(s[t], a[step].z, b[step].z, a[step].w, b[step].w, k[t][step].z, k[t][step].w);
    }
  uint4 v[STEPS][V_TILES];  // they arrive during what follows
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const u16* at = w.p->values + page_start(w, layer, page_at(pages, step / 2), unit.head) +
                    (w.warp * (HEAD_DIM / 8) + w.g) * PAGE + (step & 1) * 32 + w.j * 8;
    const bool there = start + step / 2 * PAGE <= unit.last;
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) v[step][n] = there ? load16(at + n * 8 * PAGE) : zero;
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
    packed0[t] = pack_bf16(s[t][0], s[t][1]);
    packed1[t] = pack_bf16(s[t][2], s[t][3]);
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
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const u16* row = scores + w.g * STRIDE + step * 32 + w.j * 8;
    const uint4 c = *(const uint4*)row, d = *(const uint4*)(row + 8 * STRIDE);
#pragma unroll
    for (int n = 0; n < V_TILES; ++n) {
      mma_bf16(out[n], c.x, d.x, c.y, d.y, v[step][n].x, v[step][n].y);
      mma_bf16(out[n], c.z, d.z, c.w, d.w, v[step][n].z, v[step][n].w);
    }
  }
  const s64 at0 = ((s64)r.m0 * HEADS + r.h0) * w.p->partial_stride + unit.chunk;
  const s64 at1 = ((s64)r.m1 * HEADS + r.h1) * w.p->partial_stride + unit.chunk;
  const int d = w.warp * (HEAD_DIM / 8) + w.j * 2;
#pragma unroll
  for (int n = 0; n < V_TILES; ++n) {
    if (r.has0) *(float2*)(w.p->partial + at0 * HEAD_DIM + d + n * 8) = make_float2(out[n][0], out[n][1]);
    if (r.has1) *(float2*)(w.p->partial + at1 * HEAD_DIM + d + n * 8) = make_float2(out[n][2], out[n][3]);
  }
  if (w.warp == 0 && w.j == 0) {
    sum0 = sum1 = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) { sum0 += totals[i * 16 + w.g]; sum1 += totals[i * 16 + w.g + 8]; }
    if (r.has0) w.p->partial_norm[at0] = make_float2(top0, sum0);
    if (r.has1) w.p->partial_norm[at1] = make_float2(top1, sum1);
  }
}

DEVICE void attend(Worker& w, int layer) {
  Unit unit = w.first_unit;
  uint4 pages = w.first_pages;
  bool more = w.attends;
  int index = blockIdx.x;
  wait(w);
  while (more) {
    Unit next;
    uint4 next_pages = make_uint4(0, 0, 0, 0);
    index += gridDim.x;
    const bool another = find_unit(w, index, next);
    if (another) {
      next_pages = find_pages(w, next);
      fetch_ahead(w, layer, next, next_pages);
    }
    if (unit.chunk < NEAR_CHUNKS) attend_chunk<1>(w, layer, unit, pages);
    else attend_chunk<4>(w, layer, unit, pages);
    unit = next;
    pages = next_pages;
    more = another;
    if (more) compute_sync();  // the scratch is read; it is free
  }
}

// Partial results of a row's chunks meet in three stages of fixed shape, so that any number of threads may share the
// work: chunk c belongs to group c % 32 and a group's chunks are added first (up to 32 chunks a group is one chunk);
// then groups 0 ... 15 and 16 ... 31; then those two.
constexpr int GROUPS = 32;
struct Partial { float top, total, x, y, z, u; };
DEVICE Partial nothing_yet() {
  Partial p;
  p.top = -INFINITY;
  p.total = p.x = p.y = p.z = p.u = 0.0f;
  return p;
}
DEVICE void add_scaled(Partial& sum, const Partial& part, float scale) {
  sum.x += scale * part.x;
  sum.y += scale * part.y;
  sum.z += scale * part.z;
  sum.u += scale * part.u;
}
DEVICE void take_values(Partial& p, const float* from) {
  const uint4 raw = load16(from);
  p.x = __uint_as_float(raw.x); p.y = __uint_as_float(raw.y); p.z = __uint_as_float(raw.z); p.u = __uint_as_float(raw.w);
}
// By one warp, lane = group: what each group's sums are multiplied by at the end.
DEVICE float group_weight(float top, float total) {
  float best = top;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) best = fmaxf(best, shuffle_xor(best, mask));
  const float weight = power_of_two(top - best);
  float sum = weight * total;
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  return weight / sum;
}
DEVICE uint2 packed_sum(const Partial& first, const Partial& second) {
  return make_uint2(pack_activation(first.x + second.x, first.y + second.y), pack_activation(first.z + second.z, first.u + second.u));
}
DEVICE Partial other_half(const Partial& p) {  // of the thread eight lanes away
  Partial o;
  o.x = shuffle_xor(p.x, 8); o.y = shuffle_xor(p.y, 8); o.z = shuffle_xor(p.z, 8); o.u = shuffle_xor(p.u, 8);
  return o;
}

// Rows of at most 32 chunks, by every block for itself, and only the heads that its share of O reads.
DEVICE void combine_alone(Worker& w, int first_head, int heads) {
  float* weights = w.scratch;  // [row, head][GROUPS]
  for (int at = w.warp; at < w.rows * heads; at += WARPS) {
    const int m = at / heads, head = first_head + at % heads;
    const s64 base = ((s64)m * HEADS + head) * w.p->partial_stride;
    float2 norm = make_float2(-INFINITY, 0.0f);
    if (w.lane < chunks_to(w.control->position[m])) norm = load8(w.p->partial_norm + base + w.lane);
    weights[at * GROUPS + w.lane] = group_weight(norm.x, norm.y);
  }
  compute_sync();
  // A thread adds 16 chunks of four dimensions; its partner, eight lanes away, the other 16.
  constexpr int QUADS = HEAD_DIM / 4;
  const int half = w.lane >> 3 & 1, items = w.rows * heads * QUADS;
  const int lane_item = (w.lane & 7) + (w.lane >> 4) * 8 + w.warp * 16;  // 0 ... 127
  for (int base_item = 0; base_item < items; base_item += COMPUTE / 2) {
    const int item = base_item + lane_item;
    const bool real = item < items;
    const int at = real ? item / QUADS : 0, d = item % QUADS * 4;
    const int m = at / heads, head = first_head + at % heads;
    const int chunks = chunks_to(w.control->position[m]);
    const float* parts = w.p->partial + (((s64)m * HEADS + head) * w.p->partial_stride + half * 16) * HEAD_DIM + d;
    Partial part[16], sum = nothing_yet();
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      part[c] = nothing_yet();
      if (half * 16 + c < chunks) take_values(part[c], parts + c * HEAD_DIM);
    }
#pragma unroll
    for (int c = 0; c < 16; ++c) add_scaled(sum, part[c], weights[at * GROUPS + half * 16 + c]);
    const Partial other = other_half(sum);
    if (real && half == 0) *(uint2*)(w.operand + m * w.p->x_stride + head * HEAD_DIM + d) = packed_sum(sum, other);
  }
}
// 32 dimensions of one head of one row by a whole block.
DEVICE void combine_together(Worker& w, int m, int head, int d) {
  const int chunks = chunks_to(w.control->position[m]);
  const s64 base = ((s64)m * HEADS + head) * w.p->partial_stride;
  const float2* norms = w.p->partial_norm + base;
  const int quad = w.thread & 7, group = w.thread >> 3;
  Partial sum = nothing_yet();
  for (int from = group; from < chunks; from += GROUPS * 8) {
    Partial parts[8];
    float top = sum.top;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int c = from + i * GROUPS;
      parts[i] = nothing_yet();
      if (c < chunks) {
        const float2 n = load8(norms + c);
        parts[i].top = n.x;
        parts[i].total = n.y;
        take_values(parts[i], w.p->partial + (base + c) * HEAD_DIM + d + quad * 4);
      }
      top = fmaxf(top, parts[i].top);
    }
    if (top > -INFINITY) {
      Partial grown = nothing_yet();
      grown.top = top;
      float scale = power_of_two(sum.top - top);
      grown.total += scale * sum.total;
      add_scaled(grown, sum, scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scale = power_of_two(parts[i].top - top);
        grown.total += scale * parts[i].total;
        add_scaled(grown, parts[i], scale);
      }
      sum = grown;
    }
  }
  Partial* all = (Partial*)w.scratch;
  float* weights = (float*)(all + GROUPS * 8);
  compute_sync();  // the scratch is free
  all[group * 8 + quad] = sum;
  compute_sync();
  if (w.warp == 0) {
    weights[w.lane] = group_weight(all[w.lane * 8].top, all[w.lane * 8].total);
    warp_sync();
    const int half = w.lane >> 3 & 1;
    sum = nothing_yet();
    for (int i = 0; i < 16; ++i) add_scaled(sum, all[(half * 16 + i) * 8 + quad], weights[half * 16 + i]);
    const Partial other = other_half(sum);
    if (w.lane < 8) *(uint2*)(w.p->attended + (s64)m * QUERY_WIDTH + head * HEAD_DIM + d + quad * 4) = packed_sum(sum, other);
  }
}

// After this the operand holds the attended rows, as far as this block reads them. Waits for the previous phase.
DEVICE void gather(Worker& w) {
  const Control& c = *w.control;
  const Span span = w.spans[OUTPUT];
  int last = 0;
  for (int m = 0; m < w.rows; ++m) last = c.position[m] > last ? c.position[m] : last;
  wait(w);
  if (last < NEAR && w.rows <= w.p->fused_rows) {
    if (span.low < span.high) {
      constexpr int EACH = HEADS / O_SPLIT;  // heads in one part of the inner dimension
      const int from = span.low / (HIDDEN / 16), to = (span.high - 1) / (HIDDEN / 16);
      combine_alone(w, from * EACH, (to - from + 1) * EACH);
    }
  } else {
    constexpr int EACH = QUERY_WIDTH / 32;
    for (int i = blockIdx.x; i < w.rows * EACH; i += gridDim.x)
      combine_together(w, i / EACH, i % EACH / (HEAD_DIM / 32), i % EACH % (HEAD_DIM / 32) * 32);
    arrive(w);
    wait(w);
    load_rows<QUERY_WIDTH>(w, w.p->attended, QUERY_WIDTH);
  }
  compute_sync();
}

DEVICE void project_output(Worker& w) {
  const Span span = w.spans[OUTPUT];
  for (int unit = span.low; unit < span.high; ++unit) {
    const int row = unit % (HIDDEN / 16) * 16;
    multiply_unit<Output>(w, unit / (HIDDEN / 16) * Output::inner, [&](int, int g, int m, float low, float high) {
      add_residual(w, m, row + g, low);
      add_residual(w, m, row + g + 8, high);
    });
  }
}
DEVICE void project_gate_up(Worker& w) {
  const Span span = w.spans[GATE_UP];
  for (int unit = span.low; unit < span.high; ++unit)
    multiply_unit<GateUp>(w, 0, [&](int, int g, int m, float low, float high) {
      w.p->activated[(s64)m * INTERMEDIATE + unit * 8 + g] = activation(low / (1.0f + __expf(-low)) * high);
    });
}
DEVICE void project_down(Worker& w) {
  const Span span = w.spans[DOWN];
  const bool whole = w.p->x_stride >= INTERMEDIATE + PAD;
  int loaded = -1;
  if (whole && span.low < span.high) {
    load_rows<INTERMEDIATE>(w, w.p->activated, INTERMEDIATE);
    compute_sync();
  }
  for (int unit = span.low; unit < span.high; ++unit) {
    const int split = unit / (HIDDEN / 16), row = unit % (HIDDEN / 16) * 16;
    if (!whole && split != loaded) {
      compute_sync();
      load_rows<Down::inner>(w, w.p->activated + split * Down::inner, INTERMEDIATE);
      compute_sync();
      loaded = split;
    }
    multiply_unit<Down>(w, whole ? split * Down::inner : 0, [&](int, int g, int m, float low, float high) {
      add_residual(w, m, row + g, low);
      add_residual(w, m, row + g + 8, high);
    });
  }
}

DEVICE bool better(float value, int token, float best, int best_token) {
  return value > best || (value == best && token < best_token);
}

// Logits of every row, and this block's best of each.
DEVICE void project_head(Worker& w) {
  const Span span = w.spans[HEAD];
  constexpr int EACH = COLUMNS / 4;
  float best[EACH];
  int token[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) { best[i] = -INFINITY; token[i] = 0x7fffffff; }
  for (int unit = span.low; unit < span.high; ++unit)
    multiply_unit<Head>(w, 0, [&](int i, int g, int m, float low, float high) {
      const int id = unit * 16 + g;
      float* logits = w.p->logits + (s64)m * VOCAB;
      if (id < VOCAB) {
        logits[id] = low;
        if (better(low, id, best[i], token[i])) { best[i] = low; token[i] = id; }
      }
      if (id + 8 < VOCAB) {
        logits[id + 8] = high;
        if (better(high, id + 8, best[i], token[i])) { best[i] = high; token[i] = id + 8; }
      }
    });
  compute_sync();  // the scratch is free
  float* values = w.scratch;
  int* tokens = (int*)w.scratch + WARPS * MAX_ROWS;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
#pragma unroll
    for (int mask = 4; mask; mask >>= 1) {
      const float other = shuffle_xor(best[i], mask);
      const int other_token = shuffle_xor_int(token[i], mask);
      if (better(other, other_token, best[i], token[i])) { best[i] = other; token[i] = other_token; }
    }
    if ((w.lane & 7) == 0) {
      values[w.warp * MAX_ROWS + (w.lane >> 3) + i * 4] = best[i];
      tokens[w.warp * MAX_ROWS + (w.lane >> 3) + i * 4] = token[i];
    }
  }
  compute_sync();
  if (w.thread < w.rows) {
    float top = values[w.thread];
    int top_token = tokens[w.thread];
    for (int k = 1; k < WARPS; ++k)
      if (better(values[k * MAX_ROWS + w.thread], tokens[k * MAX_ROWS + w.thread], top, top_token)) {
        top = values[k * MAX_ROWS + w.thread];
        top_token = tokens[k * MAX_ROWS + w.thread];
      }
    w.p->best_value[blockIdx.x * MAX_ROWS + w.thread] = top;
    w.p->best_token[blockIdx.x * MAX_ROWS + w.thread] = top_token;
  }
}

// The best of all blocks for row m, by one warp.
DEVICE void best_of_all(Worker& w, int m, float& best, int& token) {
  best = -INFINITY;
  token = 0x7fffffff;
  for (int i = w.lane; i < gridDim.x; i += 32) {
    const float other = load4(w.p->best_value + i * MAX_ROWS + m);
    const int other_token = __float_as_int(load4((const float*)w.p->best_token + i * MAX_ROWS + m));
    if (better(other, other_token, best, token)) { best = other; token = other_token; }
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    const float other = shuffle_xor(best, mask);
    const int other_token = shuffle_xor_int(token, mask);
    if (better(other, other_token, best, token)) { best = other; token = other_token; }
  }
}

// The noise of engine/noise.py: Philox4x32-10, counter (token / 4, position), key seed.
DEVICE u32 noise_bits(int token, u32 position, u32 key_a, u32 key_b) {
  u32 c0 = token >> 2, c1 = position, c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
    c0 = (u32)(b >> 32) ^ c1 ^ key_a;
    c2 = (u32)(a >> 32) ^ c3 ^ key_b;
    c1 = (u32)b;
    c3 = (u32)a;
    key_a += 0x9E3779B9u;
    key_b += 0xBB67AE85u;
  }
  const int word = token & 3;
  return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

// Rows with a temperature: each block scores its slice of the vocabulary with the noise of that place.
DEVICE void draw(Worker& w) {
  const Control& c = *w.control;
  const int low = (int)((s64)blockIdx.x * VOCAB / gridDim.x), high = (int)((s64)(blockIdx.x + 1) * VOCAB / gridDim.x);
  for (int m = w.warp; m < w.rows; m += WARPS) {
    const int s = c.sequence[m];
    const float inverse = c.inverse_temperature[s];
    if (inverse == 0.0f) continue;
    float top;
    int ignored;
    best_of_all(w, m, top, ignored);
    double best = -INFINITY;
    int token = 0x7fffffff;
    for (int id = low + w.lane; id < high; id += 32) {
      const float relative = (load4(w.p->logits + (s64)m * VOCAB + id) - top) * inverse;
      if (!(relative > -26.8738f) || relative < c.log_min_p[s]) continue;
      const u32 bits = noise_bits(id, (u32)(c.position[m] + 1), c.seed_low[s], c.seed_high[s]);
      const double uniform = ((double)bits + 0.5) * 2.3283064365386963e-10;
      const double score = (double)relative - log(-log1p(-uniform));
      if (score > best || (score == best && id < token)) { best = score; token = id; }
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      const double other = shuffle_xor_double(best, mask);
      const int other_token = shuffle_xor_int(token, mask);
      if (other > best || (other == best && other_token < token)) { best = other; token = other_token; }
    }
    if (w.lane == 0) {
      w.p->best_score[blockIdx.x * MAX_ROWS + m] = best;
      w.p->best_token[gridDim.x * MAX_ROWS + blockIdx.x * MAX_ROWS + m] = token;
    }
  }
}

// One block ends the step: tokens of all rows, drafts accepted, news for the host, rows of the next step.
DEVICE void conclude(Worker& w) {
  const Control& c = *w.control;
  int* chosen = (int*)w.small;  // MAX_ROWS
  int* accepted = chosen + MAX_ROWS;
  for (int m = w.warp; m < w.rows; m += WARPS) {
    float best;
    int token;
    best_of_all(w, m, best, token);
    if (!(fabsf(best) < LARGEST)) { token = -1; w.p->barrier[2] = 1; }
    if (c.inverse_temperature[c.sequence[m]] != 0.0f && token >= 0) {
      double score = -INFINITY;
      token = 0x7fffffff;
      for (int i = w.lane; i < gridDim.x; i += 32) {
        const double other = *(const volatile double*)(w.p->best_score + i * MAX_ROWS + m);
        const int other_token = *(const volatile int*)(w.p->best_token + (gridDim.x + i) * MAX_ROWS + m);
        if (other > score || (other == score && other_token < token)) { score = other; token = other_token; }
      }
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) {
        const double other = shuffle_xor_double(score, mask);
        const int other_token = shuffle_xor_int(token, mask);
        if (other > score || (other == score && other_token < token)) { score = other; token = other_token; }
      }
    }
    if (w.lane == 0) chosen[m] = token;
  }
  compute_sync();
  const int s = w.thread;
  Control* next = w.p->next;
  if (s < c.sequences) {
    const int first = c.first[s], end = first + c.count[s];
    int row = first + c.pending[s] - 1, taken = 0;
    while (row + 1 < end && chosen[row] == c.token[row + 1]) { ++row; ++taken; }
    accepted[s] = taken;
    next->token[s] = chosen[row] < 0 ? 0 : chosen[row];
    next->position[s] = c.position[row] + 1;
    next->sequence[s] = s;
    next->first[s] = s;
    next->count[s] = 1;
    next->pending[s] = 1;
    next->table[s] = c.table[s];
    next->inverse_temperature[s] = c.inverse_temperature[s];
    next->log_min_p[s] = c.log_min_p[s];
    next->seed_low[s] = c.seed_low[s];
    next->seed_high[s] = c.seed_high[s];
  }
  compute_sync();
  const u32 fault = *(volatile u32*)&w.p->barrier[2];
  if (w.thread == 0) {
    const bool stopped = load_system(w.p->stop) != 0 || fault;
    next->rows = stopped ? 0 : c.sequences;
    next->sequences = c.sequences;
    next->sampled = c.sampled;
    next->ticket = c.ticket + 1;
  }
  int* result = w.p->result;
  if (w.thread < MAX_ROWS) {
    store_system(result + 2 + w.thread, w.thread < c.sequences ? accepted[w.thread] : 0);
    store_system(result + 2 + MAX_ROWS + w.thread, w.thread < w.rows ? chosen[w.thread] : -1);
    fence_system();
  }
  compute_sync();
  if (w.thread == 0) {
    store_system(result + 1, (int)fault);
    fence_system();
    store_system(result, c.ticket);
    w.p->barrier[2] = 0;
  }
}

DEVICE void compute(Worker& w) {
  const Parameters& p = *w.p;
  const Control& c = *w.control;
  for (int i = blockIdx.x * COMPUTE + w.thread; i < w.rows * HIDDEN; i += gridDim.x * COMPUTE) {
    const int m = i / HIDDEN, d = i % HIDDEN;
    p.residual[i] = to_s64(bf16_value(p.embedding[(s64)c.token[m] * HIDDEN + d]) * FIXED_ONE);
  }
  for (int i = w.thread; i < w.rows * (HEAD_DIM / 2); i += COMPUTE)
    w.rope[i] = p.rope[(s64)c.position[i / (HEAD_DIM / 2)] * (HEAD_DIM / 2) + i % (HEAD_DIM / 2)];
  if (w.thread < w.rows)
    w.pages[w.thread] = p.tables[(s64)c.table[c.sequence[w.thread]] * p.table_stride + c.position[w.thread] / PAGE];
  w.attends = find_unit(w, blockIdx.x, w.first_unit);
  if (w.attends) w.first_pages = find_pages(w, w.first_unit);
  arrive(w);
  for (int layer = 0; layer < LAYERS; ++layer) {
    if (w.attends) fetch_ahead(w, layer, w.first_unit, w.first_pages);
    normalise(w, layer * 2);
    project_qkv(w, layer);
    arrive(w);
    if (QK_NORM) {
      wait(w);
      normalise_heads(w, layer);
      arrive(w);
    }
    attend(w, layer);
    arrive(w);
    gather(w);
    project_output(w);
    arrive(w);
    normalise(w, layer * 2 + 1);
    project_gate_up(w);
    arrive(w);
    wait(w);
    project_down(w);
    arrive(w);
  }
  normalise(w, LAYERS * 2);
  project_head(w);
  arrive(w);
  if (c.sampled) {
    wait(w);
    draw(w);
    arrive(w);
  }
  if (blockIdx.x == 0) {
    wait(w);
    conclude(w);
  }
}

KERNEL void decode_step(const __grid_constant__ Parameters parameters) {
  SHARED_MEMORY(memory);
  const Parameters& p = parameters;
  const int thread = threadIdx.x;
  Control* control = (Control*)memory;
  u64* barriers = (u64*)(memory + BARRIERS_AT);
  for (int i = thread; i < CONTROL_WORDS; i += 288) ((int*)control)[i] = ((const volatile int*)p.control)[i];
  if (thread == 0) {
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(&barriers[i], 1);
      barrier_init(&barriers[16 + i], WARPS);
    }
    u64* meetings = (u64*)(memory + MEETINGS_AT);
    for (int i = 0; i < BUFFERS; ++i) {
      barrier_init(&meetings[i], WARPS);
      barrier_init(&meetings[BUFFERS + i], 1);
    }
    barrier_init_visible();
  }
  Span* spans = (Span*)(memory + SPANS_AT);
  if (thread == 32) {
    spans[QKV] = share(Qkv::units, QKV);
    spans[OUTPUT] = share(Output::units, OUTPUT);
    spans[GATE_UP] = share(GateUp::units, GATE_UP);
    spans[DOWN] = share(Down::units, DOWN);
    spans[HEAD] = share(Head::units, HEAD);
  }
  __syncthreads();
  if (control->rows == 0) {  // stopped before this step began: say so, touch nothing
    if (blockIdx.x == 0 && thread == 0) {
      p.next->rows = 0;
      p.next->ticket = control->ticket + 1;
      store_system(p.result + 1, -1);
      fence_system();
      store_system(p.result, control->ticket);
    }
    return;
  }
  Ring ring;
  ring.stages = memory + p.ring_offset;
  ring.full = barriers;
  ring.empty = barriers + 16;
  ring.count = p.stages;
  ring.at.stage = 0;
  ring.at.phase = 0;
  if (thread >= COMPUTE) {
    if (thread == COMPUTE) {
      Streamer s;
      s.ring = ring;
      s.spans = spans;
      s.oldest = ring.at;
      s.spare = p.in_flight;
      s.policy = streaming_policy();
      for (int layer = 0; layer < LAYERS; ++layer) {
        const u8* at = p.layers + layer * LAYER_BYTES;
        stream<Qkv>(s, at, QKV);
        stream<Output>(s, at + Qkv::bytes, OUTPUT);
        stream<GateUp>(s, at + Qkv::bytes + Output::bytes, GATE_UP);
        stream<Down>(s, at + Qkv::bytes + Output::bytes + GateUp::bytes, DOWN);
      }
      stream<Head>(s, p.head, HEAD);
    }
  } else {
    Worker w;
    w.p = &p;
    w.control = control;
    w.spans = spans;
    w.pages = (int*)(memory + PAGES_AT);
    w.small = (float*)(memory + SMALL_AT);
    w.rope = (float2*)(memory + ROPE_AT);
    w.scratch = (float*)(memory + SCRATCH_AT);
    w.operand = (u16*)(memory + OPERAND_AT);
    w.ring = ring;
    w.arrivals = 0;
    w.rows = control->rows;
    w.thread = thread;
    w.warp = thread / 32;
    w.lane = thread % 32;
    w.g = w.lane / 4;
    w.j = w.lane % 4;
    w.unit = 0;
    w.ready = (u64*)(memory + MEETINGS_AT);
    w.freed = w.ready + BUFFERS;
    w.first_pages = make_uint4(0, 0, 0, 0);
    w.marks = 0;
    compute(w);
    if (thread == 0 && exchange_add(&p.barrier[1], 1) == gridDim.x - 1) {
      p.barrier[0] = 0;
      p.barrier[1] = 0;
    }
  }
}
