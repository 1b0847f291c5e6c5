// Asynchronous copies into shared memory, and the barriers that signal their completion. The only place where GPUs differ:
// from compute capability 9.0 on (BULK) one thread starts a copy engine, which counts bytes; before that, all lanes of a warp
// copy 16 bytes at a time, and each arrives when its own are complete. Waiting threads see a barrier in both cases.

enum { ASKERS = BULK ? 1 : 32 };  // threads of a warp that ask together: as often one arrives at the barrier
DEVICE bool asks(int lane) { return !BULK || lane == 0; }

// Before and after the copies of one thread or warp: announce their bytes; mark all as started.
DEVICE void expect_copies(u64* barrier, u32 bytes) {
  if constexpr (BULK) barrier_expect(barrier, bytes);
}
DEVICE void end_copies(u64* barrier) {
  if constexpr (!BULK) arrive_behind_copies(barrier);
}
// For bytes that are read once, and for bytes that other blocks read too. Each of PARTY lanes copies a part.
template <int PARTY = 32>
DEVICE void copy(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  if constexpr (BULK) {
    bulk_copy(to, from, bytes, barrier, policy);
  } else {
#pragma unroll 4
    for (u32 at = threadIdx.x % PARTY * 16; at < bytes; at += PARTY * 16) copy16((u8*)to + at, (const u8*)from + at, policy);
  }
}
template <int PARTY = 32>
DEVICE void copy_kept(void* to, const void* from, u32 bytes, u64* barrier) {
  if constexpr (BULK) {
    bulk_copy_kept(to, from, bytes, barrier);
  } else {
#pragma unroll 4
    for (u32 at = threadIdx.x % PARTY * 16; at < bytes; at += PARTY * 16) copy16_kept((u8*)to + at, (const u8*)from + at);
  }
}
