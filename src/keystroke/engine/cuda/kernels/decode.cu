// One launch is one step of the whole model: embedding, every layer, the head, the choice of tokens. One block runs on each
// multiprocessor for the whole step. In each, one warp streams this block's share of every weight matrix, in the order of use,
// through a ring in shared memory; it never waits for results, so memory stays busy while the other eight warps synchronise,
// normalise and attend. A row's result depends only on its own tokens: every sum has a fixed order, whatever other rows there are.

DEVICE void embed(Worker& w) {
  const Parameters& p = *w.p;
  const Control& c = *w.control;
  for (int i = blockIdx.x * COMPUTE + w.thread; i < w.rows * HIDDEN; i += gridDim.x * COMPUTE) {
    const int m = i / HIDDEN, d = i % HIDDEN;
    p.residual[i] = counted(bf16_value(p.embedding[(s64)c.token[m] * HIDDEN + d]));
  }
  if (c.filtered) clear_histogram(w);
  for (int i = w.thread; i < w.rows * (HEAD_DIM / 2); i += COMPUTE) {
    const s64 at = (s64)c.position[i / (HEAD_DIM / 2)] * (HEAD_DIM / 2) + i % (HEAD_DIM / 2);
    w.rope[i] = p.rope[at];
    if (WINDOW_ROPE) w.rope[ROPE_ENTRIES + i] = p.window_rope[at];
  }
  if (w.thread < w.rows)
    w.pages[w.thread] = p.tables[(s64)c.table[c.sequence[w.thread]] * p.table_stride + c.position[w.thread] / PAGE];
#if !SINGLE
  int most = 0;
  for (int m = 0; m < w.rows; ++m) most = chunks_of(c, m) > most ? chunks_of(c, m) : most;
  w.few = most <= GROUPS;
  w.fused = w.few && w.rows <= p.fused_rows;
  w.tags = TAGS && w.few && !(SPARSE && c.sparse && p.most_omitted < INFINITY);  // what was left out has no tag
#endif
  arrive(w);
}

// Attention of a layer, the kv-th with keys and values, from the normalised rows to the sums of its output.
DEVICE void read_keys(Worker& w, int kv) {
  project_qkv(w, kv);
  mark(w);
  if (!tags_queries(w)) arrive(w);  // what is sent shows by itself that it is there; the next barrier keeps layers apart
  if (QK_NORM && !tags_queries(w)) {
    wait(w);
    normalise_heads(w, kv);
    arrive(w);
  }
  refresh(w);
  attend(w, kv);
  mark(w);
  refresh(w);
  if (!GUARDED) {
    if (w.tag) arrive_early(w);
    else arrive(w);
  }
  gather(w, kv);
  mark(w);
  project_output(w);
  mark(w);
}
#if DELTA_LAYERS
// The same for the delta-th gated delta net.
DEVICE void read_recurrently(Worker& w, int delta) {
  project_delta(w, delta);
  mark(w);
  if (!DELTA_TAGS) arrive(w);
  refresh(w);
  recur(w, delta);
  mark(w);
  if (!DELTA_TAGS) arrive(w);
  refresh(w);
  gather_delta(w, delta);
  mark(w);
  project_delta_output(w);
  mark(w);
}
#else
DEVICE void read_recurrently(Worker&, int) {}
#endif

