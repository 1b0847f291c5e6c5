/* A whole step in one call: the layers of a Llama-like model over stored weights, without a runtime in between.
 *
 * Every number is computed by the functions that the operators use, so that the bits are those of the graph. Matrices are
 * packed where that is known to be faster and the caller allows the memory. Called by one thread at a time.
 */
#pragma once
#include "attention.h"
#include "heads.h"
#include "stored_product.h"

#define EXPORTED __attribute__((visibility("default")))

/* What Python passes: see plan.py. Sizes are int64_t, and what is missing is NULL. */
typedef struct {
    const uint8_t *at;
    int64_t type, height;
} PlanTable;

typedef struct {
    const float *norm, *query_norm, *key_norm, *mlp_norm, *cosines, *sines;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    PlanTable qkv[3], output, gate_up[2], down;
    int64_t window;
} PlanLayer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, width, intermediate, positions;
    float epsilon, scale;
    PlanTable embedding, head;
    const float *last_norm;
    const PlanLayer *layer;
    int64_t packs, threads;
} PlanModel;

enum { PLAN_DONE, PLAN_STOPPED, PLAN_NO_MEMORY, PLAN_OUTSIDE };

typedef struct {
    Part parts[MOST_PARTS];
    size_t count, width, stride;
    const float *bias;
    int gated;
} Matrix;

typedef struct {
    Matrix qkv, output, gate_up, down;
} Matrices;

typedef struct {
    PlanModel model;
    PlanLayer *layers;
    Matrices *matrices;
    Matrix head;
    Pool *pool;
    void **copies;
    size_t copied, rows; /* `rows`: for how many there is memory */
    float *memory, *residual, *normed, *mixed, *split, *attended, *wide, *branch;
} Plan;

/* The RMS norm of rows, after a branch was added to them. */
typedef struct {
    size_t width;
    float epsilon;
    const float *branch, *gain; /* `branch` may be NULL */
    float *rows, *out;
} Norm;

static void norm_row(void *data, size_t row) {
    const Norm *n = data;
    float *x = n->rows + row * n->width, *out = n->out + row * n->width;
    if (n->branch) {
        const float *branch = n->branch + row * n->width;
        for (size_t i = 0; i < n->width; i++) x[i] += branch[i];
    }
    float scale = norm_scale(x, n->width, n->epsilon);
    for (size_t i = 0; i < n->width; i++) out[i] = x[i] * scale * n->gain[i];
}

typedef struct {
    const Format *format;
    Rows rows;
    size_t width, stride; /* `stride` of packed rows */
    uint8_t *out;
} Packing;

#if PACKS
static void pack_strip(void *data, size_t strip) {
    const Packing *p = data;
    Rows rows = {p->rows.at + strip * LANES * p->rows.stride, p->rows.stride};
    pack_rows(p->format, rows, p->width, p->out + strip * LANES * p->stride);
}
#endif

/* Packs a matrix for StoredMatMul, on `threads` threads. Returns the bytes of LANES rows, or 0 if it stays as it is stored
 * or there is no memory. Without `out` nothing is packed. */
EXPORTED int64_t pack_table(int64_t type, const uint8_t *at, int64_t height, int64_t width, uint8_t *out, int64_t threads) {
#if PACKS
    const Format *stored = format_of(type), *format = stored ? packed_format(stored, (size_t)height, (size_t)width) : NULL;
    if (!format) return 0;
    Packing packing = {stored, {at, row_bytes(stored, (size_t)width)}, (size_t)width, row_bytes(format, (size_t)width), out};
    Pool *pool = out ? open_pool((size_t)threads, SPIN_NS) : NULL;
    if (out && !pool) return 0;
    if (out) for_tasks(&pool->base, pack_strip, (size_t)height / LANES, &packing), close_pool(pool);
    return (int64_t)(LANES * packing.stride);
#else
    return (void)type, (void)at, (void)height, (void)width, (void)out, (void)threads, 0;
#endif
}

