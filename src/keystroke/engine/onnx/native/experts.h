/* A mixture of experts: each row uses the best of many small feed-forward networks.
 *
 * Rows are grouped by expert, so that an expert's weights are read once for all rows that use it, and experts that no
 * row uses are not read at all. A row's result is the sum over its experts in the order of their scores, and each
 * product is that of product.h or float_rows.h: it does not depend on other rows.
 */
#pragma once
#include "float_rows.h"
#include "product.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* A table of weights of any storage type. */
typedef struct {
    int64_t type;
    const Format *format; /* NULL: plain numbers */
    const uint8_t *at;
    size_t stride; /* bytes of a row */
} Table;

/* Rows of activations, rounded for the tables that they are multiplied with. Row i is row `source[i]` of x, or row i. */
typedef struct {
    const float *x;
    const uint32_t *source;
    size_t rows, width;
    size_t *places; /* where each row begins among the rounded ones: an uneven one takes two */
    float *residues;
    Activations rounded[2]; /* in blocks, in units */
    void *memory;
} RoundedRows;

INLINE const float *row_of(const RoundedRows *r, size_t row) { return r->x + (r->source ? r->source[row] : row) * r->width; }
INLINE int takes_two(const RoundedRows *r, size_t row) { return r->places[row + 1] - r->places[row] == 2; }

/* Allocates; returns 0 if there is no memory. `asked`: whether tables want blocks, and units. `uneven`: one flag for
 * each row of x, filled if there are sources. */
static int plan_rounding(RoundedRows *r, const int asked[2], size_t sources, uint8_t *uneven) {
    r->places = malloc((r->rows + 1) * sizeof *r->places);
    if (!r->places) return 0;
    for (size_t i = 0; i < sources; i++) {
        const float *x = r->x + i * r->width;
        uneven[i] = (asked[0] && is_uneven(x, r->width, 0)) || (asked[1] && is_uneven(x, r->width, 1));
    }
    r->places[0] = 0;
    for (size_t i = 0; i < r->rows; i++) r->places[i + 1] = r->places[i] + 1 + uneven[r->source ? r->source[i] : i];
    size_t rounded = r->places[r->rows], each = (activations_bytes(rounded, r->width) + 63) / 64 * 64;
    size_t lost = (rounded - r->rows) * r->width * sizeof(float);
    r->memory = malloc(each * (size_t)(asked[0] + asked[1]) + lost + 64);
    if (!r->memory) return 0;
    r->residues = r->memory;
    char *place = (char *)r->memory + lost;
    if (asked[0]) r->rounded[0] = activations_in(place, rounded, r->width, 0);
    if (asked[1]) r->rounded[1] = activations_in(place + (asked[0] ? each : 0), rounded, r->width, 1);
    return 1;
}

static void free_rounding(RoundedRows *r) { free(r->places), free(r->memory); }

static void round_planned(void *data, size_t row) {
    const RoundedRows *r = data;
    const float *x = row_of(r, row);
    size_t place = r->places[row];
    for (const Activations *a = r->rounded; a < r->rounded + 2; a++) {
        if (!a->rows) continue;
        round_row(x, place, a);
        if (!takes_two(r, row)) continue;
        float *lost = r->residues + (place - row) * r->width;
        residue(x, place, a, lost);
        round_row(lost, place + 1, a);
    }
}

/* The end of the rows from `row` on that are multiplied at once. */
INLINE size_t rows_at_once(const RoundedRows *r, size_t row, size_t end) {
    size_t to = row + 1;
    while (to < end && r->places[to + 1] - r->places[row] <= MOST_ROWS) to++;
    return to;
}

/* total[i] = row `row` + i with LANES rows of a table from `first` on. */
static void multiply_table(const Table *table, size_t first, const RoundedRows *r, size_t row, size_t end,
                           float (*total)[LANES]) {
    if (!table->format) {
        for (size_t lane = 0; lane < LANES; lane++) {
            const uint8_t *weights = table->at + (first + lane) * table->stride;
            for (size_t i = row; i < end; i++)
                dot_rows_plain(table->type, weights, row_of(r, i), 0, r->width, 1, &total[i - row][lane], 1);
        }
        return;
    }
    Rows weights = {table->at + first * table->stride, table->stride};
    size_t place = r->places[row];
    multiply(table->format, weights, r->rounded + is_large(table->format), place, r->places[end] - place, total);
    for (size_t i = row; i < end; i++) { /* in place: sums never lie before their terms */
        floats y = floats_at(total[r->places[i] - place]);
        if (takes_two(r, i)) y = add(y, floats_at(total[r->places[i] - place + 1]));
        put_floats(total[i - row], y);
    }
}

