/* The operators that only some model families need: products with plain numbers, experts, heads with norms and gates.
 *
 * Included by operators.c, whose helpers it uses. Sizes are checked as there.
 */
#pragma once
#include "delta_net.h"
#include "experts.h"
#include "heads.h"
#include "latent.h"

/* Runs `work` for every row, in parallel if there are many. */
static Status *for_rows(Api api, Context *context, void (*work)(void *, size_t), size_t rows, void *data) {
    if (rows >= 8) return in_parallel(api, context, work, rows, data);
    for (size_t r = 0; r < rows; r++) work(data, r);
    return NULL;
}

/* PlainMatMul: x [1, rows, width], bias [height] or none, one table of bytes [height, bytes a row] -> [1, rows, height]. */

typedef struct {
    Api api;
    int64_t type;
} Plain;

typedef struct {
    int64_t type;
    const uint8_t *table;
    size_t height, stride, width, rows, run;
    const float *x, *bias;
    float *out;
} PlainProduct;

static Status *make_plain(Api api, const KernelInfo *info, void **out) {
    Plain made = {.api = api};
    TRY(attribute_int(api, info, "type", &made.type));
    if (!is_plain(made.type)) return failure(api, "PlainMatMul takes numbers of 16 or 32 bits");
    return keep_kernel(api, &made, sizeof made, out);
}

static void plain_run(void *data, size_t task) {
    const PlainProduct *p = data;
    for (size_t h = task * p->run; h < p->height && h < (task + 1) * p->run; h++) {
        dot_rows_plain(p->type, p->table + h * p->stride, p->x, p->width, p->width, p->rows, p->out + h, p->height);
        if (!p->bias) continue;
        for (size_t r = 0; r < p->rows; r++) p->out[r * p->height + h] += p->bias[h];
    }
}

static Status *run_plain(void *kernel, Context *context) {
    const Plain *self = kernel;
    Api api = self->api;
    Input x, bias, table;
    TRY(read_input(api, context, 0, &x));
    TRY(read_input(api, context, 1, &bias));
    TRY(read_input(api, context, 2, &table));
    if (x.rank < 2 || table.rank != 2 || table.sizes[1] != x.sizes[x.rank - 1] * plain_bytes(self->type))
        return failure(api, "the table of PlainMatMul does not have rows of its type and the input's width");
    if (bias.data && bias.elements != table.sizes[0]) return failure(api, "the bias of PlainMatMul does not fit its table");
    PlainProduct p = {self->type, table.data, table.sizes[0], table.sizes[1], x.sizes[x.rank - 1], 0, 0, x.data, bias.data, NULL};
    p.rows = p.width ? x.elements / p.width : 0;
    p.run = LEAST_TASK / (p.stride + 1) + 1;
    TRY(output(api, context, p.rows, p.height, &p.out));
    return p.rows ? in_parallel(api, context, plain_run, (p.height + p.run - 1) / p.run, &p) : NULL;
}

/* PlainRows: ids [1, rows], a table of bytes [height, bytes a row] -> [1, rows, width]. */

static Status *run_plain_rows(void *kernel, Context *context) {
    const Plain *self = kernel;
    Api api = self->api;
    Input ids, table;
    float *out;
    TRY(read_input(api, context, 0, &ids));
    TRY(read_input(api, context, 1, &table));
    size_t each = plain_bytes(self->type);
    if (table.rank != 2 || table.sizes[1] % each) return failure(api, "the table of PlainRows does not have rows of its type");
    size_t width = table.sizes[1] / each;
    TRY(output(api, context, ids.elements, width, &out));
    for (size_t row = 0; row < ids.elements; row++, out += width) {
        int64_t id = ((const int64_t *)ids.data)[row];
        if (id < 0 || (size_t)id >= table.sizes[0]) return failure(api, "a token lies outside of the vocabulary");
        const uint8_t *from = (const uint8_t *)table.data + (size_t)id * table.sizes[1];
        for (size_t i = 0; i < width; i++) out[i] = plain_number(self->type, from + i * each);
    }
    return NULL;
}

/* Experts: x [1, rows, hidden], scores [1, rows, count], selection bias [count] or none, tables of bytes gate, up
 * [count * width, ...] and down [count * hidden, ...] (fused: gate and up are the same table, expert after expert),
 * their biases or none, a shared expert's result [1, rows, hidden] and its gate [1, rows, 1] or none -> [1, rows, hidden]. */