EXPORTED int64_t packed_lanes(void) { return LANES; }

/* Packs a part if that is possible. It stays as it is stored without memory for a copy. */
static void pack_part(Plan *plan, Part *part, size_t width) {
#if PACKS
    const Format *format = packed_format(part->format, part->height, width);
    void **copies = format ? realloc(plan->copies, (plan->copied + 1) * sizeof *copies) : NULL;
    if (!copies) return;
    plan->copies = copies;
    /* A margin for prefetches is not needed: they may fail. */
    size_t stride = row_bytes(format, width);
    uint8_t *out = aligned_alloc(64, (part->height * stride + 63) / 64 * 64);
    if (!out) return;
    plan->copies[plan->copied++] = out;
    Packing packing = {part->format, {part->at, part->stride}, width, stride, out};
    for_tasks(&plan->pool->base, pack_strip, part->height / LANES, &packing);
    part->at = out, part->format = format, part->stride = stride;
#else
    (void)plan, (void)part, (void)width;
#endif
}

/* Returns 0, or 1 if the tables do not have the sizes or types of such a product. */
static int make_matrix(Plan *plan, const PlanTable *tables, size_t count, size_t width, int gated, const float *bias, Matrix *out) {
    *out = (Matrix){.count = count, .width = width, .bias = bias, .gated = gated};
    size_t heights = 0;
    for (size_t i = 0; i < count; i++) {
        const Format *format = format_of(tables[i].type);
        if (!format || width % BLOCK || width % (size_t)format->values || tables[i].height < LANES) return 1;
        out->parts[i] = (Part){format, tables[i].at, (size_t)tables[i].height, row_bytes(format, width), heights};
        heights += out->parts[i].height;
        if (plan->model.packs) pack_part(plan, out->parts + i, width);
    }
    out->stride = gated ? out->parts[0].height : heights;
    return 0;
}

static int multiply_rows(Plan *plan, const Matrix *matrix, const float *x, size_t rows, float *out) {
    Product p = {.count = matrix->count, .width = matrix->width, .x = x, .bias = matrix->bias, .out = out, .gated = matrix->gated};
    memcpy(p.parts, matrix->parts, sizeof p.parts);
    p.stride = matrix->stride, p.rows = rows;
    return run_product(&p, &plan->pool->base);
}

EXPORTED void close_plan(Plan *plan) {
    if (!plan) return;
    if (plan->pool) close_pool(plan->pool);
    for (size_t i = 0; i < plan->copied; i++) free(plan->copies[i]);
    free(plan->copies), free(plan->matrices), free(plan->layers), free(plan->memory), free(plan);
}

/* Returns NULL without memory, or if sizes or types do not fit. The memory that `model` points to stays in use, except
 * the struct itself and its layers. */
EXPORTED Plan *open_plan(const PlanModel *model) {
    Plan *plan = calloc(1, sizeof *plan);
    if (!plan) return NULL;
    size_t layers = (size_t)model->layers, hidden = (size_t)model->hidden, wide = (size_t)model->intermediate;
    size_t attended = (size_t)(model->heads * model->width);
    plan->model = *model;
    plan->pool = open_pool((size_t)model->threads, SPIN_NS);
    plan->layers = malloc(layers * sizeof *plan->layers);
    plan->matrices = calloc(layers, sizeof *plan->matrices);
    int failed = !plan->pool || !plan->layers || !plan->matrices || model->kv_heads <= 0 || model->heads % model->kv_heads;
    failed = failed || model->heads / model->kv_heads > MOST_QUERIES || model->width % 2 || model->width > MOST_WIDTH;
    failed = failed || !format_of(model->embedding.type) || hidden % (size_t)format_of(model->embedding.type)->values;
    if (!failed) memcpy(plan->layers, model->layer, layers * sizeof *plan->layers);
    for (size_t i = 0; i < layers && !failed; i++) {
        const PlanLayer *layer = plan->layers + i;
        Matrices *m = plan->matrices + i;
        failed |= make_matrix(plan, layer->qkv, 3, hidden, 0, layer->qkv_bias, &m->qkv);
        failed |= make_matrix(plan, &layer->output, 1, attended, 0, layer->output_bias, &m->output);
        failed |= make_matrix(plan, layer->gate_up, 2, hidden, 1, layer->gate_up_bias, &m->gate_up);
        failed |= make_matrix(plan, &layer->down, 1, wide, 0, layer->down_bias, &m->down);
        failed |= m->qkv.stride != attended + 2 * (size_t)(model->kv_heads * model->width) || m->gate_up.stride != wide;
        failed |= m->output.stride != hidden || m->down.stride != hidden || m->gate_up.parts[1].height != wide;
    }
    failed = failed || make_matrix(plan, &model->head, 1, hidden, 0, NULL, &plan->head);
    if (!failed) return plan;
    close_plan(plan);
    return NULL;
}