typedef struct {
    size_t rows, hidden, width, count, top;
    int normalised, sigmoid, fused;
    float scale, limit;
    const float *x, *scores, *selection, *shared, *shared_gate; /* the last three may be NULL */
    const float *gate_bias, *up_bias, *down_bias;
    Table gate, up, down;
    float *out;
    /* intermediate results; a pair is a row and one of its experts */
    uint32_t *chosen, *order, *starts, *sources; /* [rows][top] experts; pairs by expert; where an expert's begin; rows */
    float *weights, *middle, *ends;              /* [rows][top]; [pairs][width]; [pairs][hidden] */
    RoundedRows in, between;
    size_t groups, strips, *group_experts; /* the experts in use; strips of one product */
} Experts;

enum { MOST_FETCHED = 1024 }; /* experts; more are read by faults */
enum { CLAMPED_STEEPNESS = 1702 }; /* thousandths: of the gate's sigmoid where gates are clamped */

/* Chooses the experts of a row and their weights. */
static void route(void *data, size_t row) {
    const Experts *e = data;
    const float *scores = e->scores + row * e->count;
    uint32_t *chosen = e->chosen + row * e->top;
    float *weights = e->weights + row * e->top, most = scores[0], total = 0, *values = malloc(2 * e->count * sizeof *values);
    if (!values) abort(); /* a few kilobytes */
    float *by = values + e->count;
    for (size_t i = 1; i < e->count; i++) most = scores[i] > most ? scores[i] : most;
    for (size_t i = 0; i < e->count; i++) {
        values[i] = e->sigmoid ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - most);
        by[i] = (e->sigmoid ? values[i] : scores[i]) + (e->selection ? e->selection[i] : 0);
        total += values[i];
    }
    float sum_of_chosen = 0;
    for (size_t k = 0; k < e->top; k++) {
        size_t best = e->count;
        for (size_t i = 0; i < e->count; i++) {
            if (!isnan(by[i]) && (best == e->count || by[i] > by[best])) best = i;
        }
        if (best == e->count) best = k; /* nothing is a number here, and neither is the result */
        chosen[k] = (uint32_t)best, weights[k] = values[best], by[best] = NAN;
        sum_of_chosen += values[best];
    }
    if (!e->sigmoid && !e->normalised) sum_of_chosen = total;
    if (e->sigmoid && !e->normalised) sum_of_chosen = 1;
    else if (e->sigmoid) sum_of_chosen += 1e-20f;
    for (size_t k = 0; k < e->top; k++) weights[k] = weights[k] / sum_of_chosen * e->scale;
    free(values);
}

#define NO_EXPERT UINT32_MAX /* of a pair that is computed elsewhere */

/* Sorts pairs by expert; returns how many have one here. */
static size_t group_pairs(Experts *e) {
    size_t pairs = e->rows * e->top;
    memset(e->starts, 0, (e->count + 2) * sizeof *e->starts);
    for (size_t p = 0; p < pairs; p++) {
        if (e->chosen[p] != NO_EXPERT) e->starts[e->chosen[p] + 2]++;
    }
    for (size_t i = 0; i < e->count; i++) e->starts[i + 2] += e->starts[i + 1];
    for (size_t p = 0; p < pairs; p++) {
        if (e->chosen[p] == NO_EXPERT) continue;
        uint32_t at = e->starts[e->chosen[p] + 1]++;
        e->order[at] = (uint32_t)p;
        e->sources[at] = (uint32_t)(p / e->top);
    }
    e->groups = 0;
    for (size_t i = 0; i < e->count; i++) {
        if (e->starts[i + 1] > e->starts[i]) e->group_experts[e->groups++] = i;
    }
    return e->starts[e->count];
}

/* Asks the system for weights that are mapped from a file. */
static void fetch_rows(const Table *table, size_t first, size_t rows) {
    uintptr_t at = (uintptr_t)(table->at + first * table->stride), page = (uintptr_t)getpagesize();
    madvise((void *)(at / page * page), rows * table->stride + at % page, MADV_WILLNEED);
}

/* The weights of experts in use that are not in `fetched` [MOST_FETCHED] are asked for at once. A fault would read some of an
 * expert's weights and of its neighbours', and wait for them. */