typedef struct {
    Api api;
    int64_t types[3], count, top, width, normalised, sigmoid, fused;
    float scale, limit;
    uint8_t fetched[MOST_FETCHED];
} ExpertsKernel;

static Status *make_experts(Api api, const KernelInfo *info, void **out) {
    ExpertsKernel made = {.api = api};
    size_t types = 3;
    TRY(attribute_ints(api, info, "types", made.types, &types));
    TRY(attribute_int(api, info, "count", &made.count));
    TRY(attribute_int(api, info, "top", &made.top));
    TRY(attribute_int(api, info, "width", &made.width));
    TRY(attribute_int(api, info, "normalised", &made.normalised));
    TRY(attribute_int(api, info, "sigmoid", &made.sigmoid));
    TRY(attribute_int(api, info, "fused", &made.fused));
    TRY(attribute_float(api, info, "scale", &made.scale));
    TRY(attribute_float(api, info, "limit", &made.limit));
    if (types != 3 || made.top <= 0 || made.count < made.top || made.width < LANES)
        return failure(api, "these experts cannot be chosen from");
    for (int i = 0; i < 3; i++) {
        if (!is_plain(made.types[i]) && !format_of(made.types[i])) return failure(api, "Experts does not know this storage type");
    }
    return keep_kernel(api, &made, sizeof made, out);
}

/* Reads a table and checks that it has `height` rows of `width` weights. */
static Status *read_table(Api api, Context *context, size_t index, int64_t type, size_t height, size_t width, Table *out) {
    Input table;
    TRY(read_input(api, context, index, &table));
    const Format *format = is_plain(type) ? NULL : format_of(type);
    size_t stride = format ? row_bytes(format, width) : width * plain_bytes(type);
    if (table.rank != 2 || table.sizes[0] != height || table.sizes[1] != stride || (format && width % (size_t)format->values))
        return failure(api, "a table of experts does not have the rows that its type and the input ask for");
    *out = (Table){type, format, table.data, stride};
    return NULL;
}

static Status *read_bias(Api api, Context *context, size_t index, size_t elements, const float **out) {
    Input bias;
    TRY(read_input(api, context, index, &bias));
    if (bias.data && bias.elements != elements) return failure(api, "a bias does not fit its experts");
    *out = bias.data;
    return NULL;
}

static Status *compute_experts(Experts *e, uint8_t *fetched, Api api, Context *context) {
    int asked[2] = {0, 0}, later[2] = {0, 0};
    for (const Table *t = &e->gate; t <= &e->up; t++) {
        if (t->format) asked[is_large(t->format)] = 1;
    }
    if (e->down.format) later[is_large(e->down.format)] = 1;
    size_t pairs = e->rows * e->top;
    uint8_t *uneven = malloc(pairs + e->rows);
    Status *failed = uneven ? NULL : failure(api, "no memory for experts");
    if (!failed) failed = for_rows(api, context, route, e->rows, e);
    if (!failed) {
        group_pairs(e);
        fetch_experts(e, fetched);
        e->in = (RoundedRows){.x = e->x, .source = e->rows == 1 ? NULL : e->sources, .rows = e->rows == 1 ? 1 : pairs, .width = e->hidden};
        if (!plan_rounding(&e->in, asked, e->rows, uneven)) failed = failure(api, "no memory for experts");
    }
    if (!failed) failed = for_rows(api, context, round_planned, e->in.rows, &e->in);
    e->strips = (e->width + LANES - 1) / LANES;
    if (!failed) failed = in_parallel(api, context, expert_in, e->groups * e->strips, e);
    if (!failed) {
        e->between = (RoundedRows){.x = e->middle, .rows = pairs, .width = e->width};
        if (!plan_rounding(&e->between, later, pairs, uneven)) failed = failure(api, "no memory for experts");
    }
    if (!failed) failed = for_rows(api, context, round_planned, pairs, &e->between);
    e->strips = (e->hidden + LANES - 1) / LANES;
    if (!failed) failed = in_parallel(api, context, expert_out, e->groups * e->strips, e);
    if (!failed) failed = for_rows(api, context, combine_experts, e->rows, e);
    free_rounding(&e->in), free_rounding(&e->between), free(uneven);
    return failed;
}

