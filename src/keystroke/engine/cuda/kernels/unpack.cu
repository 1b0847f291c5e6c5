// Dequantises stored weights to bf16 matrices for prefill. One warp per block of 16 rows and 64 columns. The numbers are exactly
// those that the decode kernel multiplies with.

struct Unpacking {
  const u8* packed;     // units, those of each split one behind the other
  const float* folded;  // [tiles][16] factors that rows were given afterwards and that do not belong to them; or none
  u16* out;             // bf16 [rows][columns]
  int tiles, splits, columns;
  int order;            // which rows a tile holds: see row_of
  int rows;
};
enum { PLAIN_ROWS, GATE_AND_UP, ROTARY };
// The matrix row at position g of a tile; `second` is that at position g + 8.
DEVICE int row_of(const Unpacking& p, int tile, int g, bool second) {
  if (p.order == GATE_AND_UP) return tile * 8 + g + (second ? p.rows / 2 : 0);
  if (p.order == ROTARY && tile < (HEADS + KV_HEADS) * (HEAD_DIM / 16))
    return tile / (HEAD_DIM / 16) * HEAD_DIM + tile % (HEAD_DIM / 16) * 8 + g + (second ? HEAD_DIM / 2 : 0);
  return tile * 16 + g + (second ? 8 : 0);
}

template <int F>
DEVICE void unpack_blocks(const Unpacking& p) {
  constexpr float ACTIVATIONS = ACTIVATION_SCALE;  // the tail's factors also undo the scale of activations
  const int lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  const int inner = p.columns / p.splits, blocks = inner / 64;
  const s64 unit_bytes = (s64)blocks * block_bytes(F) + TAIL, total = (s64)p.tiles * p.splits * blocks;
  const s64 warps = (s64)gridDim.x * blockDim.x / 32;
  for (s64 at = ((s64)blockIdx.x * blockDim.x + threadIdx.x) / 32; at < total; at += warps) {
    const int unit = (int)(at / blocks), block = (int)(at % blocks), tile = unit % p.tiles, split = unit / p.tiles;
    const u8* from = p.packed + unit * unit_bytes;
    u32 a[16];
    stored_weights<F>(from + block * block_bytes(F), block, lane, a);
    const float* tail = (const float*)(from + blocks * block_bytes(F));
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int place = g + 8 * second;
      const float scale = tail[place] / (p.folded ? p.folded[tile * 16 + place] / ACTIVATIONS : 1.0f / ACTIVATIONS);
      u16* to = p.out + (s64)row_of(p, tile, g, second) * p.columns + split * inner + block * 64 + j * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 pair = a[half * 8 + 2 * i + second];
          words[i] = pack_bf16(f16_value((u16)pair) * scale, f16_value((u16)(pair >> 16)) * scale);
        }
        *(uint4*)(to + half * 32) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

extern "C" __global__ void unpack_3(const Unpacking p) { unpack_blocks<3>(p); }
extern "C" __global__ void unpack_4(const Unpacking p) { unpack_blocks<4>(p); }
extern "C" __global__ void unpack_5(const Unpacking p) { unpack_blocks<5>(p); }
extern "C" __global__ void unpack_6(const Unpacking p) { unpack_blocks<6>(p); }
extern "C" __global__ void unpack_7(const Unpacking p) { unpack_blocks<7>(p); }
extern "C" __global__ void unpack_8(const Unpacking p) { unpack_blocks<8>(p); }
extern "C" __global__ void unpack_9(const Unpacking p) { unpack_blocks<9>(p); }