DEVICE void compute(Worker& w) {
  embed(w);
  int deltas = 0;  // layers so far
  for (int layer = 0; layer < LAYERS; ++layer) {
    const int sums = 1 + layer * SUMS_PER_LAYER;  // in the residual stream so far
    w.tag = w.tags ? tag_of(layer - deltas, KV_LAYERS) : 0;
    w.parity = layer & 1;
#if SINGLE
    w.layer_tag = LAYERS > 1 ? tag_of(layer) : 0;
#endif
    refresh(w);
    mark(w);
    normalise(w, layer * 2, sums, is_delta(layer) ? DELTA_SPAN : QKV);
    export_features(w, layer, sums);
    const bool delta = is_delta(layer);
    if (delta ? DELTA_TAGS : GUARDED) arrive_early(w);  // behind the barrier of the block that ended the reading
    mark(w);
    if (delta) read_recurrently(w, deltas++);
    else read_keys(w, layer - deltas);
    if (!(delta ? DELTA_TAGS : announces_sums_early())) arrive_early(w);
    refresh(w);
#if EXPERTS
    const float bias = EARLY ? 0.0f : router_bias(w, layer, blockIdx.x);  // asked for before the wait
#endif
    wait_early_scores(w, BEHIND_ATTENTION);  // the operand was read
    normalise(w, layer * 2 + 1, sums + O_SPLIT, GATE_UP);
    const bool read = GUARDED || (MIXTURE && tags_activations(w));  // announced here, not behind gate and up
    if (read) arrive_early(w);
    mark(w);
#if EXPERTS
    choose_experts(w, layer, bias);
    mark(w);
    activate_experts(w);
#else
    project_gate_up(w);
#endif
    mark(w);
    if (!read) {
      if (tags_activations(w)) arrive_early(w);
      else arrive(w);
    }
    refresh(w);
#if EXPERTS
    receive_activations(w);
    if (wide_down(layer)) add_experts<WideDown>(w);
    else add_experts<Down>(w);
#if HOST_EXPERTS
    add_from_host(w, layer);
#endif
#else
    if (wide_down(layer)) project_down<WideDown>(w);
    else project_down<Down>(w);
#endif
    arrive_early(w);
  }
  mark(w);
  normalise(w, LAYERS * 2, 1 + LAYERS * SUMS_PER_LAYER, HEAD);
  project_head(w);
  if (w.control->masked) leave_out_masked(w);
  mark(w);
  arrive(w);
  if (w.control->sampled) {
    wait(w);
    if (w.control->filtered) w.arrivals = find_all_edges(w);
    draw(w);
    arrive(w);
  }
  if (blockIdx.x == 0) conclude(w);
}

KERNEL void decode_step(const __grid_constant__ Parameters parameters) {
  SHARED_MEMORY(memory);
  const Parameters& p = parameters;
  const int thread = threadIdx.x;
  Control* control = (Control*)memory;
  u64* barriers = (u64*)(memory + BARRIERS_AT);
  for (int i = thread; i < CONTROL_WORDS; i += BLOCK_THREADS) ((int*)control)[i] = ((const volatile int*)p.control)[i];
  if (thread < 32) ((float*)(memory + SMALL_AT))[ZEROS_AT + thread] = 0.0f;
  if (thread == 0) {
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(&barriers[i], ASKERS);
      barrier_init(&barriers[16 + i], WARPS);
    }
    u64* meetings = (u64*)(memory + MEETINGS_AT);
    for (int i = 0; i < BUFFERS; ++i) {
      barrier_init(&meetings[i], WARPS);
      barrier_init(&meetings[BUFFERS + i], ADDERS);
    }
    for (int i = 0; i < BROUGHT; ++i)
      barrier_init((u64*)(memory + BROUGHT_AT) + i, ASKERS * (i < WARPS ? 1 : i < BROUGHT - 1 ? GATHERED : 2));
    barrier_init((u64*)(memory + ARRIVAL_AT), BULK ? 1 : COMPUTE);
    barrier_init((u64*)(memory + ROUTED_AT), 1);
    barrier_init((u64*)(memory + TAKEN_AT), ASKERS);
#if EARLY
    for (int i = 0; i < 2 * EARLY_STEPS; ++i) barrier_init((u64*)(memory + EARLY_AT) + i, i == EARLY_STEPS + BEHIND_ATTENTION ? EARLY_WARPS : 1);
    *(u32*)(memory + EARLY_GROUP_AT) = 0;
#endif
    barrier_init_visible();
  }
  Span* spans = (Span*)(memory + SPANS_AT);
  if (thread == 32) {
    *(u32*)(memory + PLACE_AT) = 0;
    spans[QKV] = share_qkv(blockIdx.x);
    spans[OUTPUT] = share_output(blockIdx.x);
    spans[GATE_UP] = share_parts(blockIdx.x, USED_EXPERTS * GateUp::units, GateUp::units, 1, GATE_UP);  // of several rows of a mixture: set anew in each layer
    spans[DOWN] = share_parts(blockIdx.x, USED_EXPERTS * Down::units, MIXTURE ? Down::units : HIDDEN / 16, MIXTURE && Down::blocks < 3 * WARPS ? WARPS : 1, DOWN);
    spans[HEAD] = share(Head::units, HEAD);
#if DELTA_LAYERS
    spans[DELTA_SPAN] = share(DeltaIn::units, DELTA_SPAN);
    const Every rows = rows_beside(DeltaIn::units, DELTA_SPAN);  // of b and a
    spans[DELTA_ROWS] = Span{rows.first, rows.step};
#endif
  }
  __syncthreads();
  if (control->rows == 0) {  // stopped before this step began: say so, touch nothing
    if (blockIdx.x == 0 && thread == 0) {
      p.next->rows = 0;
      p.next->ticket = control->ticket + 1;
      store_system(p.result + 1, -1);
      fence_system();
      store_system(p.result, control->ticket);
    }
    return;
  }
  Share* listed = (Share*)(memory + SHARES_AT);
  if constexpr (BY_PLACE) {
    place_block(thread, (u32*)(memory + PLACE_AT));
    __syncthreads();
  }
