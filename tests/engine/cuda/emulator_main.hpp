// Runs ENTRY over a grid of fibres. Returns 0, or 1 if all threads wait for each other, or 2 if copies nobody waited
// for were under way at the end: a GPU would write them into another step's memory.
#ifndef ENTRY
#define ENTRY decode_step
typedef Parameters Given;
#else
typedef DraftParameters Given;
#endif
static const Given* launched;
static void enter() {
  ENTRY(*launched);
  emulator::me->done = true;
  ++emulator::progress;
  emulator::leave();
}
// Stacks begin in different lines of the cache: one a multiple of 4096 after the other, they would drive each other out.
enum { THREADS = BLOCK_THREADS, ALL_WARPS = THREADS / 32, STACK = (32 << 10) + 320, GUARD = 64 };
// A block, its computing warps, its streaming warp, or one warp, held back for up to 270 rounds or until nobody else can go on.
struct Stall {
  static inline int every = 0;  // rounds from one to the next, on average; 0: there are none
  int left = 0;
  std::vector<bool> held;
  void turn(int blocks, bool stuck) {
    using emulator::draw;
    if (left) {
      left = stuck ? 0 : left - 1;
      if (!left) held.assign(held.size(), false);
    } else if (every && draw() % every == 0) {
      left = 20 + draw() % 250;
      const int block = draw() % blocks, kind = draw() % 4, one = draw() % ALL_WARPS;
      for (int warp = 0; warp < ALL_WARPS; ++warp)
        held[block * ALL_WARPS + warp] = kind == 0 || (kind == 1 && warp < 8) || (kind == 2 && warp == 8) || (kind == 3 && warp == one);
    }
  }
};
extern "C" void stall(int every) { Stall::every = every; }
extern "C" s64 room(int blocks, int shared_bytes) { return (s64)blocks * (THREADS * (s64)STACK + shared_bytes + 2048); }
// `memory` has that much room.
extern "C" int launch(const Given* parameters, int blocks, int shared_bytes, u8* memory) {
  using namespace emulator;
  static std::vector<Fibre> fibres;
  std::vector<Block> all(blocks);
  launched = parameters;
  emulator::blocks = blocks;
  fibres.clear();
  fibres.resize(blocks * THREADS);
  std::vector<u8*> guards;
  memory = (u8*)(((u64)memory + 1023) / 1024 * 1024);
  for (int b = 0; b < blocks; ++b) {
    all[b].index = b;
    all[b].memory = memory;
    memset(memory, 0xa5, shared_bytes + 1024);
    memory += (shared_bytes + 1024 + 63) / 64 * 64;
    for (int t = 0; t < THREADS; ++t) {
      Fibre& f = fibres[b * THREADS + t];
      f.block = &all[b];
      f.thread = t;
      memset(memory, 0x5a, GUARD);
      guards.push_back(memory);
      prepare(f.context, memory, STACK, enter);
      memory += STACK;
    }
  }
  size_t left = fibres.size();
  int idle = 0;
  Stall stall;
  stall.held.resize(fibres.size() / 32);
  while (left) {
    stall.turn(blocks, idle > 6);
    const u64 before = progress;
    land_copies(idle > 0);
    // A warp goes on while its threads only wait for each other. The first or the last comes first.
    const bool backwards = draw() % 2;
    for (size_t n = 0; n < fibres.size(); n += 32) {
      const size_t first = backwards ? fibres.size() - 32 - n : n;
      if (stall.held[first / 32]) continue;
      const Meeting& meeting = fibres[first].block->warps[fibres[first].thread / 32].meeting;
      u32 met;
      do {
        met = meeting.generation;
        asked_in_vain = false;
        turn_ends = &fibres[first] + 32;
        Fibre* next = ready(&fibres[first]);
        if (!next) break;
        next->watched = nullptr;
        me = next;
        change(scheduler, me->context);
      } while (met != meeting.generation && !asked_in_vain);
    }
    left = 0;
    for (const Fibre& f : fibres) left += !f.done;
    idle = progress == before ? idle + 1 : 0;
    if (idle > 1000) { under_way.clear(); copying.clear(); return 1; }
  }
  for (const u8* guard : guards)
    for (int i = 0; i < GUARD; ++i)
      if (guard[i] != 0x5a) fail("a stack is too small");
  bool forgotten = !under_way.empty() || !copying.empty();
  for (auto& f : fibres) forgotten |= !f.batches.empty();
  under_way.clear();
  copying.clear();
  return forgotten ? 2 : 0;
}
