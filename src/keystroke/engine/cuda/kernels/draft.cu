// One launch reads the features of the step before it and drafts tokens for one sequence: keys and values of every verified row
// first, then repeatedly one layer and one token. Tokens are chosen with the same noise as the target's. The draft goes to the host
// and into the next step's control.

// Skips the chunks of a matrix that was requested and is not needed.
template <class M>
DEVICE void skip(Worker& w, const Span& span) {
  const int units = span.high - span.low, chunks = M::together > 1 ? (units + M::together - 1) / M::together : units * M::chunks;
  for (int i = 0; i < chunks; ++i) {
    barrier_wait(&w.ring.full[w.ring.at.stage], w.ring.at.phase);
    warp_sync();
    if (w.lane == 0) barrier_arrive(&w.ring.empty[w.ring.at.stage]);
    w.ring.at.advance(w.ring.count);
  }
}

// The input of one launch.
struct Task { int first, rows, token, depth; };  // the first verified row's position, how many, the token after them

// The streaming warp continues with the next pass when signalled.
struct Signal { u64 go; int ended; };

DEVICE void draft(Worker& w, const DraftParameters& p, const Task& task, Signal* signal) {
  const Control& control = *w.control;
  const int last = task.first + task.rows;  // the position of the token that is not verified yet
  int rows = 0;
  for (int done = 0; done < task.rows; done += rows) {
    w.rows = rows = task.rows - done < TOGETHER ? task.rows - done : TOGETHER;
    fuse(w, p, done);
    meet(w);
    project_pairs(w, p, p.stream, task.first + done + 1,
                  [&](int m) { return done + m + 1 < task.rows ? control.token[done + m + 1] : task.token; });
    meet(w);
  }
  const float* stream = p.stream + (rows - 1) * HIDDEN;
  w.rows = 1;
  float chance = 1;
  int tokens[MOST_DRAFTED];
  float chances[MOST_DRAFTED];
  int count = 0;
  for (int pass = 0; pass < task.depth; ++pass) {
    const int position = last + pass;
    if (pass) {
      const int token = tokens[pass - 1];
      stream = p.result;
      project_pairs(w, p, stream, position, [&](int) { return token; });
      meet(w);
    }
    attend_pages(w, p, position);
    meet(w);
    project_attended(w, p, stream, position);
    meet(w);
    activate(w, p);
    meet(w);
    project_result(w, p);
    meet(w);
    project_rows(w, p, position + 1);
    meet(w);
    const Choice found = choose(w, p);
    const int token = found.row < VOCAB ? p.vocabulary[found.row] : 0;
    chance *= found.total > 0 ? __expf(found.logit - found.top) / found.total : 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_DRAFTED; ++i)
      if (i == pass) { tokens[i] = token; chances[i] = chance; }
    count = pass + 1;
    if (count == task.depth) break;
    const bool ends = !(chance >= p.least);
    if (w.thread == 0) {
      signal->ended = ends;
      barrier_arrive(&signal->go);
    }
    if (ends) {
      skip<Joined>(w, w.spans[JOINED]);
      break;
    }
  }
  if (blockIdx.x || w.thread) return;
  Control* next = p.base.next;
  for (int i = 0; i < count; ++i) {
    next->token[1 + i] = tokens[i];
    next->position[1 + i] = last + 1 + i;
    next->sequence[1 + i] = 0;
    store_system(p.drafted + 2 + i, tokens[i]);
    store_system(p.drafted + 2 + MOST_DRAFTED + i, __float_as_int(chances[i]));
  }
  next->count[0] = next->rows = load_system(p.base.stop) ? 0 : 1 + count;
  store_system(p.drafted + 1, count);
  fence_system();
  store_system(p.drafted, p.ticket);
}

