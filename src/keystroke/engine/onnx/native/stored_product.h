/* Products of rows with one to three stored matrices that share their activations, divided between threads. */
#pragma once
#include "product.h"
#include "threads.h"

enum { MOST_PARTS = 3, LEAST_TASK = 1 << 15 }; /* bytes of weights: a task has its price */

typedef struct {
    const Format *format;
    const uint8_t *at;
    size_t height, stride, column; /* `column`: where its results begin in a row of the output */
} Part;

/* The parts, sizes, `x`, `bias` (or NULL) and `out` are given; `run_product` sets the rest. With `gated`, there are two
 * parts: silu(first) * second. */
typedef struct {
    Part parts[MOST_PARTS];
    size_t count, strips, run, width, stride; /* `strips` of LANES rows of weights; `run`: one task's; `stride` of the output */
    const float *x, *bias;
    float *out;
    int gated, asked[2]; /* `asked`: whether activations are rounded in blocks, in units */
    size_t rows, *places; /* where each row begins among the rounded ones: an uneven one takes two */
    float *residues;      /* what the first of two lost */
    Activations rounded[2]; /* as `asked`, or none */
} Product;

INLINE int is_double(const Product *p, size_t row) { return p->places[row + 1] - p->places[row] == 2; }

static void round_rows(void *data, size_t row) {
    const Product *p = data;
    const float *x = p->x + row * p->width;
    size_t place = p->places[row];
    for (const Activations *a = p->rounded; a < p->rounded + 2; a++) {
        if (!a->rows) continue;
        round_row(x, place, a);
        if (!is_double(p, row)) continue;
        float *lost = p->residues + (place - row) * p->width; /* as many doubles lie before it */
        residue(x, place, a, lost);
        round_row(lost, place + 1, a);
    }
}

INLINE const Activations *rounded_for(const Product *p, const Part *part) { return p->rounded + is_large(part->format); }

INLINE Rows strip_of(const Part *part, size_t first) {
    return (Rows){part->at + first * part->stride, part->stride};
}

/* The first row of strip `i` of a part. If the height is not a multiple of LANES, the last strip overlaps the one
 * before; both compute the same result. */
INLINE size_t strip_start(const Part *part, size_t i) {
    return i * LANES + LANES <= part->height ? i * LANES : part->height - LANES;
}

static void multiply_strip(const Product *p, size_t strip) {
    size_t index = 0;
    while (index + 1 < p->count && strip >= (p->parts[index].height + LANES - 1) / LANES && !p->gated) {
        strip -= (p->parts[index].height + LANES - 1) / LANES;
        index++;
    }
    const Part *part = p->parts + index;
    size_t first = strip_start(part, strip);
    float total[MOST_ROWS][LANES] __attribute__((aligned(64))), other[MOST_ROWS][LANES] __attribute__((aligned(64)));
    for (size_t row = 0, end; row < p->rows; row = end) {
        size_t place = p->places[row];
        for (end = row + 1; end < p->rows && p->places[end + 1] - place <= MOST_ROWS; end++) continue;
        size_t rounded = p->places[end] - place;
        multiply(part->format, strip_of(part, first), rounded_for(p, part), place, rounded, total);
        if (p->gated) {
            const Part *second = p->parts + 1;
            multiply(second->format, strip_of(second, first), rounded_for(p, second), place, rounded, other);
        }
        for (size_t r = row; r < end; r++) {
            size_t at = p->places[r] - place;
            floats y = floats_at(total[at]);
            if (is_double(p, r)) y = add(y, floats_at(total[at + 1]));
            if (p->bias) y = add(y, floats_at(p->bias + part->column + first));
            if (p->gated) {
                floats up = floats_at(other[at]);
                if (is_double(p, r)) up = add(up, floats_at(other[at + 1]));
                if (p->bias) up = add(up, floats_at(p->bias + p->parts[1].column + first));
                y = times(over(y, add(same(1), exponential(minus(same(0), y)))), up);
            }
            put_floats(p->out + r * p->stride + (p->gated ? 0 : part->column) + first, y);
        }
    }
}

static void multiply_task(void *data, size_t task) {
    const Product *p = data;
    for (size_t strip = task * p->run; strip < p->strips && strip < (task + 1) * p->run; strip++) multiply_strip(p, strip);
}

/* How many rounded rows a row takes. */
static void count_rows(void *data, size_t row) {
    const Product *p = data;
    const float *x = p->x + row * p->width;
    int uneven = (p->asked[0] && is_uneven(x, p->width, 0)) || (p->asked[1] && is_uneven(x, p->width, 1));
    p->places[row + 1] = 1 + (size_t)uneven;
}

/* Returns 0, or 1 without memory. */
static int run_product(Product *p, Threads *threads) {
    if (!p->rows) return 0;
    p->strips = 0;
    for (size_t i = 0; i < (p->gated ? 1 : p->count); i++) p->strips += (p->parts[i].height + LANES - 1) / LANES;
    p->run = LEAST_TASK / (p->parts[0].stride * LANES) + 1;
    p->places = malloc((p->rows + 1) * sizeof *p->places);
    if (!p->places) return 1;
    p->places[0] = 0;
    int *asked = p->asked;
    for (size_t i = 0; i < p->count; i++) asked[is_large(p->parts[i].format)] = 1;
    for_each_row(threads, count_rows, p->rows, p);
    for (size_t r = 0; r < p->rows; r++) p->places[r + 1] += p->places[r];
    size_t rounded = p->places[p->rows], each = (activations_bytes(rounded, p->width) + 63) / 64 * 64;
    void *memory = malloc(each * (size_t)(asked[0] + asked[1]) + (rounded - p->rows) * p->width * sizeof(float));
    if (memory) {
        p->residues = memory;
        char *place = (char *)(p->residues + (rounded - p->rows) * p->width);
        if (asked[0]) p->rounded[0] = activations_in(place, rounded, p->width, 0);
        if (asked[1]) p->rounded[1] = activations_in(place + (asked[0] ? each : 0), rounded, p->width, 1);
        for_each_row(threads, round_rows, p->rows, p);
        for_tasks(threads, multiply_task, (p->strips + p->run - 1) / p->run, p);
    }
    free(memory), free(p->places);
    return !memory;
}
