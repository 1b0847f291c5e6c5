// A GPU small enough to think with: the functions of kernels/device.cuh on a CPU.
// Law: every CUDA thread is a fibre; all blocks run at once and take turns, so barriers between blocks work,
// a missing one shows, and a deadlock ends in an error. Copies land late, in any order. BULK says whether there is an
// engine for large ones. Numbers follow the hardware:
// bf16 and f16 round to nearest even, tensor cores multiply exactly and add in float32.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define DEVICE static inline
#define DEVICE_APART static
#define DEVICE_METHOD inline
#define KERNEL static
#define __grid_constant__
#define SHARED_MEMORY(name) u8* name = emulator::me->block->memory.get()

namespace emulator {
struct Meeting { u32 waiting = 0, generation = 0; };
struct Warp { Meeting meeting; u32 slots[2][32][8]; };
struct Counter { u32 count = 0, left = 0, generation = 0; s64 bytes = 0; };
struct Block {
  int index;
  std::unique_ptr<u8[]> memory;
  Meeting all, computing, halves[2];
  Warp warps[9];
  std::map<const void*, Counter> barriers;
};
// What a thread copies between two arrivals, 16 bytes at a time; then the barrier at which it arrives.
struct Piece { void* to; const void* from; };
struct Batch { std::vector<Piece> pieces; Counter* barrier = nullptr; bool landed = false; };
struct Fibre {
  std::deque<Batch> batches;  // the oldest first, the last not yet ended
  ucontext_t context;
  std::unique_ptr<u8[]> stack;
  Block* block;
  int thread;
  u32 parity = 0;
  const u32* watched = nullptr;
  u32 seen = 0;
  bool done = false;
};
static Fibre* me;
static ucontext_t scheduler;
static u64 progress;
static int blocks;

// Copies under way, and chance, the same in every run.
struct Copy { void* to; const void* from; u32 bytes; Counter* barrier; };
static std::vector<Copy> under_way;
static std::vector<Fibre*> copying;  // fibres with ended batches
static u32 chance = 1;
static u32 draw() { return (chance = chance * 1664525u + 1013904223u) >> 16; }

static void leave() { Fibre* self = me; swapcontext(&self->context, &scheduler); }
static void wait_for_change(const u32* p, u32 old) {
  while (*p == old) { me->watched = p; me->seen = old; leave(); }
}
static void meet(Meeting& m, u32 expected) {
  if (++m.waiting == expected) { m.waiting = 0; ++m.generation; ++progress; return; }
  wait_for_change(&m.generation, m.generation);
}
static u32 (*exchange(const u32* data, int words))[8] {
  Warp& warp = me->block->warps[me->thread / 32];
  const u32 parity = me->parity;
  me->parity ^= 1;
  for (int i = 0; i < words; ++i) warp.slots[parity][me->thread % 32][i] = data[i];
  meet(warp.meeting, 32);
  return warp.slots[parity];
}
static float value_bf16(u16 bits) { u32 w = (u32)bits << 16; float v; memcpy(&v, &w, 4); return v; }
static u16 bits_bf16(float v) {
  u32 w; memcpy(&w, &v, 4);
  if ((w & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((w + 0x7fffu + ((w >> 16) & 1)) >> 16);
}
static float value_f16(u16 bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = (bits & 1023) / 1024.0f;
  const float size = exponent ? ldexpf(1 + fraction, exponent - 15) : ldexpf(fraction, -14);
  return bits >> 15 ? -size : size;
}
static u16 bits_f16(float v) {
  const u16 sign = std::signbit(v) ? 0x8000 : 0;
  v = fabsf(v);
  if (v == 0.0f) return sign;
  int exponent;
  frexpf(v, &exponent);
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;  // value of the last bit, as a power of two
  const u32 steps = (u32)nearbyintf(ldexpf(v, -unit));         // a carry moves into the exponent by itself
  if (unit == -24) return sign | (u16)steps;
  return sign | (u16)(((unit + 24) << 10) + steps);
}
template <class Value>
static void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Value value) {
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  u32(*all)[8] = exchange(mine, 6);
  const int lane = me->thread % 32, g = lane / 4, j = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i / 2) * 8, column = j * 2 + (i & 1);
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const u32 a = all[(row % 8) * 4 + (k % 8) / 2][(row / 8) + 2 * (k / 8)];
      const u32 b = all[column * 4 + (k % 8) / 2][4 + k / 8];
      sum += value((u16)(k & 1 ? a >> 16 : a)) * value((u16)(k & 1 ? b >> 16 : b));
    }
    c[i] = sum;
  }
}
}  // namespace emulator

struct ThreadIndex { operator int() const { return emulator::me->thread; } };
struct BlockIndex { operator int() const { return emulator::me->block->index; } };
struct GridSize { operator int() const { return emulator::blocks; } };
static struct { ThreadIndex x; } threadIdx;
static struct { BlockIndex x; } blockIdx;
static struct { GridSize x; } gridDim;

