// The instructions that the kernels need beyond plain C++, one function each: PTX for compute capability 8.0 and what 9.0 added.
// The tests replace this file by an emulator with the same functions, so that the kernels also run on a CPU.

#ifndef BLOCK_THREADS  // eight warps that compute, one that streams, and those that score experts early if there are early scores
#define BLOCK_THREADS 288
#endif
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define DEVICE static __device__ __forceinline__
// A rare path, not inlined so that it takes no registers from the others. Pass it copies of what it reads.
#define DEVICE_APART static __device__ __noinline__
#define DEVICE_METHOD __device__ __forceinline__
#define KERNEL extern "C" __global__ __launch_bounds__(BLOCK_THREADS, 1)
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]

#define INFINITY __int_as_float(0x7f800000)

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Synchronisation inside a block: the eight computing warps use barrier 1,
DEVICE void compute_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// and each half of them, separately, barrier 2 or 3.
DEVICE void half_sync(int half) { asm volatile("bar.sync %0, 128;" ::"r"(2 + half) : "memory"); }
#ifdef EARLY_WARPS  // the warps that score experts early, barrier 4
DEVICE void early_sync() { asm volatile("bar.sync 4, %0;" ::"n"(EARLY_WARPS * 32) : "memory"); }
#endif
DEVICE void warp_sync() { __syncwarp(); }

// Synchronisation between blocks.
DEVICE void release_add(u32* p, u32 v) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void relaxed_add(u32* p, u32 v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE u32 acquire_load(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 relaxed_load(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 exchange_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEVICE void add_s64(s64* p, s64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void fence_system() { __threadfence_system(); }
DEVICE int load_system(const int* p) { return *(const volatile int*)p; }
DEVICE void store_system(int* p, int v) { *(volatile int*)p = v; }
DEVICE uint4 load16_system(const void* p) {  // what the host wrote before the flag that was seen
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE void spin() {}
DEVICE void spin_for_host() {}

// Whether the GPU has a copy engine that fills shared memory asynchronously, and memory barriers that count its bytes.
#define BULK (__CUDA_ARCH__ >= 900)
DEVICE void barrier_init(u64* b, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory"); }
DEVICE void barrier_init_visible() {  // to the copy engine; threads meet before they use them
  if constexpr (BULK) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory"); }
DEVICE void barrier_wait(u64* b, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra FINISHED;\nbra AGAIN;\nFINISHED:\n}" ::"r"(shared_address(b)), "r"(parity) : "memory");
#else  // no instruction waits: one asks again
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
  } while (!done);
#endif
}
// Arrives when `loaded`, which may combine several loads, is available. `zero` is 0, unknown to the compiler.
DEVICE void barrier_arrive_behind(u64* b, u32 loaded, u32 zero) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b) + (loaded & zero)) : "memory");
}
// Orders this thread's reads of shared memory before later writes of the copy engine.
DEVICE void fence_reads() {
  if constexpr (BULK) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Makes writes of other threads that this thread has seen visible to the copy engine.
DEVICE void fence_copies() {
  if constexpr (BULK) asm volatile("fence.proxy.async.global;" ::: "memory");
}
DEVICE u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void bulk_copy_kept(void* to, const void* from, u32 bytes, u64* b) {  // what other blocks read too
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* b, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy) : "memory");
}

// Without a copy engine, a thread copies 16 bytes at a time asynchronously, and arrives at a barrier when all its copies so far
// are complete.
DEVICE void copy16(void* to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "l"(policy) : "memory");
}
DEVICE void copy16_kept(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void arrive_behind_copies(u64* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

DEVICE void wait_for_copies() {
  if constexpr (!BULK) asm volatile("cp.async.wait_all;" ::: "memory");
}

// Loads that skip the L1 cache, so that writes of other blocks are seen.
DEVICE uint4 load16(const void* p) { return __ldcg((const uint4*)p); }
DEVICE float2 load8(const float2* p) { return __ldcg(p); }
DEVICE float load4(const float* p) { return __ldcg(p); }
DEVICE u64 load_u64(const u64* p) { return __ldcg(p); }

// Loads that are repeated until the value is complete.
DEVICE uint4 poll16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE uint2 poll8(const void* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}

DEVICE void add_shared(u32* p, u32 v) { atomicAdd(p, v); }

// Asks for a line of device memory that will be loaded later.
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Across a warp.
DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE int shuffle_xor_int(int v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE u64 shuffle_xor_u64(u64 v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE double shuffle_xor_double(double v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

DEVICE u32 ballot(bool v) { return __ballot_sync(0xffffffffu, v); }
DEVICE int warp_sum(int v) { return __reduce_add_sync(0xffffffffu, v); }
DEVICE int warp_max(int v) { return __reduce_max_sync(0xffffffffu, v); }

// Clamps the two signed halves of a word (or its two 16-bit floats) to at least 0.
DEVICE u32 positive_halves(u32 v) { return __vmaxs2(v, 0); }

// Bit operations on a word.
DEVICE int count_bits(u32 v) { return __popc(v); }
DEVICE int lowest_bit(u32 v) { return __ffs(v) - 1; }
DEVICE int highest_bit(u32 v) { return 31 - __clz(v); }

// Tensor cores: c[16 x 8] += a[16 x 16] b[16 x 8].
DEVICE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Returns the value unchanged but hides it from the optimiser, so that expressions of it are computed here, not hoisted.
DEVICE int fresh(int v) {
  int d;
  asm volatile("mov.b32 %0, %1;" : "=r"(d) : "r"(v));
  return d;
}

// Tells the optimiser what it cannot find out, such as that a number is not negative: divisions by constants become shifts.
#define ASSUME(condition) __builtin_assume(condition)

// Number formats.
DEVICE u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 d;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE u8 to_byte(float v) {  // the nearest of 0 ... 255
  u32 d;
  asm("cvt.rni.sat.u8.f32 %0, %1;" : "=r"(d) : "f"(v));
  return (u8)d;
}
DEVICE float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }
DEVICE u32 sub_f16x2(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEVICE float f16_value(u16 bits) {
  float v;
  asm("{.reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "h"(bits));
  return v;
}
DEVICE u32 and_or(u32 a, u32 b, u32 c) {  // (a & b) | c in one instruction, which the compiler makes two of
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// The lower or the upper half of a pair, twice: as an operand of arithmetic on halves it takes no instruction.
DEVICE u32 low_twice(u32 v) {
  u32 d;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(d) : "r"(v));
  return d;
}
DEVICE u32 high_twice(u32 v) {
  u32 d;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(d) : "r"(v));
  return d;
}
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE s64 to_s64(float v) { return __float2ll_rn(v); }
DEVICE float inverse_root(float v) { return rsqrtf(v); }
DEVICE float quotient(float a, float b) { return __fdividef(a, b); }  // to two units in the last place; 0 where b is beyond 2**126
DEVICE float power_of_two(float v) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}