static Status *run_experts(void *kernel, Context *context) {
    ExpertsKernel *self = kernel;
    Api api = self->api;
    Input x, scores, selection, shared, gate;
    TRY(read_input(api, context, 0, &x));
    TRY(read_input(api, context, 1, &scores));
    TRY(read_input(api, context, 2, &selection));
    TRY(read_input(api, context, 9, &shared));
    TRY(read_input(api, context, 10, &gate));
    if (x.rank != 3 || scores.rank != 3 || scores.sizes[2] != (size_t)self->count || scores.sizes[1] != x.sizes[1])
        return failure(api, "Experts takes rows and one score for every expert");
    Experts e = {.rows = x.sizes[1], .hidden = x.sizes[2], .width = (size_t)self->width, .count = (size_t)self->count,
                 .top = (size_t)self->top, .normalised = (int)self->normalised, .sigmoid = (int)self->sigmoid,
                 .fused = (int)self->fused, .scale = self->scale, .limit = self->limit, .x = x.data, .scores = scores.data,
                 .selection = selection.data, .shared = shared.data, .shared_gate = gate.data};
    if (e.hidden < LANES || (selection.data && selection.elements != e.count) || (shared.data && shared.elements != x.elements) ||
        (gate.data && gate.elements != e.rows))
        return failure(api, "an input of Experts does not fit its rows");
    size_t in = e.count * e.width * (e.fused ? 2 : 1);
    TRY(read_table(api, context, 3, self->types[0], in, e.hidden, &e.gate));
    TRY(read_table(api, context, 4, self->types[1], in, e.hidden, &e.up));
    TRY(read_table(api, context, 5, self->types[2], e.count * e.hidden, e.width, &e.down));
    TRY(read_bias(api, context, 6, e.count * e.width, &e.gate_bias));
    TRY(read_bias(api, context, 7, e.count * e.width, &e.up_bias));
    TRY(read_bias(api, context, 8, e.count * e.hidden, &e.down_bias));
    TRY(output(api, context, e.rows, e.hidden, &e.out));
    if (!e.rows) return NULL;
    size_t pairs = e.rows * e.top;
    char *memory = malloc(e.count * sizeof *e.group_experts + pairs * (3 * sizeof *e.chosen + sizeof(float) * (1 + e.width + e.hidden)) +
                          (e.count + 2) * sizeof *e.starts);
    if (!memory) return failure(api, "no memory for experts");
    e.group_experts = (size_t *)memory;
    e.middle = (float *)(e.group_experts + e.count);
    e.ends = e.middle + pairs * e.width, e.weights = e.ends + pairs * e.hidden;
    e.chosen = (uint32_t *)(e.weights + pairs);
    e.order = e.chosen + pairs, e.sources = e.order + pairs, e.starts = e.sources + pairs;
    Status *failed = compute_experts(&e, self->fetched, api, context);
    free(memory);
    return failed;
}

/* SplitHeads: mixed [1, rows, heads (twice with gates; may be none), keys, values], norms of queries and keys [width] or none
 * -> [1, rows, queries, keys, values], normalised and without gates.
 * GateHeads: x [1, rows, heads * width], the same mixed -> x times the sigmoids of the gates. */

typedef struct {
    Api api;
    int64_t heads, kv_heads, width, gated;
    float epsilon;
} HeadsKernel;

static Status *make_heads(Api api, const KernelInfo *info, void **out) {
    HeadsKernel made = {.api = api};
    TRY(attribute_int(api, info, "heads", &made.heads));
    TRY(attribute_int(api, info, "kv_heads", &made.kv_heads));
    TRY(attribute_int(api, info, "width", &made.width));
    TRY(attribute_int(api, info, "gated", &made.gated));
    TRY(attribute_float(api, info, "epsilon", &made.epsilon));
    if (made.heads < 0 || made.kv_heads <= 0 || made.width <= 0) return failure(api, "these are no heads");
    return keep_kernel(api, &made, sizeof made, out);
}

