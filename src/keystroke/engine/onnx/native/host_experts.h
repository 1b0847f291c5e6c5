/* Experts for a GPU whose memory does not hold them all: a thread waits for rows in memory that both share, computes
 * the experts asked for with the functions of experts.h, and answers with sums for the GPU's residual stream.
 *
 * The words of `mail` are those of host_experts.cuh. There is at most one message under way, and every message is
 * answered: a failure is a word that the engine reads. The thread spins while messages follow each other and then
 * sleeps; `wake_host_experts` announces the next ones.
 */
#pragma once
#include "experts.h"
#include "plan.h"

enum { MAIL_SENT = 0, MAIL_ANSWERED = 32, MAIL_LAYER = 64, MAIL_ROWS = 65, MAIL_PAIRS = 66 };
enum { HOST_FINE, HOST_NO_MEMORY, HOST_NOT_FINITE };
/* A step of the GPU may pause for the work of others between two messages; the longest nap is the latest answer. */
enum { HOST_SPIN_NS = 2000000, FIRST_NAP_NS = 100000, LONGEST_NAP_NS = 20000000 };

typedef struct {
    PlanTable gate, up, down;
    const float *gate_bias, *up_bias, *down_bias; /* or NULL */
} HostLayer;

/* What Python passes: see host_experts.py. */
typedef struct {
    int64_t layers, hidden, width, count, top, most_rows, type, count_bits, threads; /* `type`: of the rows' numbers */
    float scale, limit, fixed_one, largest;                                          /* `scale`: of those numbers */
    const HostLayer *layer;
    int32_t *mail;
    const uint16_t *rows;
    int64_t *sums;
} HostModel;

typedef struct {
    HostModel model;
    HostLayer *layers;
    Pool *pool;
    Experts e;
    void *memory;
    float *x;
    uint8_t *uneven, *fetched;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int closing, woken, failed;
    atomic_llong messages, pairs;
} HostExperts;

/* Widens one row of activations. */
static void widen_activations(void *data, size_t row) {
    HostExperts *h = data;
    const uint16_t *from = h->model.rows + row * h->e.hidden;
    float *to = h->x + row * h->e.hidden, scale = h->model.scale;
    for (size_t i = 0; i < h->e.hidden; i += LANES) { /* hidden sizes are multiples of 64 */
        if (h->model.type == PLAIN_F16) put_floats(to + i, times(same(scale), halves_at(from + i)));
        else for (size_t j = i; j < i + LANES; j++) to[j] = scale * plain_number(PLAIN_BF16, (const uint8_t *)(from + j));
    }
}

/* The pairs of a message: which expert and which weight each has. */
static void read_pairs(HostExperts *h) {
    Experts *e = &h->e;
    const int32_t *listed = h->model.mail + MAIL_PAIRS;
    for (size_t p = 0; p < e->rows * e->top; p++) {
        int32_t expert = listed[2 * p];
        e->chosen[p] = expert < 0 || (size_t)expert >= e->count ? NO_EXPERT : (uint32_t)expert;
        memcpy(e->weights + p, listed + 2 * p + 1, sizeof(float));
    }
}

/* The weighted sum of a row's experts on the host, in the order of their ranks, as a number of the GPU's residual
 * stream: fixed point above the number of sums. */
static void answer_row(void *data, size_t row) {
    HostExperts *h = data;
    const Experts *e = &h->e;
    const uint32_t *chosen = e->chosen + row * e->top;
    const float *ends = e->ends + row * e->top * e->hidden, *weights = e->weights + row * e->top;
    int64_t *out = h->model.sums + row * e->hidden, here = 0;
    for (size_t k = 0; k < e->top; k++) here += chosen[k] != NO_EXPERT;
    float each[LANES] __attribute__((aligned(64)));
    for (size_t i = 0; i < e->hidden; i += LANES) {
        floats total = same(0);
        for (size_t k = 0; k < e->top; k++) {
            if (chosen[k] != NO_EXPERT) total = times_plus(same(weights[k]), floats_at(ends + k * e->hidden + i), total);
        }
        put_floats(each, total);
        for (size_t j = 0; j < LANES; j++) {
            float value = each[j];
            if (!(fabsf(value) < h->model.largest)) value = 0, atomic_store(&h->failed, HOST_NOT_FINITE);
            out[i + j] = (int64_t)((uint64_t)llrintf(value * h->model.fixed_one) << h->model.count_bits) + here;
        }
    }
}