/* Memory for the intermediate results of `rows` rows. Returns 0, or 1 without memory. */
static int make_room(Plan *plan, size_t rows) {
    if (rows <= plan->rows) return 0;
    const PlanModel *m = &plan->model;
    size_t hidden = (size_t)m->hidden, mixed = (size_t)((m->heads + 2 * m->kv_heads) * m->width);
    size_t attended = (size_t)(m->heads * m->width), wide = (size_t)m->intermediate;
    float *memory = malloc(rows * (3 * hidden + 2 * mixed + attended + wide) * sizeof *memory);
    if (!memory) return 1;
    free(plan->memory);
    plan->memory = plan->residual = memory;
    plan->normed = plan->residual + rows * hidden, plan->branch = plan->normed + rows * hidden;
    plan->mixed = plan->branch + rows * hidden, plan->split = plan->mixed + rows * mixed;
    plan->attended = plan->split + rows * mixed, plan->wide = plan->attended + rows * attended;
    plan->rows = rows;
    return 0;
}

/* Sums of exponentials by shares of the numbers: in an order that depends neither on threads nor on the processor. */
enum { ABREAST = 16, STRETCH = 256, LEAST_SHARE = 4096, MOST_SHARES = 64 };

typedef struct {
    const float *x;
    float top;
    size_t count, share;
    double sums[MOST_SHARES];
    size_t tops[MOST_SHARES];
} Exponentials;

/* The sum of up to STRETCH numbers. */
static double sum_stretch(const Exponentials *e, size_t at) {
    floats sums[ABREAST / LANES];
    float each[ABREAST] __attribute__((aligned(64)));
    for (size_t j = 0; j < ABREAST / LANES; j++) sums[j] = same(0);
    for (size_t end = at + STRETCH < e->count ? at + STRETCH : e->count; at < end; at += ABREAST) {
        const float *x = e->x + at;
        if (end - at < ABREAST) {
            for (size_t j = 0; j < ABREAST; j++) each[j] = at + j < end ? x[j] : -INFINITY;
            x = each;
        }
        for (size_t j = 0; j < ABREAST / LANES; j++) sums[j] = add(sums[j], exponential(minus(floats_at(x + j * LANES), same(e->top))));
    }
    double total = 0;
    for (size_t j = 0; j < ABREAST / LANES; j++) put_floats(each + j * LANES, sums[j]);
    for (size_t j = 0; j < ABREAST; j++) total += (double)each[j];
    return total;
}

static void sum_share(void *data, size_t share) {
    Exponentials *e = data;
    e->sums[share] = 0;
    for (size_t at = share * e->share; at < e->count && at < (share + 1) * e->share; at += STRETCH) e->sums[share] += sum_stretch(e, at);
}