static Status *run_split_heads(void *kernel, Context *context) {
    const HeadsKernel *self = kernel;
    Api api = self->api;
    Input mixed, queries, keys;
    TRY(read_input(api, context, 0, &mixed));
    TRY(read_input(api, context, 1, &queries));
    TRY(read_input(api, context, 2, &keys));
    Heads h = {(size_t)self->heads, (size_t)self->kv_heads, (size_t)self->width, (int)self->gated, self->epsilon,
               mixed.data, queries.data, keys.data, NULL};
    size_t all = h.heads + 2 * h.kv_heads;
    if (mixed.rank != 3 || mixed.sizes[2] != (all + (h.gated ? h.heads : 0)) * h.width ||
        (queries.data && queries.elements != h.width) || (keys.data && keys.elements != h.width))
        return failure(api, "SplitHeads does not have the heads of its input");
    TRY(output(api, context, mixed.sizes[1], all * h.width, &h.out));
    return for_rows(api, context, split_heads, mixed.sizes[1], &h);
}

static Status *run_gate_heads(void *kernel, Context *context) {
    const HeadsKernel *self = kernel;
    Api api = self->api;
    Input x, mixed;
    TRY(read_input(api, context, 0, &x));
    TRY(read_input(api, context, 1, &mixed));
    Gates g = {(size_t)self->heads, (size_t)self->width, mixed.sizes[2], x.data, mixed.data, NULL};
    if (x.rank != 3 || mixed.rank != 3 || x.sizes[1] != mixed.sizes[1] || x.sizes[2] != g.heads * g.width || mixed.sizes[2] < 2 * x.sizes[2])
        return failure(api, "GateHeads does not have the heads of its input");
    TRY(output(api, context, x.sizes[1], x.sizes[2], &g.out));
    return for_rows(api, context, gate_row, x.sizes[1], &g);
}

static const int PLAIN_INPUTS[] = {FLOAT, FLOAT, UINT8}, PLAIN_ROWS_INPUTS[] = {INT64, UINT8};
static const int EXPERTS_INPUTS[] = {FLOAT, FLOAT, FLOAT, UINT8, UINT8, UINT8, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT};
static const int HEADS_INPUTS[] = {FLOAT, FLOAT, FLOAT}, GATES_INPUTS[] = {FLOAT, FLOAT};

/* HeadsMatMul: x [1, rows, heads * given], a table of bytes [heads * height, bytes a row] -> [1, rows, heads * height]:
 * `width` numbers of every head, after the first `skipped`, with the matrix of that head. */

typedef struct {
    Api api;
    int64_t heads, type, width, skipped;
} HeadsMatMul;

static Status *make_heads_matmul(Api api, const KernelInfo *info, void **out) {
    HeadsMatMul made = {.api = api};
    TRY(attribute_int(api, info, "heads", &made.heads));
    TRY(attribute_int(api, info, "type", &made.type));
    TRY(attribute_int(api, info, "width", &made.width));
    TRY(attribute_int(api, info, "skipped", &made.skipped));
    if (made.heads <= 0 || made.width <= 0 || made.skipped < 0 || (!is_plain(made.type) && !format_of(made.type)))
        return failure(api, "HeadsMatMul cannot multiply these heads");
    return keep_kernel(api, &made, sizeof made, out);
}

static Status *run_heads_matmul(void *kernel, Context *context) {
    const HeadsMatMul *self = kernel;
    Api api = self->api;
    Input x, table;
    TRY(read_input(api, context, 0, &x));
    TRY(read_input(api, context, 1, &table));
    HeadProducts p = {.heads = (size_t)self->heads, .width = (size_t)self->width, .skipped = (size_t)self->skipped, .x = x.data};
    if (x.rank != 3 || table.rank != 2 || x.sizes[2] % p.heads || table.sizes[0] % p.heads)
        return failure(api, "HeadsMatMul does not have a matrix for every head");
    p.rows = x.sizes[1], p.given = x.sizes[2] / p.heads, p.height = table.sizes[0] / p.heads;
    if (p.skipped + p.width > p.given || p.height < LANES) return failure(api, "the heads of HeadsMatMul are too small");
    TRY(read_table(api, context, 1, self->type, table.sizes[0], p.width, &p.table));
    TRY(output(api, context, p.rows, p.heads * p.height, &p.out));
    if (!p.rows) return NULL;
    size_t count = p.heads * p.rows;
    int asked[2] = {p.table.format && !is_large(p.table.format), p.table.format && is_large(p.table.format)};
    p.gathered = malloc(count * (p.width * sizeof *p.gathered + 1));
    if (!p.gathered) return failure(api, "no memory for heads");
    Status *failed = for_rows(api, context, gather_head, count, &p);
    p.in = (RoundedRows){.x = p.gathered, .rows = count, .width = p.width};
    if (!failed && !plan_rounding(&p.in, asked, count, (uint8_t *)(p.gathered + count * p.width)))
        failed = failure(api, "no memory for heads");
    if (!failed) failed = for_rows(api, context, round_planned, count, &p.in);
    p.strips = (p.height + LANES - 1) / LANES, p.run = LEAST_TASK / (p.table.stride * LANES) + 1;
    if (!failed) failed = in_parallel(api, context, multiply_head, p.heads * ((p.strips + p.run - 1) / p.run), &p);
    free_rounding(&p.in), free(p.gathered);
    return failed;
}