KERNEL void draft_step(const __grid_constant__ DraftParameters p) {
  SHARED_MEMORY(memory);
  const int thread = threadIdx.x;
  Control* control = (Control*)memory;
  u64* barriers = (u64*)(memory + BARRIERS_AT);
  Signal* signal = (Signal*)(memory + SHARES_AT);
  for (int i = thread; i < CONTROL_WORDS; i += 288) ((int*)control)[i] = ((const volatile int*)p.base.control)[i];
  const volatile Control* next = p.base.next;
  Task task;
  task.first = ((const volatile Control*)p.base.control)->position[0];
  task.rows = next->position[0] - task.first;
  task.token = next->token[0];
  const int room = p.context - 1 - next->position[0];
  task.depth = p.depth < room ? p.depth : room > 0 ? room : 0;
  if (next->rows == 0) {  // the step was stopped or is in doubt: nothing is known
    if (blockIdx.x == 0 && thread == 0) {
      store_system(p.drafted + 1, 0);
      fence_system();
      store_system(p.drafted, p.ticket);
    }
    return;
  }
  if (thread == 0) {
    for (int i = 0; i < p.base.stages; ++i) {
      barrier_init(&barriers[i], ASKERS);
      barrier_init(&barriers[16 + i], WARPS);
    }
    u64* meetings = (u64*)(memory + MEETINGS_AT);
    for (int i = 0; i < BUFFERS; ++i) {
      barrier_init(&meetings[i], WARPS);
      barrier_init(&meetings[BUFFERS + i], ADDERS);
    }
    barrier_init(&signal->go, 1);
    signal->ended = 0;
    barrier_init_visible();
  }
  Span* spans = (Span*)(memory + SHARES_AT + 64);
  if (thread == 32) {
    spans[JOINED] = share(Joined::units, QKV);
    spans[OUTPUT] = share(Output::units, OUTPUT);
    spans[GATE_UP] = share(GateUp::units, GATE_UP);
    spans[DOWN] = share(Down::units, DOWN);
    spans[HEAD] = share(Head::units, HEAD);
    spans[FUSE] = share(Fuse::units, FUSE);
  }
  __syncthreads();
  Ring ring;
  ring.stages = memory + p.base.ring_offset;
  ring.full = barriers;
  ring.empty = barriers + 16;
  ring.count = p.base.stages;
  ring.at.stage = 0;
  ring.at.phase = 0;
  if (thread >= COMPUTE) {
    if (asks(thread - COMPUTE)) {
      Streamer s;
      s.ring = ring;
      s.oldest = ring.at;
      s.under_way = 0;
      s.in_flight = p.base.in_flight;
      s.policy = streaming_policy();  // what stays in the cache of a head this large is not what the next pass needs first
      for (int done = 0; done < task.rows; done += TOGETHER) {
        stream<Fuse>(s, p.fuse, spans[FUSE]);
        stream<Joined>(s, p.pair, spans[JOINED]);
      }
      for (int pass = 0; pass < task.depth; ++pass) {
        if (pass) {
          stream<Joined>(s, p.pair, spans[JOINED]);
          barrier_wait(&signal->go, pass - 1 & 1);
          if (signal->ended) {
            wait_for_copies();
            return;
          }
        }
        stream<Output>(s, p.output, spans[OUTPUT]);
        stream<GateUp>(s, p.gate_up, spans[GATE_UP]);
        stream<Down>(s, p.down, spans[DOWN]);
        stream<Head>(s, p.out, spans[HEAD]);
      }
      wait_for_copies();
    }
  } else {
    Worker w;
    w.p = &p.base;
    w.control = control;
    w.spans = spans;
    w.small = (float*)(memory + SMALL_AT);
    w.scratch = (float*)(memory + SCRATCH_AT);
    w.operand = (u16*)(memory + OPERAND_AT);
    w.ring = ring;
    w.arrivals = 0;
    w.thread = thread;
    w.warp = thread / 32;
    w.lane = thread % 32;
    w.g = w.lane / 4;
    w.j = w.lane % 4;
    w.unit = 0;
    w.ready = (u64*)(memory + MEETINGS_AT);
    w.freed = w.ready + BUFFERS;
    w.marks = 0;
    draft(w, p, task, signal);
    if (thread == 0 && exchange_add(&p.base.barrier[1], 1) == gridDim.x - 1) {
      p.base.barrier[0] = 0;
      p.base.barrier[1] = 0;
    }
  }
}