static int compute_listed(HostExperts *h, size_t layer) {
    Experts *e = &h->e;
    const HostLayer *given = h->layers + layer;
    Threads *threads = &h->pool->base;
    Table *tables[3] = {&e->gate, &e->up, &e->down};
    const PlanTable *from[3] = {&given->gate, &given->up, &given->down};
    for (int i = 0; i < 3; i++) {
        const Format *format = is_plain(from[i]->type) ? NULL : format_of(from[i]->type);
        size_t width = i < 2 ? e->hidden : e->width;
        size_t stride = format ? row_bytes(format, width) : width * plain_bytes(from[i]->type);
        *tables[i] = (Table){from[i]->type, format, from[i]->at, stride};
    }
    e->gate_bias = given->gate_bias, e->up_bias = given->up_bias, e->down_bias = given->down_bias;
    int asked[2] = {0, 0}, later[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        if (tables[i]->format) asked[is_large(tables[i]->format)] = 1;
    }
    if (e->down.format) later[is_large(e->down.format)] = 1;
    read_pairs(h);
    size_t pairs = group_pairs(e);
    atomic_fetch_add_explicit(&h->messages, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->pairs, (long long)pairs, memory_order_relaxed);
    fetch_experts(e, h->fetched + layer * MOST_FETCHED);
    for_each_row(threads, widen_activations, e->rows, h);
    int single = e->rows == 1, fine = 0;
    e->in = (RoundedRows){.x = h->x, .source = single ? NULL : e->sources, .rows = single ? 1 : pairs, .width = e->hidden};
    e->between = (RoundedRows){.x = e->middle, .rows = pairs, .width = e->width};
    if (plan_rounding(&e->in, asked, e->rows, h->uneven)) {
        for_each_row(threads, round_planned, e->in.rows, &e->in);
        e->strips = (e->width + LANES - 1) / LANES;
        for_tasks(threads, expert_in, e->groups * e->strips, e);
        if (plan_rounding(&e->between, later, pairs, h->uneven)) {
            for_each_row(threads, round_planned, pairs, &e->between);
            e->strips = (e->hidden + LANES - 1) / LANES;
            for_tasks(threads, expert_out, e->groups * e->strips, e);
            fine = 1;
        }
    }
    free_rounding(&e->in), free_rounding(&e->between);
    return fine;
}

static void answer(HostExperts *h) {
    Experts *e = &h->e;
    const int32_t *mail = h->model.mail;
    size_t rows = (size_t)mail[MAIL_ROWS], layer = (size_t)mail[MAIL_LAYER];
    e->rows = rows < (size_t)h->model.most_rows ? rows : (size_t)h->model.most_rows;
    if (layer >= (size_t)h->model.layers) layer = 0;
    if (!compute_listed(h, layer)) {
        memset(e->ends, 0, e->rows * e->top * e->hidden * sizeof *e->ends);
        atomic_store(&h->failed, HOST_NO_MEMORY);
    }
    for_each_row(&h->pool->base, answer_row, e->rows, h);
}

static void *serve_gpu(void *data) {
    HostExperts *h = data;
    int32_t *sent = h->model.mail + MAIL_SENT, *answered = h->model.mail + MAIL_ANSWERED, last = *answered;
    int64_t until = 0, nap = FIRST_NAP_NS;
    for (unsigned turns = 0; !atomic_load(&h->closing);) {
        int32_t number = __atomic_load_n(sent, __ATOMIC_ACQUIRE);
        if (number != last) {
            answer(h);
            last = number, until = 0, nap = FIRST_NAP_NS;
            __atomic_store_n(answered, number, __ATOMIC_RELEASE);
            continue;
        }
        if (atomic_exchange(&h->woken, 0)) until = 0, nap = FIRST_NAP_NS;
        if (spins_on(&turns, &until, HOST_SPIN_NS)) continue;
        struct timespec then;
        clock_gettime(CLOCK_REALTIME, &then);
        int64_t at = then.tv_nsec + nap;
        then.tv_sec += at / 1000000000, then.tv_nsec = at % 1000000000;
        pthread_mutex_lock(&h->lock);
        if (!atomic_load(&h->woken) && !atomic_load(&h->closing)) pthread_cond_timedwait(&h->wake, &h->lock, &then);
        pthread_mutex_unlock(&h->lock);
        nap = 2 * nap < LONGEST_NAP_NS ? 2 * nap : LONGEST_NAP_NS;
    }
    return NULL;
}