/* JoinLatent: queries [1, rows, heads * (unrotated + rotated)], the same in the size of latents [1, rows, heads * rank],
 * latents and rotated keys [1, rows, rank + rotated], the norm of latents [rank] -> [1, rows, (heads + 2) * (rotated +
 * rank)]: queries, one key and one value, which is zero where keys are rotated. */

typedef struct {
    Api api;
    int64_t heads, rank, unrotated, rotated, interleaved;
    float epsilon;
} JoinLatent;

static Status *make_join_latent(Api api, const KernelInfo *info, void **out) {
    JoinLatent made = {.api = api};
    TRY(attribute_int(api, info, "heads", &made.heads));
    TRY(attribute_int(api, info, "rank", &made.rank));
    TRY(attribute_int(api, info, "unrotated", &made.unrotated));
    TRY(attribute_int(api, info, "rotated", &made.rotated));
    TRY(attribute_int(api, info, "interleaved", &made.interleaved));
    TRY(attribute_float(api, info, "epsilon", &made.epsilon));
    if (made.heads <= 0 || made.rank <= 0 || made.unrotated <= 0 || made.rotated <= 0 || made.rotated % 2)
        return failure(api, "these are no heads");
    return keep_kernel(api, &made, sizeof made, out);
}

static Status *run_join_latent(void *kernel, Context *context) {
    const JoinLatent *self = kernel;
    Api api = self->api;
    Input in[4];
    for (size_t i = 0; i < 4; i++) TRY(read_input(api, context, i, in + i));
    LatentHeads l = {(size_t)self->heads, (size_t)self->rank, (size_t)self->unrotated, (size_t)self->rotated,
                     (int)self->interleaved, self->epsilon, in[0].data, in[1].data, in[2].data, in[3].data, NULL};
    size_t rows = in[0].rank == 3 ? in[0].sizes[1] : 0, width = l.rank + l.rotated;
    if (in[0].rank != 3 || in[0].elements != rows * l.heads * (l.unrotated + l.rotated) || in[3].elements != l.rank ||
        in[1].elements != rows * l.heads * l.rank || in[2].elements != rows * width)
        return failure(api, "an input of JoinLatent does not have the size of its heads");
    TRY(output(api, context, rows, (l.heads + 2) * width, &l.out));
    return for_rows(api, context, join_latent, rows, &l);
}

static const int HEADS_MATMUL_INPUTS[] = {FLOAT, UINT8}, LATENT_INPUTS[] = {FLOAT, FLOAT, FLOAT, FLOAT};

/* DeltaNet: mixed [1, rows, ...], convolution [channels, kernel], decay, step bias [value heads], norm [value size],
 * state and its copy (changed in place), log [rows, channels + 2 * value heads], control [4]: rows of the log to repeat
 * after restoring the copy, or -1; rows after which to copy the state, or -1; where in the log rows are written, or -1;
 * and unused -> [1, rows, values]. */

typedef struct {
    Api api;
    int64_t key_heads, value_heads, key_size, value_size, kernel, tiled;
    float epsilon;
} DeltaKernel;

static Status *make_delta(Api api, const KernelInfo *info, void **out) {
    DeltaKernel made = {.api = api};
    TRY(attribute_int(api, info, "key_heads", &made.key_heads));
    TRY(attribute_int(api, info, "value_heads", &made.value_heads));
    TRY(attribute_int(api, info, "key_size", &made.key_size));
    TRY(attribute_int(api, info, "value_size", &made.value_size));
    TRY(attribute_int(api, info, "kernel", &made.kernel));
    TRY(attribute_int(api, info, "tiled", &made.tiled));
    TRY(attribute_float(api, info, "epsilon", &made.epsilon));
    if (made.key_heads <= 0 || made.value_heads % made.key_heads || made.key_size <= 0 || made.value_size <= 0 ||
        made.value_size % LANES || made.kernel < 2)
        return failure(api, "these heads of a delta net cannot be computed");
    return keep_kernel(api, &made, sizeof made, out);
}

