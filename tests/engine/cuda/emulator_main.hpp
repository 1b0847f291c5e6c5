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
extern "C" int launch(const Given* parameters, int blocks, int shared_bytes) {
  using namespace emulator;
  const int threads = 288, stack = 96 << 10;
  launched = parameters;
  emulator::blocks = blocks;
  std::vector<std::unique_ptr<Block>> all;
  std::vector<std::unique_ptr<Fibre>> fibres;
  for (int b = 0; b < blocks; ++b) {
    all.emplace_back(new Block());
    all.back()->index = b;
    all.back()->memory.reset(new u8[shared_bytes + 1024]);
    memset(all.back()->memory.get(), 0xa5, shared_bytes + 1024);
    for (int t = 0; t < threads; ++t) {
      fibres.emplace_back(new Fibre());
      Fibre& f = *fibres.back();
      f.block = all.back().get();
      f.thread = t;
      f.stack.reset(new u8[stack]);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = stack;
      f.context.uc_link = nullptr;
      makecontext(&f.context, enter, 0);
    }
  }
  size_t left = fibres.size();
  int idle = 0;
  while (left) {
    const u64 before = progress;
    land_copies(idle > 0);
    for (auto& f : fibres) {
      if (f->done || (f->watched && *f->watched == f->seen)) continue;
      f->watched = nullptr;
      me = f.get();
      swapcontext(&scheduler, &f->context);
      if (f->done) --left;
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle > 1000) { under_way.clear(); copying.clear(); return 1; }
  }
  bool forgotten = !under_way.empty() || !copying.empty();
  for (auto& f : fibres) forgotten |= !f->batches.empty();
  under_way.clear();
  copying.clear();
  return forgotten ? 2 : 0;
}