#if EARLY
  choose_group(thread, (u32*)(memory + EARLY_GROUP_AT));
#endif
  if (thread < LISTED) listed[thread] = look_up(p, *control, thread);
  __syncthreads();
  Ring ring;
  ring.stages = memory + p.ring_offset;
  ring.full = barriers;
  ring.empty = barriers + 16;
  ring.count = p.stages;
  ring.at.stage = 0;
  ring.at.phase = 0;
  if (thread >= COMPUTE && thread < COMPUTE + 32) {
    if (asks(thread - COMPUTE)) {
      Streamer s;
      s.ring = ring;
      s.oldest = ring.at;
      s.under_way = 0;
      s.in_flight = p.in_flight;
      s.policy = streaming_policy();
      const int lent = lent_stages(listed);
      const Routing& routing = *(const Routing*)(memory + ROUTING_AT);
      const u8* at = p.layers;
      int deltas = 0;
      for (int layer = 0; layer < LAYERS; ++layer) {
        const bool delta = is_delta(layer), wide = wide_down(layer);
        // One loop over a layer's matrices, so that the code which brings them is there once.
        enum { FIRST, SECOND, BETWEEN, ROUTERS, UP, BACK, PARTS };
        int unit = 0;  // of a mixture: the next
#pragma unroll 1
        for (int part = FIRST; part < PARTS;) {
          Stretch t = {at, 0, 0, 1, 0, 1, STAGE, STAGE};
          s64 bytes = 0;  // to the next matrix, if this is the end of one
          const int now = part++;
          switch (now) {
            case FIRST:
#if DELTA_LAYERS
              if (delta) {
                t = stretch<DeltaIn>(at, spans[DELTA_SPAN]);
                bytes = DeltaIn::bytes;
                break;
              }
#endif
              t = stretch<Qkv>(at, until(spans[QKV], QK_UNITS));
              bytes = Qkv::bytes;
              break;
            case SECOND:
#if DELTA_LAYERS
              if (delta) {
                if (DELTA_ASIDE) break;
                t = rows_of_floats(p.delta_heads + (s64)deltas * 2 * DELTA_VALUE_HEADS * HIDDEN, 2 * DELTA_VALUE_HEADS,
                                   Every{spans[DELTA_ROWS].low, spans[DELTA_ROWS].high});
                break;
              }
#endif
              if constexpr (VALUES_APART) {
                t = stretch<ValueRows>(at, beyond(spans[QKV], QK_UNITS));
                bytes = ValueRows::bytes;
              }
              break;
            case BETWEEN:
#if DELTA_LAYERS
              if (delta) {
                ++deltas;
                t = stretch<DeltaOut>(at, spans[OUTPUT]);
                bytes = DeltaOut::bytes;
                break;
              }
#endif
              if (!SPARSE) stream_pages(s, p, *control, layer - deltas, listed);
              for (int i = 0; i < lent; ++i) lend(s);
              t = stretch<Output>(at, spans[OUTPUT]);
              bytes = Output::bytes;
              break;
#if EXPERTS
            case ROUTERS:
              if (EARLY) break;
              t = rows_of_floats(p.routers + (s64)layer * ALL_EXPERTS * HIDDEN, ALL_EXPERTS, every_block());
              break;
            case UP:
              if (unit == 0) {
                // Without units nothing keeps this block's computing warps from being two layers ahead: the wait would not end.
                const bool share = spans[GATE_UP].low < spans[GATE_UP].high || spans[DOWN].low < spans[DOWN].high;
                if (!BY_RANK || share) barrier_wait((u64*)(memory + ROUTED_AT), layer & 1);
                unit = spans[GATE_UP].low;
              }
              if (unit < spans[GATE_UP].high) {
                t = stretch_of_expert<GateUp, SharedGateUp>(at, spans[GATE_UP], unit, routing);
                unit += t.high - t.low;
              }
              if (unit < spans[GATE_UP].high) {
                part = UP;
                break;
              }
              bytes = bytes_of_experts<GateUp, SharedGateUp>(p);
              unit = spans[DOWN].low;
              break;
            case BACK:
              if (unit < spans[DOWN].high) {
                t = wide ? stretch_of_expert<WideDown, SharedDown>(at, spans[DOWN], unit, routing)
                         : stretch_of_expert<Down, SharedDown>(at, spans[DOWN], unit, routing);
                unit += t.high - t.low;
              }
              if (unit < spans[DOWN].high) {
                part = BACK;
                break;
              }
              bytes = wide ? bytes_of_experts<WideDown, SharedDown>(p) : bytes_of_experts<Down, SharedDown>(p);
              if (!BY_RANK) barrier_arrive((u64*)(memory + TAKEN_AT));
              break;
#else
            case UP:
              t = stretch<GateUp>(at, spans[GATE_UP]);
              bytes = GateUp::bytes;
              break;
            case BACK:
              t = wide ? stretch<WideDown>(at, spans[DOWN]) : stretch<Down>(at, spans[DOWN]);
              bytes = wide ? WideDown::bytes : Down::bytes;
              break;
#endif
          }
          // What a mixture needs in any case has time; fewer bytes in flight then delay what blocks send to each other less.
          if (MIXTURE && SINGLE == 1) s.in_flight = now < UP ? STAGE : p.in_flight;
          stream(s, t);
          at += bytes;
        }
      }
      stream<Head>(s, p.head, spans[HEAD]);
      wait_for_copies();  // a thread stays until what it asked for is there
    }
  } else {
    Worker w;
    w.p = &p;
    w.control = control;
    w.spans = spans;
    w.listed = listed;
    w.pages = (int*)(memory + PAGES_AT);
    w.small = (float*)(memory + SMALL_AT);
    w.rope = (float2*)(memory + ROPE_AT);
    w.scratch = (float*)(memory + SCRATCH_AT);
    w.operand = (u16*)(memory + OPERAND_AT);
    w.ring = ring;
    w.arrivals = 0;
#if !SINGLE
    w.rows = control->rows;
#endif
    w.thread = thread;
    w.warp = thread / 32;
    w.lane = thread % 32;
    w.g = w.lane / 4;
    w.j = w.lane % 4;
    w.unit = 0;
    w.ready = (u64*)(memory + MEETINGS_AT);
    w.freed = w.ready + BUFFERS;
    w.brought = (u64*)(memory + BROUGHT_AT);
    w.turns = 0;
    w.arrival = (u64*)(memory + ARRIVAL_AT);
    w.loads = 0;
    w.routing = (Routing*)(memory + ROUTING_AT);
    w.routed = (u64*)(memory + ROUTED_AT);
    w.taken = (u64*)(memory + TAKEN_AT);
    w.early = (u64*)(memory + EARLY_AT);
    w.early_rows = (u16*)(memory + EARLY_ROWS_AT);
    w.marks = 0;
    if (thread >= COMPUTE) {
#if EARLY
      const int block = *(const u32*)(memory + EARLY_GROUP_AT), number = w.warp - WARPS - 1;
      score_early(w, block < EARLY_BLOCKS ? number * EARLY_BLOCKS + block : EARLY_GROUPS, number, (float*)(memory + EARLY_SCORES_AT));
#endif
      return;
    }
    compute(w);
    if (thread == 0 && exchange_add(&p.barrier[1], 1) == gridDim.x - 1) {
      p.barrier[0] = 0;
      p.barrier[1] = 0;
      for (int m = 0; m < MAX_ROWS; ++m) p.barrier[NORMED + m] = 0;
    }
  }
}