static Status *compute_delta(DeltaNet *d, Api api, Context *context) {
    size_t held = (d->kernel - 1) * d->channels + d->value_heads * d->key_size * d->value_size;
    if (d->repeated != (size_t)-1) memcpy(d->state, d->copy, held * sizeof *d->state);
    else d->repeated = 0;
    d->all = d->repeated + d->rows;
    size_t pointers = d->kernel - 1 + 2 * d->all;
    char *memory = malloc(pointers * sizeof *d->inputs + d->all * (d->channels + 2 * d->value_heads) * sizeof(float));
    if (!memory) return failure(api, "no memory for a delta net");
    d->inputs = (const float **)memory;
    d->steps = d->inputs + d->kernel - 1 + d->all;
    d->mixed_in = (float *)(memory + pointers * sizeof *d->inputs);
    d->factors = d->mixed_in + d->all * d->channels;
    delta_inputs(d);
    Status *failed = for_rows(api, context, delta_row, d->all, d);
    if (!failed) failed = in_parallel(api, context, delta_task, d->value_heads * delta_parts(d), d);
    if (!failed) failed = for_rows(api, context, delta_gate, d->rows, d);
    if (!failed) { /* the log last: rows that are remembered may lie in it */
        if (d->mark >= 0) remember_inputs(d, d->repeated + (size_t)d->mark, d->copy);
        remember_inputs(d, d->all, d->state);
        if (d->mark >= 0) log_inputs(d, d->repeated + (size_t)d->mark, 0);
        else if (d->log_at != (size_t)-1) log_inputs(d, d->repeated, d->log_at);
    }
    free(memory);
    return failed;
}

static Status *run_delta(void *kernel, Context *context) {
    const DeltaKernel *self = kernel;
    Api api = self->api;
    Input in[9];
    for (size_t i = 0; i < 9; i++) TRY(read_input(api, context, i, in + i));
    DeltaNet d = {.key_heads = (size_t)self->key_heads, .value_heads = (size_t)self->value_heads,
                  .key_size = (size_t)self->key_size, .value_size = (size_t)self->value_size, .kernel = (size_t)self->kernel,
                  .tiled = (int)self->tiled, .epsilon = self->epsilon, .mixed = in[0].data, .convolution = in[1].data,
                  .decay = in[2].data, .step_bias = in[3].data, .norm = in[4].data, .state = in[5].data,
                  .copy = in[6].data, .log = in[7].data};
    d.channels = 2 * d.key_heads * d.key_size + delta_values(&d);
    size_t held = (d.kernel - 1) * d.channels + d.value_heads * d.key_size * d.value_size;
    if (in[0].rank != 3 || in[0].sizes[2] != d.channels + delta_values(&d) + 2 * d.value_heads ||
        in[1].elements != d.channels * d.kernel || in[2].elements != d.value_heads || in[3].elements != d.value_heads ||
        in[4].elements != d.value_size || in[5].elements != held || in[6].elements != held || in[7].rank != 2 ||
        in[7].sizes[1] != delta_logged(&d) || in[8].elements != 4)
        return failure(api, "an input of DeltaNet does not have the size of its heads");
    const int64_t *control = in[8].data;
    int64_t room = (int64_t)in[7].sizes[0], rows = (int64_t)in[0].sizes[1];
    if (control[0] > room || (control[1] >= 0 && control[1] >= rows) || (control[1] >= 0 && rows - control[1] > room) ||
        (control[1] < 0 && control[2] >= 0 && control[2] + rows > room))
        return failure(api, "DeltaNet was asked for rows outside of its log");
    d.rows = (size_t)rows, d.repeated = control[0] < 0 ? (size_t)-1 : (size_t)control[0], d.mark = (long)control[1];
    d.log_at = control[2] < 0 ? (size_t)-1 : (size_t)control[2];
    TRY(output(api, context, d.rows, delta_values(&d), &d.out));
    return compute_delta(&d, api, context);
}

static const int DELTA_INPUTS[] = {FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT64};