/* The first of the largest numbers of a share, or the first that is none. */
static void find_top(void *data, size_t share) {
    Exponentials *e = data;
    const float *x = e->x;
    size_t first = share * e->share, end = first + e->share < e->count ? first + e->share : e->count, at = first;
    float most = x[at];
    if (end - at >= LANES) {
        floats each = floats_at(x + at);
        float lanes[LANES];
        for (; at + LANES <= end; at += LANES) each = greater_or_nan(each, floats_at(x + at));
        put_floats(lanes, each);
        most = lanes[0];
        for (size_t i = 1; i < LANES; i++) most = most == most && !(lanes[i] <= most) ? lanes[i] : most;
    }
    for (; at < end; at++) most = most == most && !(x[at] <= most) ? x[at] : most;
    for (at = first; at + 1 < end && x[at] != most && (most == most || x[at] == x[at]);) at++;
    e->tops[share] = at;
}

/* Finds the largest of each of `rows` rows of `count` numbers, the first among equals, and the sum of e to the power of each
 * less that. */
EXPORTED void rank_rows(Plan *plan, const float *x, int64_t rows, int64_t count, int64_t *tops, double *sums) {
    size_t even = ((size_t)count + MOST_SHARES - 1) / MOST_SHARES, share = (even + STRETCH - 1) / STRETCH * STRETCH;
    Exponentials e = {.count = (size_t)count, .share = share > LEAST_SHARE ? share : LEAST_SHARE};
    size_t shares = (e.count + e.share - 1) / e.share;
    for (int64_t r = 0; r < rows; r++) {
        e.x = x + r * count;
        for_tasks(&plan->pool->base, find_top, shares, &e);
        size_t top = e.tops[0];
        for (size_t i = 1; i < shares; i++) {
            if (e.x[top] == e.x[top] && !(e.x[e.tops[i]] <= e.x[top])) top = e.tops[i];
        }
        e.top = e.x[top], tops[r] = (int64_t)top, sums[r] = 0;
        for_tasks(&plan->pool->base, sum_share, shares, &e);
        for (size_t i = 0; i < shares; i++) sums[r] += e.sums[i];
    }
}

/* How many sequences a run advances by a token each in about the time that two runs of one take, or less, for matrices of 4 and 8 bits. */
EXPORTED int64_t cheap_sequences(void) { return LANES == 16 ? 8 : 2; }

/* The rows of one sequence in a run: `rows` tokens from position `first` on; the logits of the last `asked` are wanted.
 * `kept`: its keys and values of every layer, as attention.h has them, with room for `capacity` tokens. */
typedef struct {
    int64_t rows, first, asked, capacity;
    uint16_t *const *kept;
} PlanSequence;

INLINE int fits(const PlanModel *m, const PlanSequence *s) {
    int64_t end = s->first + s->rows;
    return s->rows > 0 && s->first >= 0 && s->asked >= 0 && s->asked <= s->rows && end <= s->capacity && end <= m->positions && !(s->capacity % KEY_BLOCK);
}

/* Moves the asked rows of all sequences to the front. */
static void move_asked(float *x, size_t width, const PlanSequence *sequences, size_t count) {
    float *to = x;
    for (size_t i = 0; i < count; x += (size_t)sequences[i++].rows * width) {
        size_t asked = (size_t)sequences[i].asked * width;
        memmove(to, x + (size_t)sequences[i].rows * width - asked, asked * sizeof *x);
        to += asked;
    }
}

/* Attention of one layer, for one sequence after the other. Returns 0, or 1 without memory. */
static int attend_all(Plan *plan, size_t at, const PlanSequence *sequences, size_t count, const float *mixed) {
    const PlanModel *m = &plan->model;
    const PlanLayer *layer = plan->layers + at;
    Attention all = {.heads = (size_t)m->heads, .kv_heads = (size_t)m->kv_heads, .width = (size_t)m->width, .scale = m->scale};
    all.window = (size_t)layer->window, all.cosines = layer->cosines, all.sines = layer->sines, all.mixed = mixed, all.out = plan->attended;
    for (const PlanSequence *s = sequences; s < sequences + count; s++) {
        Attention a = all;
        a.rows = (size_t)s->rows, a.first = (size_t)s->first, a.capacity = (size_t)s->capacity;
        a.keys = s->kept[2 * at], a.values = s->kept[2 * at + 1];
        if (run_attend(&a, &plan->pool->base)) return 1;
        all.mixed += a.rows * (a.heads + 2 * a.kv_heads) * a.width, all.out += a.rows * a.heads * a.width;
    }
    return 0;
}

