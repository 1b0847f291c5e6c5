// Prefill between torch's matrix products: one launch for each row-wise operation.
// The same numbers as TorchOps in prefill_kernels.py, with the same rounding. Blocks do not wait for each other.

// Sizes come as macros: HIDDEN HEADS KV_HEADS HEAD_DIM INTERMEDIATE QK_NORM NORM_EPS KV_BYTES.
#define STRETCH extern "C" __global__ __launch_bounds__(256)

constexpr int THREADS = 256;
constexpr int PAGE = 64;
constexpr int HALF_HEAD = HEAD_DIM / 2;
constexpr bool KV8 = KV_BYTES == 1;

struct Stretch {
  float* x;               // [rows][HIDDEN] residual stream
  const u16* product;     // bf16 [rows][...]: what the last matrix product gave, or nothing yet
  const float* bias;      // of that product, or none
  const float* weight;    // of the norm; of the heads' norms [2][HEAD_DIM]
  u16* out;               // bf16 rows for the next product; of the heads: queries [rows][HEADS][HEAD_DIM]
  u16* flat_keys;         // bf16, for attention: the rows' own [rows][KV_HEADS][HEAD_DIM], or whole pages one behind the
  u16* flat_values;       // other [KV_HEADS][pages * PAGE][HEAD_DIM]
  void* keys;             // this layer's pages: [pages][KV_HEADS][PAGE][HEAD_DIM], bf16 or bytes
  void* values;           // [pages][KV_HEADS][HEAD_DIM][PAGE]
  const float2* rope;     // [context][HEAD_DIM / 2] cosine, sine
  const s64* table;       // pages of the sequence
  const float* key_steps;    // [KV_HEADS][HEAD_DIM] where keys and values are bytes
  const float* value_steps;
  s64 start;              // position of the first row
};

DEVICE float number(u16 bits) { return bf16_value(bits); }
DEVICE u16 rounded(float v) { return (u16)pack_bf16(v, 0.0f); }
DEVICE float2 both(u32 word) { return make_float2(number((u16)word), number((u16)(word >> 16))); }
DEVICE float warp_total(float v) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
  return v;
}

// One block per row: adds the last product to the residual stream, then normalises it.
STRETCH void add_and_normalise(const __grid_constant__ Stretch s) {
  constexpr int PAIRS = (HIDDEN / 2 + THREADS - 1) / THREADS;
  __shared__ float parts[THREADS / 32];
  const int thread = threadIdx.x;
  float2* x = (float2*)(s.x + (s64)blockIdx.x * HIDDEN);
  float2 v[PAIRS];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int at = i * THREADS + thread;
    v[i] = make_float2(0.0f, 0.0f);
    if (at >= HIDDEN / 2) continue;
    v[i] = x[at];
    if (s.product) {
      float2 more = both(((const u32*)(s.product + (s64)blockIdx.x * HIDDEN))[at]);
      if (s.bias) { more.x += s.bias[2 * at]; more.y += s.bias[2 * at + 1]; }
      v[i].x += more.x;
      v[i].y += more.y;
      x[at] = v[i];
    }
    sum += v[i].x * v[i].x + v[i].y * v[i].y;
  }
  sum = warp_total(sum);
  if (thread % 32 == 0) parts[thread / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) sum += parts[i];
  const float inverse = inverse_root(sum / HIDDEN + NORM_EPS);
  u32* out = (u32*)(s.out + (s64)blockIdx.x * HIDDEN);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int at = i * THREADS + thread;
    if (at >= HIDDEN / 2) continue;
    const float2 w = ((const float2*)s.weight)[at];
    out[at] = pack_bf16(v[i].x * inverse * w.x, v[i].y * inverse * w.y);
  }
}

// The stored form of a key or value, and what attention reads of it.
DEVICE u16 keep(u16* to, float v, float) {
  *to = rounded(v);
  return *to;
}
DEVICE u16 keep(u8* to, float v, float step) {
  *to = to_byte(v / step + 128.0f);
  return rounded((float)*to - 128.0f);
}
template <int BYTES> struct StoredAs { typedef u16 Type; };
template <> struct StoredAs<1> { typedef u8 Type; };
typedef StoredAs<KV_BYTES>::Type Stored;