static void fetch_experts(const Experts *e, uint8_t *fetched) {
    for (size_t group = 0; group < e->groups; group++) {
        size_t expert = e->group_experts[group], height = e->fused ? 2 * e->width : e->width;
        if (expert >= MOST_FETCHED || fetched[expert]) continue;
        fetched[expert] = 1;
        fetch_rows(&e->gate, expert * height, height);
        if (!e->fused) fetch_rows(&e->up, expert * height, height);
        fetch_rows(&e->down, expert * e->hidden, e->hidden);
    }
}

INLINE floats gated(const Experts *e, floats gate, floats up) {
    if (e->limit <= 0) return times(over(gate, add(same(1), exponential(minus(same(0), gate)))), up);
    gate = less(gate, same(e->limit));
    up = greater(less(up, same(e->limit)), same(-e->limit));
    floats steep = times(gate, same(CLAMPED_STEEPNESS / 1000.0f));
    return times(add(up, same(1)), over(gate, add(same(1), exponential(minus(same(0), steep)))));
}

INLINE size_t strip_from(size_t height, size_t strip) {
    return strip * LANES + LANES <= height ? strip * LANES : height - LANES;
}

/* gate and up of one strip of one expert. With a single row all its pairs share place 0. */
static void expert_in(void *data, size_t task) {
    const Experts *e = data;
    size_t expert = e->group_experts[task / e->strips], first = strip_from(e->width, task % e->strips);
    float gate[MOST_ROWS][LANES] __attribute__((aligned(64))), up[MOST_ROWS][LANES] __attribute__((aligned(64)));
    size_t above = expert * e->width, gate_row = (e->fused ? 2 * above : above) + first;
    size_t up_row = (e->fused ? 2 * above + e->width : above) + first;
    size_t from = e->starts[expert], to = e->starts[expert + 1], single = e->rows == 1;
    for (size_t pair = from, end; pair < to; pair = end) {
        size_t row = single ? 0 : pair;
        end = single ? pair + 1 : rows_at_once(&e->in, pair, to);
        multiply_table(&e->gate, gate_row, &e->in, row, row + (end - pair), gate);
        multiply_table(&e->up, up_row, &e->in, row, row + (end - pair), up);
        for (size_t i = 0; i < end - pair; i++) {
            floats g = floats_at(gate[i]), u = floats_at(up[i]);
            if (e->gate_bias) g = add(g, floats_at(e->gate_bias + above + first));
            if (e->up_bias) u = add(u, floats_at(e->up_bias + above + first));
            put_floats(e->middle + (pair + i) * e->width + first, gated(e, g, u));
        }
    }
}

static void expert_out(void *data, size_t task) {
    const Experts *e = data;
    size_t expert = e->group_experts[task / e->strips], first = strip_from(e->hidden, task % e->strips);
    float total[MOST_ROWS][LANES] __attribute__((aligned(64)));
    size_t above = expert * e->hidden, to = e->starts[expert + 1];
    for (size_t pair = e->starts[expert], end; pair < to; pair = end) {
        end = rows_at_once(&e->between, pair, to);
        multiply_table(&e->down, above + first, &e->between, pair, end, total);
        for (size_t i = 0; i < end - pair; i++) {
            floats y = floats_at(total[i]);
            if (e->down_bias) y = add(y, floats_at(e->down_bias + above + first));
            put_floats(e->ends + (size_t)e->order[pair + i] * e->hidden + first, y);
        }
    }
}

/* The weighted sum of a row's experts. */
static void combine_experts(void *data, size_t row) {
    const Experts *e = data;
    float *out = e->out + row * e->hidden;
    const float *ends = e->ends + row * e->top * e->hidden, *weights = e->weights + row * e->top;
    float share = e->shared_gate ? 1.0f / (1.0f + expf(-e->shared_gate[row])) : 1.0f;
    size_t i = 0;
    for (; i + LANES <= e->hidden; i += LANES) {
        floats total = same(0);
        for (size_t k = 0; k < e->top; k++)
            total = times_plus(same(weights[k]), floats_at(ends + k * e->hidden + i), total);
        if (e->shared) total = times_plus(same(share), floats_at(e->shared + row * e->hidden + i), total);
        put_floats(out + i, total);
    }
    for (; i < e->hidden; i++) {
        float total = 0;
        for (size_t k = 0; k < e->top; k++) total = fmaf(weights[k], ends[k * e->hidden + i], total);
        out[i] = e->shared ? fmaf(share, e->shared[row * e->hidden + i], total) : total;
    }
}