/* Computes the tokens `ids` of `count` sequences, one behind the other, and the logits that are asked for, [asked][vocabulary],
 * with what `rank_rows` finds in them. Between two layers it ends with PLAN_STOPPED if `stop` is set. Keys and values of these
 * positions are undefined unless it ends with PLAN_DONE. */
EXPORTED int run_plan(Plan *plan, const int64_t *ids, const PlanSequence *sequences, int64_t count_, float *logits, int64_t *tops, double *sums,
                      const volatile int32_t *stop) {
    const PlanModel *m = &plan->model;
    Threads *threads = &plan->pool->base;
    size_t rows = 0, asked = 0, count = (size_t)count_, hidden = (size_t)m->hidden;
    for (size_t i = 0; i < count; i++) {
        if (!fits(m, sequences + i)) return PLAN_OUTSIDE;
        rows += (size_t)sequences[i].rows, asked += (size_t)sequences[i].asked;
    }
    if (make_room(plan, rows)) return PLAN_NO_MEMORY;
    const Format *format = format_of(m->embedding.type);
    for (size_t r = 0; r < rows; r++) {
        if (ids[r] < 0 || ids[r] >= m->embedding.height) return PLAN_OUTSIDE;
        widen_row(format, m->embedding.at + (size_t)ids[r] * row_bytes(format, hidden), hidden, plan->residual + r * hidden);
    }
    Norm norm = {hidden, m->epsilon, NULL, plan->layers[0].norm, plan->residual, plan->normed};
    for_each_row(threads, norm_row, rows, &norm);
    norm.branch = plan->branch;
    for (size_t i = 0; i < (size_t)m->layers; i++) {
        const PlanLayer *layer = plan->layers + i;
        const Matrices *matrices = plan->matrices + i;
        const int last = i + 1 == (size_t)m->layers;
        const float *mixed = plan->mixed;
        if (*stop) return PLAN_STOPPED;
        if (multiply_rows(plan, &matrices->qkv, plan->normed, rows, plan->mixed)) return PLAN_NO_MEMORY;
        if (layer->query_norm) {
            Heads heads = {(size_t)m->heads, (size_t)m->kv_heads, (size_t)m->width, 0, m->epsilon, plan->mixed, layer->query_norm, layer->key_norm, plan->split};
            for_each_row(threads, split_heads, rows, &heads);
            mixed = plan->split;
        }
        if (attend_all(plan, i, sequences, count, mixed)) return PLAN_NO_MEMORY;
        if (last) { /* from here on only what is asked for */
            if (!asked) return PLAN_DONE;
            move_asked(plan->residual, hidden, sequences, count);
            move_asked(plan->attended, matrices->output.width, sequences, count);
            rows = asked;
        }
        if (multiply_rows(plan, &matrices->output, plan->attended, rows, plan->branch)) return PLAN_NO_MEMORY;
        norm.gain = layer->mlp_norm;
        for_each_row(threads, norm_row, rows, &norm);
        if (multiply_rows(plan, &matrices->gate_up, plan->normed, rows, plan->wide)) return PLAN_NO_MEMORY;
        if (multiply_rows(plan, &matrices->down, plan->wide, rows, plan->branch)) return PLAN_NO_MEMORY;
        norm.gain = last ? m->last_norm : plan->layers[i + 1].norm;
        for_each_row(threads, norm_row, rows, &norm);
    }
    if (multiply_rows(plan, &plan->head, plan->normed, rows, logits)) return PLAN_NO_MEMORY;
    rank_rows(plan, logits, (int64_t)rows, (int64_t)plan->head.stride, tops, sums);
    return PLAN_DONE;
}