DEVICE void __syncthreads() { emulator::meet(emulator::me->block->all, 288); }
DEVICE void compute_sync() { emulator::meet(emulator::me->block->computing, 256); }
DEVICE void half_sync(int half) { emulator::meet(emulator::me->block->halves[half], 128); }
DEVICE void warp_sync() { emulator::exchange(nullptr, 0); }
DEVICE void release_add(u32* p, u32 v) { *p += v; ++emulator::progress; }
DEVICE void relaxed_add(u32* p, u32 v) { release_add(p, v); }
DEVICE u32 acquire_load(const u32* p) { return *p; }
DEVICE u32 relaxed_load(const u32* p) { return *p; }
DEVICE u32 exchange_add(u32* p, u32 v) { u32 old = *p; *p += v; ++emulator::progress; return old; }
DEVICE void add_s64(s64* p, s64 v) { *p += v; }
DEVICE void fence_system() {}
DEVICE int load_system(const int* p) { return *p; }
DEVICE void store_system(int* p, int v) { *p = v; }
DEVICE void spin() { emulator::leave(); }
DEVICE void spin_for_host() {  // what another process of thought does is progress too, for a while
  static u64 asked = 0;
  if (++asked % 100000 == 0) fprintf(stderr, "the kernel has asked the host %llu times\n", asked);
  if (asked < 100000000) ++emulator::progress;
  emulator::leave();
}
DEVICE void barrier_init(u64* b, u32 count) {
  auto& c = emulator::me->block->barriers[b];
  c = emulator::Counter();
  c.count = c.left = count;
}
DEVICE void barrier_init_visible() {}
DEVICE void barrier_settle(emulator::Counter& c) {
  if (c.left == 0 && c.bytes == 0) { c.left = c.count; ++c.generation; ++emulator::progress; }
}
DEVICE void barrier_expect(u64* b, u32 bytes) {
  auto& c = emulator::me->block->barriers.at(b);
  c.bytes += bytes; --c.left;
  barrier_settle(c);
}
DEVICE void barrier_arrive(u64* b) {
  auto& c = emulator::me->block->barriers.at(b);
  --c.left;
  barrier_settle(c);
}
DEVICE void barrier_wait(u64* b, u32 parity) {
  auto& c = emulator::me->block->barriers.at(b);
  while ((c.generation & 1) == parity) emulator::wait_for_change(&c.generation, c.generation);
}
DEVICE void barrier_arrive_behind(u64* b, u32, u32) { barrier_arrive(b); }
DEVICE u64 streaming_policy() { return 0; }
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* b, u64) {
  if (bytes % 16 || (u64)to % 16 || (u64)from % 16) { fprintf(stderr, "bulk copy is not aligned\n"); abort(); }
  memset(to, 0xff, bytes);  // what is read too early is no number
  emulator::under_way.push_back({to, from, bytes, &emulator::me->block->barriers.at(b)});
}
DEVICE void copy16_kept(void* to, const void* from) {
  if ((u64)to % 16 || (u64)from % 16) { fprintf(stderr, "a 16-byte copy is not aligned\n"); abort(); }
  memset(to, 0xff, 16);
  auto& batches = emulator::me->batches;
  if (batches.empty() || batches.back().barrier) batches.emplace_back();
  batches.back().pieces.push_back({to, from});
}
DEVICE void copy16(void* to, const void* from, u64) { copy16_kept(to, from); }
DEVICE void arrive_behind_copies(u64* b) {
  auto& batches = emulator::me->batches;
  if (batches.empty() || batches.back().barrier) batches.emplace_back();
  batches.back().barrier = &emulator::me->block->barriers.at(b);
  if (batches.size() == 1) emulator::copying.push_back(emulator::me);
}
DEVICE void wait_for_copies() {
  while (!emulator::me->batches.empty()) emulator::leave();
}
// The same for copies of 16 bytes. A thread arrives when all that it asked for before have landed.
DEVICE void land_batches(bool needed) {
  auto& fibres = emulator::copying;
  const size_t chosen = needed && !fibres.empty() ? emulator::draw() % fibres.size() : fibres.size();
  size_t kept = 0;
  for (size_t i = 0; i < fibres.size(); ++i) {
    emulator::Fibre* f = fibres[i];
    for (auto& batch : f->batches) {
      if (!batch.barrier || batch.landed || (i != chosen && emulator::draw() % 4)) continue;
      for (const emulator::Piece& p : batch.pieces) memcpy(p.to, p.from, 16);
      batch.landed = true;
      ++emulator::progress;
    }
    while (!f->batches.empty() && f->batches.front().landed) {
      emulator::Counter* barrier = f->batches.front().barrier;
      f->batches.pop_front();
      --barrier->left;
      barrier_settle(*barrier);
    }
    if (!f->batches.empty() && f->batches.front().barrier) fibres[kept++] = f;
  }
  fibres.resize(kept);
}
// Some of the copies under way; where nobody can go on, one at least. So most come as late as they can.
DEVICE void land_copies(bool needed) {
  auto& copies = emulator::under_way;
  const size_t chosen = needed && !copies.empty() ? emulator::draw() % copies.size() : copies.size();
  size_t kept = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    const emulator::Copy c = copies[i];
    if (i != chosen && emulator::draw() % 16) { copies[kept++] = c; continue; }
    memcpy(c.to, c.from, c.bytes);
    c.barrier->bytes -= c.bytes;
    ++emulator::progress;
    barrier_settle(*c.barrier);
  }
  copies.resize(kept);
  land_batches(needed && kept == 0);
}
DEVICE void fence_reads() {}
DEVICE void fence_copies() {}
DEVICE void bulk_copy_kept(void* to, const void* from, u32 bytes, u64* b) { bulk_copy(to, from, bytes, b, 0); }
DEVICE uint4 load16(const void* p) {
  if ((u64)p % 16) { fprintf(stderr, "a 16-byte load is not aligned\n"); abort(); }
  return *(const uint4*)p;
}
DEVICE float2 load8(const float2* p) { return *p; }
DEVICE float load4(const float* p) { return *p; }
DEVICE u64 load_u64(const u64* p) { return *p; }
DEVICE uint4 poll16(const void* p) { return load16(p); }
DEVICE uint2 poll8(const void* p) { return *(const uint2*)p; }
DEVICE void add_shared(u32* p, u32 v) { *p += v; }
template <class T>
static T shuffle_any(T v, int mask) {
  u32 words[2] = {0, 0};
  memcpy(words, &v, sizeof v);
  u32(*all)[8] = emulator::exchange(words, 2);
  T other;
  memcpy(&other, all[(emulator::me->thread % 32) ^ mask], sizeof other);
  return other;
}
DEVICE float shuffle_xor(float v, int mask) { return shuffle_any(v, mask); }
DEVICE int shuffle_xor_int(int v, int mask) { return shuffle_any(v, mask); }
DEVICE u64 shuffle_xor_u64(u64 v, int mask) { return shuffle_any(v, mask); }
DEVICE double shuffle_xor_double(double v, int mask) { return shuffle_any(v, mask); }
DEVICE int warp_sum(int v) {
  for (int mask = 16; mask; mask >>= 1) v += shuffle_xor_int(v, mask);
  return v;
}
DEVICE int warp_max(int v) {
  for (int mask = 16; mask; mask >>= 1) { const int other = shuffle_xor_int(v, mask); v = other > v ? other : v; }
  return v;
}
DEVICE u32 positive_halves(u32 v) { return v & ~((v >> 15 & 0x00010001u) * 0xffffu); }
DEVICE int count_bits(u32 v) { return __builtin_popcount(v); }
DEVICE int lowest_bit(u32 v) { return __builtin_ffs(v) - 1; }
DEVICE int highest_bit(u32 v) { return 31 - __builtin_clz(v); }
DEVICE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::mma(c, a0, a1, a2, a3, b0, b1, emulator::value_bf16);
}
DEVICE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::mma(c, a0, a1, a2, a3, b0, b1, emulator::value_f16);
}
DEVICE u32 pack_bf16(float low, float high) { return emulator::bits_bf16(low) | (u32)emulator::bits_bf16(high) << 16; }
DEVICE u32 pack_f16(float low, float high) {
  const float most = 65504.0f;
  low = fminf(fmaxf(low, -most), most);
  high = fminf(fmaxf(high, -most), most);
  return emulator::bits_f16(low) | (u32)emulator::bits_f16(high) << 16;
}
DEVICE u8 to_byte(float v) { return v > 0.0f ? (u8)nearbyintf(fminf(v, 255.0f)) : 0; }
DEVICE float bf16_value(u16 bits) { return emulator::value_bf16(bits); }
DEVICE float f16_value(u16 bits) { return emulator::value_f16(bits); }
DEVICE u32 sub_f16x2(u32 a, u32 b) {
  return emulator::bits_f16(f16_value((u16)a) - f16_value((u16)b)) |
         (u32)emulator::bits_f16(f16_value(a >> 16) - f16_value(b >> 16)) << 16;
}
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
  return emulator::bits_f16(f16_value((u16)a) * f16_value((u16)b) + f16_value((u16)c)) |
         (u32)emulator::bits_f16(f16_value(a >> 16) * f16_value(b >> 16) + f16_value(c >> 16)) << 16;
}
DEVICE u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(u8)(both >> 8 * (selector >> 4 * i & 7)) << 8 * i;
  return out;
}
DEVICE s64 to_s64(float v) { return llrintf(v); }
DEVICE float from_s64(s64 v) { return (float)v; }
DEVICE float inverse_root(float v) { return 1.0f / sqrtf(v); }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float power_of_two(float v) { return exp2f(v); }
DEVICE int fresh(int v) { return v; }
#define __expf expf
DEVICE float __uint_as_float(u32 w) { float v; memcpy(&v, &w, 4); return v; }
DEVICE int __float_as_int(float v) { int w; memcpy(&w, &v, 4); return w; }
