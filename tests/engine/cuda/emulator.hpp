// The functions of kernels/device.cuh on a CPU.
// Every CUDA thread is a fibre. All blocks run at once and take turns, so barriers between blocks work, a missing one
// shows, and a deadlock ends in an error. Copies land late, in any order. BULK says whether there is an engine for
// large ones. Numbers follow the hardware: bf16 and f16 round to nearest even, tensor cores multiply exactly and add
// in float32.
// Most of the tests' time is the compiler's: few headers, few templates, calls rather than inlining.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's own: the C++ one takes the compiler as long as a tenth of a kernel
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <sched.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 288
#endif
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
#define OUT_OF_LINE static __attribute__((noinline))
#define DEVICE_METHOD inline
#define KERNEL static
#define __grid_constant__
#define SHARED_MEMORY(name) u8* name = emulator::me->block->memory

namespace emulator {
// Leaves one stack, whose registers stay on it, and goes on with another. (swapcontext asks the operating system for
// the signal mask every time, which takes longer than what most threads do between two switches.)
#if defined(__linux__) && defined(__aarch64__)
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** kept, void* next);
asm(R"(
  .text
  .p2align 4
  .globl emulator_switch
  .hidden emulator_switch
  .type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size emulator_switch, .-emulator_switch
)");
typedef void* Context;
static void prepare(Context& context, u8* stack, size_t bytes, void (*entry)()) {
  void** frame = (void**)(stack + bytes - 160);
  memset(frame, 0, 160);
  frame[11] = (void*)entry;
  context = frame;
}
static void change(Context& from, Context& to) { emulator_switch(&from, to); }
#elif defined(__linux__) && defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** kept, void* next);
asm(R"(
  .text
  .p2align 4
  .globl emulator_switch
  .hidden emulator_switch
  .type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulator_switch, .-emulator_switch
)");
typedef void* Context;
static void prepare(Context& context, u8* stack, size_t bytes, void (*entry)()) {
  void** frame = (void**)(stack + bytes - 64);  // six registers, the address to go to, and what keeps the stack aligned
  memset(frame, 0, 64);
  frame[6] = (void*)entry;
  context = frame;
}
static void change(Context& from, Context& to) { emulator_switch(&from, to); }
#else
}  // namespace emulator
#include <ucontext.h>
namespace emulator {
typedef ucontext_t Context;
static void prepare(Context& context, u8* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
static void change(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

struct Meeting { u32 waiting = 0, generation = 0; };
struct Warp { Meeting meeting; u32 slots[2][32][10]; };
struct Counter { const u64* where = nullptr; u32 count = 0, left = 0, generation = 0; s64 bytes = 0; };
struct Block {
  int index = 0;
  u8* memory = nullptr;
  Meeting all, computing, halves[2], early;
  Warp warps[BLOCK_THREADS / 32];
  u32 used = 0;  // of the barriers; the word in shared memory says which is meant
  Counter barriers[256];
};
// What a thread copies between two arrivals, 16 bytes at a time; then the barrier at which it arrives.
struct Piece { void* to; const void* from; };
struct Batch { std::vector<Piece> pieces; Counter* barrier = nullptr; bool landed = false; };
struct Fibre {
  Context context;
  const u32* watched = nullptr;
  u32 seen = 0;
  u32 parity = 0;
  int thread = 0;
  bool done = false;
  Block* block = nullptr;
  std::vector<Batch> batches;  // the oldest first, the last not yet ended
};
static Fibre* me;
static Fibre* turn_ends;  // behind the last fibre of the warp whose turn it is
static Context scheduler;
static u64 progress;
static bool asked_in_vain;  // a fibre of this warp asks for something again and again
static int blocks;

// Copies under way, and chance, the same in every run.
struct Copy { void* to; const void* from; u32 bytes; Counter* barrier; };
static std::vector<Copy> under_way;
static std::vector<Fibre*> copying;  // fibres with ended batches
static u32 chance = 1;
static u32 draw() { return (chance = chance * 1664525u + 1013904223u) >> 16; }

[[noreturn]] OUT_OF_LINE void fail(const char* why) { fprintf(stderr, "%s\n", why); abort(); }

static Fibre* ready(Fibre* f) {  // this one or the next of its warp that can go on; null: none of them
  for (; f < turn_ends; ++f)
    if (!f->done && !(f->watched && *f->watched == f->seen)) return f;
  return nullptr;
}
// The next thread of the warp goes on, or the scheduler.
OUT_OF_LINE void leave() {
  Fibre* self = me;
  Fibre* next = ready(self + 1);
  if (next) { next->watched = nullptr; me = next; }
  change(self->context, next ? next->context : scheduler);
}
static void leave_and_ask_again() { asked_in_vain = true; leave(); }
OUT_OF_LINE void wait_for_change(const u32* p, u32 old) {
  while (*(const volatile u32*)p == old) { me->watched = p; me->seen = old; leave(); }
}
OUT_OF_LINE void meet(Meeting& m, u32 expected) {
  if (++m.waiting == expected) {
    m.waiting = 0;
    ++m.generation;
    progress += expected > 32;  // not that of a warp, which meets in each turn of a loop that asks for something
    return;
  }
  wait_for_change(&m.generation, m.generation);
}
OUT_OF_LINE u32 (*exchange(const u32* data, int words))[10] {
  Warp& warp = me->block->warps[me->thread / 32];
  const u32 parity = me->parity;
  me->parity ^= 1;
  for (int i = 0; i < words; ++i) warp.slots[parity][me->thread % 32][i] = data[i];
  meet(warp.meeting, 32);
  return warp.slots[parity];
}
static Counter& barrier_at(const u64* b) {
  Block& block = *me->block;
  if (*b >= block.used || block.barriers[*b].where != b) fail("there is no barrier here");
  return block.barriers[*b];
}
static float value_bf16(u16 bits) { u32 w = (u32)bits << 16; float v; memcpy(&v, &w, 4); return v; }
static u16 bits_bf16(float v) {
  u32 w; memcpy(&w, &v, 4);
  if ((w & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((w + 0x7fffu + ((w >> 16) & 1)) >> 16);
}
// A float's fields hold those of a 16-bit one; a factor makes up for their exponents' difference. Exact, also for the
// numbers without a leading one.
static float value_f16(u16 bits) {
  const u32 w = (u32)(bits & 0x7fff) << 13;
  float v; memcpy(&v, &w, 4);
  v *= 0x1p112f;
  return bits >> 15 ? -v : v;
}
static u16 bits_f16(float v) {
  u32 w; memcpy(&w, &v, 4);
  const u16 sign = w >> 16 & 0x8000;
  w &= 0x7fffffffu;
  if (w > 0x7f800000u) return 0x7fff;
  if (w < (127 - 14) << 23) {  // the last bit of a half is worth as much as that of the smallest numbers
    v = fabsf(v) + 0.5f;
    memcpy(&w, &v, 4);
    return sign | (u16)(w - 0x3f000000u);
  }
  return sign | (u16)((w - (112u << 23) + 0xfff + (w >> 13 & 1)) >> 13);
}
typedef float Row __attribute__((vector_size(32)));  // of the result, eight columns
// What the lanes gave, multiplied for all of them: a in words 0 to 3, b in 4 and 5, c in 6 to 9.
template <class Value>
OUT_OF_LINE void multiply(u32 (*all)[10], Value value) {
  Row b[16];
  for (int column = 0; column < 8; ++column)
    for (int k = 0; k < 16; k += 2) {
      const u32 pair = all[column * 4 + k % 8 / 2][4 + k / 8];
      b[k][column] = value((u16)pair);
      b[k + 1][column] = value((u16)(pair >> 16));
    }
  for (int row = 0; row < 16; ++row) {
    u32(*lanes)[10] = all + row % 8 * 4;
    Row sum;
    for (int j = 0; j < 4; ++j) memcpy((float*)&sum + 2 * j, &lanes[j][6 + row / 8 * 2], 8);
    for (int k = 0; k < 16; k += 2) {
      const u32 pair = lanes[k % 8 / 2][row / 8 + 2 * (k / 8)];
      sum += value((u16)pair) * b[k];
      sum += value((u16)(pair >> 16)) * b[k + 1];
    }
    for (int j = 0; j < 4; ++j) memcpy(&lanes[j][6 + row / 8 * 2], (float*)&sum + 2 * j, 8);
  }
}
// The last lane to come multiplies; then all take their part of the result.
template <class Value>
OUT_OF_LINE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Value value) {
  Warp& warp = me->block->warps[me->thread / 32];
  u32(*all)[10] = warp.slots[me->parity];
  u32* mine = all[me->thread % 32];
  me->parity ^= 1;
  const u32 given[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(mine, given, sizeof given);
  memcpy(mine + 6, c, sizeof c);
  if (warp.meeting.waiting == 31) multiply(all, value);
  meet(warp.meeting, 32);
  memcpy(c, mine + 6, sizeof c);
}
}  // namespace emulator

struct ThreadIndex { operator int() const { return emulator::me->thread; } };
struct BlockIndex { operator int() const { return emulator::me->block->index; } };
struct GridSize { operator int() const { return emulator::blocks; } };
static struct { ThreadIndex x; } threadIdx;
static struct { BlockIndex x; } blockIdx;
static struct { GridSize x; } gridDim;

DEVICE void __syncthreads() { emulator::meet(emulator::me->block->all, BLOCK_THREADS); }
DEVICE void compute_sync() { emulator::meet(emulator::me->block->computing, 256); }
DEVICE void half_sync(int half) { emulator::meet(emulator::me->block->halves[half], 128); }
#ifdef EARLY_WARPS
DEVICE void early_sync() { emulator::meet(emulator::me->block->early, EARLY_WARPS * 32); }
#endif
DEVICE void warp_sync() { emulator::exchange(nullptr, 0); }
DEVICE void release_add(u32* p, u32 v) { *p += v; ++emulator::progress; }
DEVICE void relaxed_add(u32* p, u32 v) { release_add(p, v); }
DEVICE u32 acquire_load(const u32* p) { return *p; }
DEVICE u32 relaxed_load(const u32* p) { return *p; }
DEVICE u32 exchange_add(u32* p, u32 v) { u32 old = *p; *p += v; ++emulator::progress; return old; }
DEVICE void add_s64(s64* p, s64 v) { *p += v; }
DEVICE void fence_system() { __sync_synchronize(); }
DEVICE int load_system(const int* p) { return *(const volatile int*)p; }
DEVICE void store_system(int* p, int v) { *(volatile int*)p = v; }
DEVICE uint4 load16_system(const void* p) { return *(const uint4*)p; }
DEVICE void spin() { emulator::leave_and_ask_again(); }
DEVICE void spin_for_host() {  // what another thread of the process does is progress too, for a while
  static u64 asked = 0;
  if (++asked % 100000 == 0) fprintf(stderr, "the kernel has asked the host %llu times\n", asked);
  if (asked < 100000000) ++emulator::progress;
  sched_yield();
  emulator::leave_and_ask_again();
}
DEVICE void barrier_init(u64* b, u32 count) {
  emulator::Block& block = *emulator::me->block;
  if (block.used == 256) emulator::fail("too many barriers");
  emulator::Counter& c = block.barriers[*b = block.used++];
  c = emulator::Counter();
  c.where = b;
  c.count = c.left = count;
}
DEVICE void barrier_init_visible() {}
DEVICE void barrier_settle(emulator::Counter& c) {
  if (c.left == 0 && c.bytes == 0) { c.left = c.count; ++c.generation; ++emulator::progress; }
}
OUT_OF_LINE void barrier_expect(u64* b, u32 bytes) {
  auto& c = emulator::barrier_at(b);
  c.bytes += bytes; --c.left;
  barrier_settle(c);
}
OUT_OF_LINE void barrier_arrive(u64* b) {
  auto& c = emulator::barrier_at(b);
  --c.left;
  barrier_settle(c);
}
OUT_OF_LINE void barrier_wait(u64* b, u32 parity) {
  auto& c = emulator::barrier_at(b);
  while ((c.generation & 1) == parity) emulator::wait_for_change(&c.generation, c.generation);
}
DEVICE void barrier_arrive_behind(u64* b, u32, u32) { barrier_arrive(b); }
DEVICE u64 streaming_policy() { return 0; }
OUT_OF_LINE void bulk_copy(void* to, const void* from, u32 bytes, u64* b, u64) {
  if (bytes % 16 || (u64)to % 16 || (u64)from % 16) emulator::fail("bulk copy is not aligned");
  memset(to, 0xff, bytes);  // what is read too early is no number
  emulator::under_way.push_back({to, from, bytes, &emulator::barrier_at(b)});
}
OUT_OF_LINE void copy16_kept(void* to, const void* from) {
  if ((u64)to % 16 || (u64)from % 16) emulator::fail("a 16-byte copy is not aligned");
  memset(to, 0xff, 16);
  auto& batches = emulator::me->batches;
  if (batches.empty() || batches.back().barrier) batches.emplace_back();
  batches.back().pieces.push_back({to, from});
}
DEVICE void copy16(void* to, const void* from, u64) { copy16_kept(to, from); }
OUT_OF_LINE void arrive_behind_copies(u64* b) {
  auto& batches = emulator::me->batches;
  if (batches.empty() || batches.back().barrier) batches.emplace_back();
  batches.back().barrier = &emulator::barrier_at(b);
  if (batches.size() == 1) emulator::copying.push_back(emulator::me);
}
OUT_OF_LINE void wait_for_copies() {
  while (!emulator::me->batches.empty()) emulator::leave_and_ask_again();
}
// The same for copies of 16 bytes. A thread arrives when all that it asked for before have landed.
OUT_OF_LINE void land_batches(bool needed) {
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
      f->batches.erase(f->batches.begin());
      --barrier->left;
      barrier_settle(*barrier);
    }
    if (!f->batches.empty() && f->batches.front().barrier) fibres[kept++] = f;
  }
  fibres.resize(kept);
}
// Some of the copies under way; where nobody can go on, one at least. So most come as late as they can.
OUT_OF_LINE void land_copies(bool needed) {
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
DEVICE void prefetch(const void*) {}
DEVICE uint4 load16(const void* p) {
  if ((u64)p % 16) emulator::fail("a 16-byte load is not aligned");
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
  u32(*all)[10] = emulator::exchange(words, 2);
  T other;
  memcpy(&other, all[(emulator::me->thread % 32) ^ mask], sizeof other);
  return other;
}
DEVICE float shuffle_xor(float v, int mask) { return shuffle_any(v, mask); }
DEVICE int shuffle_xor_int(int v, int mask) { return shuffle_any(v, mask); }
DEVICE u64 shuffle_xor_u64(u64 v, int mask) { return shuffle_any(v, mask); }
DEVICE double shuffle_xor_double(double v, int mask) { return shuffle_any(v, mask); }
OUT_OF_LINE u32 ballot(bool v) {
  const u32 word = v;
  u32(*all)[10] = emulator::exchange(&word, 1), bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= all[lane][0] << lane;
  return bits;
}
OUT_OF_LINE int warp_sum(int v) {
  u32(*all)[10] = emulator::exchange((const u32*)&v, 1), sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += all[lane][0];
  return (int)sum;
}
OUT_OF_LINE int warp_max(int v) {
  u32(*all)[10] = emulator::exchange((const u32*)&v, 1);
  for (int lane = 0; lane < 32; ++lane) v = (int)all[lane][0] > v ? (int)all[lane][0] : v;
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
OUT_OF_LINE u32 pack_bf16(float low, float high) { return emulator::bits_bf16(low) | (u32)emulator::bits_bf16(high) << 16; }
OUT_OF_LINE u32 pack_f16(float low, float high) {
  const float most = 65504.0f;
  low = fminf(fmaxf(low, -most), most);
  high = fminf(fmaxf(high, -most), most);
  return emulator::bits_f16(low) | (u32)emulator::bits_f16(high) << 16;
}
DEVICE u8 to_byte(float v) { return v > 0.0f ? (u8)nearbyintf(fminf(v, 255.0f)) : 0; }
DEVICE float bf16_value(u16 bits) { return emulator::value_bf16(bits); }
DEVICE float f16_value(u16 bits) { return emulator::value_f16(bits); }
OUT_OF_LINE u32 sub_f16x2(u32 a, u32 b) {
  return emulator::bits_f16(f16_value((u16)a) - f16_value((u16)b)) |
         (u32)emulator::bits_f16(f16_value(a >> 16) - f16_value(b >> 16)) << 16;
}
OUT_OF_LINE u32 fma_f16x2(u32 a, u32 b, u32 c) {
  return emulator::bits_f16(f16_value((u16)a) * f16_value((u16)b) + f16_value((u16)c)) |
         (u32)emulator::bits_f16(f16_value(a >> 16) * f16_value(b >> 16) + f16_value(c >> 16)) << 16;
}
DEVICE u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
DEVICE u32 low_twice(u32 v) { return v << 16 | (v & 0xffff); }
DEVICE u32 high_twice(u32 v) { return v >> 16 | (v & 0xffff0000u); }
OUT_OF_LINE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(u8)(both >> 8 * (selector >> 4 * i & 7)) << 8 * i;
  return out;
}
DEVICE s64 to_s64(float v) { return llrintf(v); }
DEVICE float inverse_root(float v) { return 1.0f / sqrtf(v); }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float power_of_two(float v) { return exp2f(v); }
DEVICE int fresh(int v) { return v; }
#define ASSUME(condition) do { if (!(condition)) emulator::fail("what the kernel assumes is not so: " #condition); } while (0)
#define __expf expf
DEVICE float __uint_as_float(u32 w) { float v; memcpy(&v, &w, 4); return v; }
DEVICE int __float_as_int(float v) { int w; memcpy(&w, &v, 4); return w; }
