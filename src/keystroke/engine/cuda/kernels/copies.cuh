// How bytes come into shared memory behind the computing warps' back, and who is told when they are there.
// The one place where GPUs differ. From compute capability 9.0 on (BULK) one thread asks a copy engine, which counts bytes;
// before, all lanes of the asking warp copy 16 bytes at a time, and each arrives when its own are there. Others see a barrier.

enum { ASKERS = BULK ? 1 : 32 };  // threads of a warp that ask together: as often one arrives at the barrier
DEVICE bool asks(int lane) { return !BULK || lane == 0; }

// Around the copies of one asker, which may be several: how many bytes they will be; that all were asked for.
DEVICE void expect_copies(u64* barrier, u32 bytes) {
  if constexpr (BULK) barrier_expect(barrier, bytes);
}
DEVICE void end_copies(u64* barrier) {
  if constexpr (!BULK) arrive_behind_copies(barrier);
}
// What is read once; and what other blocks read too. Of PARTY lanes that share it each has a part.
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