/* Call before a step is launched. */
EXPORTED void wake_host_experts(HostExperts *h) {
    if (atomic_exchange(&h->woken, 1)) return;
    pthread_mutex_lock(&h->lock);
    pthread_cond_signal(&h->wake);
    pthread_mutex_unlock(&h->lock);
}

/* The first failure since the last call: HOST_FINE if there was none. */
EXPORTED int host_experts_failure(HostExperts *h) { return atomic_exchange(&h->failed, HOST_FINE); }

/* Messages answered and pairs of a row and an expert computed so far. */
EXPORTED void host_experts_counts(HostExperts *h, int64_t *out) {
    out[0] = atomic_load(&h->messages), out[1] = atomic_load(&h->pairs);
}

static void free_host_experts(HostExperts *h) {
    if (h->pool) close_pool(h->pool);
    free(h->layers), free(h->memory), free(h->fetched), free(h);
}

/* Ends the thread. No step that uses it may run. */
EXPORTED void close_host_experts(HostExperts *h) {
    atomic_store(&h->closing, 1);
    pthread_mutex_lock(&h->lock);
    pthread_cond_signal(&h->wake);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
    pthread_cond_destroy(&h->wake), pthread_mutex_destroy(&h->lock);
    free_host_experts(h);
}

/* Starts the thread; NULL without memory or if a storage type is not known. */
EXPORTED HostExperts *open_host_experts(const HostModel *model) {
    HostExperts *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->model = *model;
    Experts *e = &h->e;
    *e = (Experts){.hidden = (size_t)model->hidden, .width = (size_t)model->width, .count = (size_t)model->count,
                   .top = (size_t)model->top, .limit = model->limit};
    size_t layers = (size_t)model->layers, rows = (size_t)model->most_rows, pairs = rows * e->top;
    h->layers = malloc(layers * sizeof *h->layers);
    h->fetched = calloc(layers, MOST_FETCHED);
    h->pool = open_pool((size_t)model->threads, HOST_SPIN_NS);
    size_t floats_needed = rows * e->hidden + pairs * (e->width + e->hidden + 1);
    h->memory = aligned_alloc(64, (e->count * sizeof(size_t) + 4 * floats_needed + 4 * (3 * pairs + e->count + 2) + pairs + rows + 127) / 64 * 64);
    int fine = h->layers && h->fetched && h->pool && h->memory && e->hidden % LANES == 0 && e->width >= LANES;
    if (fine) memcpy(h->layers, model->layer, layers * sizeof *h->layers);
    for (size_t i = 0; fine && i < layers; i++) {
        int64_t types[3] = {h->layers[i].gate.type, h->layers[i].up.type, h->layers[i].down.type};
        for (int j = 0; j < 3; j++) fine &= is_plain(types[j]) || format_of(types[j]);
    }
    if (!fine) {
        free_host_experts(h);
        return NULL;
    }
    e->group_experts = h->memory;
    h->x = (float *)(e->group_experts + e->count);
    e->middle = h->x + rows * e->hidden, e->ends = e->middle + pairs * e->width, e->weights = e->ends + pairs * e->hidden;
    e->chosen = (uint32_t *)(e->weights + pairs);
    e->order = e->chosen + pairs, e->sources = e->order + pairs, e->starts = e->sources + pairs;
    h->uneven = (uint8_t *)(e->starts + e->count + 2);
    pthread_mutex_init(&h->lock, NULL), pthread_cond_init(&h->wake, NULL);
    if (pthread_create(&h->thread, NULL, serve_gpu, h)) {
        free_host_experts(h);
        return NULL;
    }
    return h;
}
