// Experts that the host computes because GPU memory does not hold them. After the choice of experts one block sends the rows and
// the list of such experts through memory that both share; the others compute what is on the GPU meanwhile. The block then waits
// for the host's sums and adds them to the residual stream, whose counters let the other blocks wait. There is at most one message
// under way. A row's sum over its experts on the host has a fixed order, and the residual stream's sums do not depend on theirs.

#if HOST_EXPERTS
constexpr int ON_HOST = 0xffff;
// The words of `mail`, in lines of their own: the number of the last message, of the last answer, then layer, rows and for every
// row and rank the expert (-1: the GPU has it) and its weight.
constexpr int MAIL_SENT = 0, MAIL_ANSWERED = 32, MAIL_LAYER = 64, MAIL_ROWS = 65, MAIL_PAIRS = 66;

DEVICE int place_of(const Worker& w, int layer, int expert) { return w.p->placement[layer * ALL_EXPERTS + expert]; }
DEVICE bool talks_to_host() { return blockIdx.x == gridDim.x - 1; }
DEVICE int message_number(const Worker& w, int layer) { return w.control->ticket * LAYERS + layer + 1; }

// The experts of a single row that the GPU has.
DEVICE void list_resident(Worker& w, int layer) {
  Routing& r = *w.routing;
  compute_sync();
  if (w.warp) return;
  int expert = 0, place = ON_HOST;
  if (w.lane < USED_EXPERTS) {
    expert = r.expert[0][w.lane];
    place = place_of(w, layer, expert);
  }
  const u32 word = (u32)warp_sum(place != ON_HOST ? (int)(1u << w.lane) : 0);
  const int before = count_bits(word & ((1u << w.lane) - 1));
  if (place != ON_HOST) {
    r.listed[before] = (u16)expert;
    r.place[before] = (u16)place;
  }
  if (w.lane == 0) r.slots = count_bits(word);
}

// Sends the operand's rows to the host if it has some of their experts; every block calls this.
DEVICE void send_rows(Worker& w, int layer) {
  if (!talks_to_host()) return;
  Routing& r = *w.routing;
  if (w.thread == 0) r.sent = 0;
  compute_sync();
  for (int i = w.thread; i < w.rows * USED_EXPERTS; i += COMPUTE) {
    const int m = i / USED_EXPERTS, k = i % USED_EXPERTS, expert = r.expert[m][k];
    const bool here = place_of(w, layer, expert) != ON_HOST;
    if (expert < EXPERTS) relaxed_add(w.p->uses + layer * EXPERTS + expert, 1);
    if (!here) r.sent = 1;
    store_system(w.p->mail + MAIL_PAIRS + 2 * i, here ? -1 : expert);
    store_system(w.p->mail + MAIL_PAIRS + 2 * i + 1, __float_as_int(r.weight[m][k]));
  }
  compute_sync();
  if (!r.sent) return;
  for (int i = w.thread; i < w.rows * (HIDDEN / 8); i += COMPUTE) {
    const int m = i / (HIDDEN / 8), d = i % (HIDDEN / 8) * 8;
    *(uint4*)(w.p->mail_rows + m * HIDDEN + d) = *(const uint4*)(w.operand + m * w.p->x_stride + d);
  }
  if (w.thread == 0) {
    store_system(w.p->mail + MAIL_LAYER, layer);
    store_system(w.p->mail + MAIL_ROWS, w.rows);
  }
  fence_system();
  compute_sync();
  if (w.thread == 0) store_system(w.p->mail + MAIL_SENT, message_number(w, layer));
}

// Waits for the host's sums and adds them.
DEVICE void add_from_host(Worker& w, int layer) {
  if (!talks_to_host() || !w.routing->sent) return;
  if (w.thread == 0) {
    while (load_system(w.p->mail + MAIL_ANSWERED) != message_number(w, layer)) spin_for_host();
    fence_system();
  }
  compute_sync();
  for (int i = w.thread; i < w.rows * (HIDDEN / 2); i += COMPUTE) {
    const uint4 two = load16_system(w.p->mail_sums + 2 * i);
    s64* to = w.p->residual + 2 * i;
    if (two.x | two.y) add_s64(to, (s64)((u64)two.y << 32 | two.x));
    if (two.z | two.w) add_s64(to + 1, (s64)((u64)two.w << 32 | two.z));
  }
}
#endif