// One block per row, one warp per head: bias, norm and rotation of Q and K; writes keys and values to their pages.
STRETCH void place_heads(const __grid_constant__ Stretch s) {
  constexpr int EACH = HALF_HEAD / 32;  // pairs of rotary partners that a lane has
  const int lane = threadIdx.x % 32, row = blockIdx.x;
  const s64 position = s.start + row, page = s.table[position / PAGE];
  const int slot = position % PAGE;
  for (int head = threadIdx.x / 32; head < HEADS + 2 * KV_HEADS; head += THREADS / 32) {
    const u16* from = s.product + ((s64)row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM;
    const float* bias = s.bias ? s.bias + head * HEAD_DIM : nullptr;
    float2 v[EACH];
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int d = lane * EACH + e;
      v[e] = make_float2(number(from[d]), number(from[d + HALF_HEAD]));
      if (bias) { v[e].x += bias[d]; v[e].y += bias[d + HALF_HEAD]; }
      sum += v[e].x * v[e].x + v[e].y * v[e].y;
    }
    const bool value = head >= HEADS + KV_HEADS;
    const float inverse = QK_NORM && !value ? inverse_root(warp_total(sum) / HEAD_DIM + NORM_EPS) : 1.0f;
    const float* weight = s.weight + (head < HEADS ? 0 : HEAD_DIM);
    const int kv = value ? head - HEADS - KV_HEADS : head - HEADS;
    const s64 base = (page * KV_HEADS + kv) * (PAGE * HEAD_DIM), own = ((s64)row * KV_HEADS + kv) * HEAD_DIM;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int d = lane * EACH + e, far = d + HALF_HEAD;
      if (value) {
        const float* steps = s.value_steps + kv * HEAD_DIM;
        Stored* to = (Stored*)s.values + base + slot;
        s.flat_values[own + d] = keep(to + d * PAGE, v[e].x, KV8 ? steps[d] : 1.0f);
        s.flat_values[own + far] = keep(to + far * PAGE, v[e].y, KV8 ? steps[far] : 1.0f);
        continue;
      }
      if (QK_NORM) v[e] = make_float2(v[e].x * inverse * weight[d], v[e].y * inverse * weight[far]);
      const float2 angle = s.rope[position * HALF_HEAD + d];
      v[e] = make_float2(v[e].x * angle.x - v[e].y * angle.y, v[e].y * angle.x + v[e].x * angle.y);
      if (head < HEADS) {
        u16* to = s.out + ((s64)row * HEADS + head) * HEAD_DIM;
        const float* steps = s.key_steps + head / (HEADS / KV_HEADS) * HEAD_DIM;
        to[d] = rounded(KV8 ? v[e].x * steps[d] : v[e].x);
        to[far] = rounded(KV8 ? v[e].y * steps[far] : v[e].y);
      } else {
        const float* steps = s.key_steps + kv * HEAD_DIM;
        Stored* to = (Stored*)s.keys + base + slot * HEAD_DIM;
        s.flat_keys[own + d] = keep(to + d, v[e].x, KV8 ? steps[d] : 1.0f);
        s.flat_keys[own + far] = keep(to + far, v[e].y, KV8 ? steps[far] : 1.0f);
      }
    }
  }
}

// One block per page of one head: gathers its keys and values for attention, contiguous in each key.
DEVICE u16 flat(u16 stored) { return stored; }
DEVICE u16 flat(u8 stored) { return rounded((float)stored - 128.0f); }
STRETCH void collect_pages(const __grid_constant__ Stretch s) {
  constexpr int NUMBERS = PAGE * HEAD_DIM;
  __shared__ u16 turned[HEAD_DIM][PAGE + 2];  // two more: neither way do lanes meet in a bank
  const s64 from = (s.table[blockIdx.x] * KV_HEADS + blockIdx.y) * NUMBERS;
  const s64 to = ((s64)blockIdx.y * gridDim.x + blockIdx.x) * NUMBERS;
  const Stored* keys = (const Stored*)s.keys + from;
  const Stored* values = (const Stored*)s.values + from;
#pragma unroll 4
  for (int i = threadIdx.x * 2; i < NUMBERS; i += THREADS * 2) {
    *(u32*)(s.flat_keys + to + i) = (u32)flat(keys[i]) | (u32)flat(keys[i + 1]) << 16;
    *(u32*)&turned[i / PAGE][i % PAGE] = (u32)flat(values[i]) | (u32)flat(values[i + 1]) << 16;
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x * 2; i < NUMBERS; i += THREADS * 2)
    *(u32*)(s.flat_values + to + i) = (u32)turned[i % HEAD_DIM][i / HEAD_DIM] | (u32)turned[i % HEAD_DIM + 1][i / HEAD_DIM] << 16;
}

// Two numbers per thread: silu(gate) * up, where a row of the product holds all gates, then all ups.
STRETCH void activate(const __grid_constant__ Stretch s) {
  const int at = blockIdx.y * THREADS + threadIdx.x;
  if (at >= INTERMEDIATE / 2) return;
  const u32* row = (const u32*)(s.product + (s64)blockIdx.x * (2 * INTERMEDIATE));
  float2 gate = both(row[at]), up = both(row[INTERMEDIATE / 2 + at]);
  if (s.bias) {
    gate.x += s.bias[2 * at]; gate.y += s.bias[2 * at + 1];
    up.x += s.bias[INTERMEDIATE + 2 * at]; up.y += s.bias[INTERMEDIATE + 2 * at + 1];
  }
  const float x = gate.x / (1.0f + __expf(-gate.x)), y = gate.y / (1.0f + __expf(-gate.y));
  ((u32*)(s.out + (s64)blockIdx.x * INTERMEDIATE))[at] = pack_bf16(x * up.x, y * up.y);
}
