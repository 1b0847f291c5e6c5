/* Activations, rounded to 8 bits in blocks of 32, each with its own scale.
 *
 * Law: how a row is rounded follows from that row alone. Where a few numbers of a row are so large that rounding
 * would lose the others, what was lost can be rounded too, as a second row. Knows nothing of weights but how the
 * terms of a block join a total.
 */
#pragma once
#include "formats.h"

/* How large the error of rounding may be, compared with what is small in a row: with its numbers, each counted as
 * no more than a sixteenth of the largest of its block. Normally distributed numbers have 0.0014; the first token
 * of a text, on whose few huge activations all attention rests, has 0.04 and loses everything else. */
static const float MOST_LOSS = 0.01f;

typedef struct {
    size_t rows, width, blocks;
    int8_t *codes;   /* [rows][width] */
    float *scales;   /* [rows][blocks] */
    float *sums;     /* [rows][blocks]: what the codes of a block sum up to, scaled */
    int32_t *counts; /* [rows][2 * blocks]: NOTHING, less 32 times what the codes of each half block sum up to */
} Activations;

INLINE size_t activations_bytes(size_t rows, size_t width) { return rows * (width + width / BLOCK * 16 + 64); }

INLINE Activations activations_in(void *memory, size_t rows, size_t width) {
    Activations a = {.rows = rows, .width = width, .blocks = width / BLOCK};
    a.scales = memory;
    a.sums = a.scales + rows * a.blocks;
    a.counts = (int32_t *)(a.sums + rows * a.blocks);
    a.codes = (int8_t *)(a.counts + rows * a.blocks * 2);
    return a;
}

/* Whether rounding this row would lose too much. */
static int is_uneven(const float *x, size_t width) {
    floats small = same(0);
    float error = 0;
    for (size_t block = 0; block < width / BLOCK; block++, x += BLOCK) {
        floats most = same(0);
        for (int i = 0; i < BLOCK; i += LANES) most = greater(most, magnitude(floats_at(x + i)));
        float largest = greatest(most);
        for (int i = 0; i < BLOCK; i += LANES) {
            floats each = less(magnitude(floats_at(x + i)), same(largest / 16));
            small = times_plus(each, each, small);
        }
        error += largest * largest * (BLOCK / (12.0f * 127.0f * 127.0f));
    }
    return error > MOST_LOSS * sum(small);
}

/* What rounding row `row` lost. */
static void residue(const float *x, size_t row, const Activations *a, float *out) {
    const int8_t *codes = a->codes + row * a->width;
    for (size_t i = 0; i < a->width; i++) out[i] = x[i] - (float)codes[i] * a->scales[row * a->blocks + i / BLOCK];
}

static void round_row(const float *x, size_t row, const Activations *a) {
    int8_t *codes = a->codes + row * a->width;
    for (size_t block = 0; block < a->blocks; block++, x += BLOCK, codes += BLOCK) {
        floats most = magnitude(floats_at(x));
        for (int i = LANES; i < BLOCK; i += LANES) most = greater(most, magnitude(floats_at(x + i)));
        float scale = greatest(most) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
        int32_t half[2] = {0, 0};
        for (int i = 0; i < BLOCK; i += LANES) {
            ints rounded = nearest(times(floats_at(x + i), same(inverse)));
            put_bytes(codes + i, rounded);
            half[i / 16] -= sum_ints(rounded);
        }
        a->scales[row * a->blocks + block] = scale;
        a->sums[row * a->blocks + block] = -scale * (float)(half[0] + half[1]);
        int32_t *counts = a->counts + (row * a->blocks + block) * 2;
        counts[0] = NOTHING + 32 * half[0], counts[1] = NOTHING + 32 * half[1];
    }
}

/* Where the rows of activations that meet a unit lie. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *counts;
    size_t width, blocks;
} Slice;

INLINE Slice slice_of(const Activations *a, size_t row, size_t unit) {
    size_t at = row * a->blocks + unit * BLOCKS;
    return (Slice){a->codes + row * a->width + unit * UNIT, a->scales + at, a->sums + at, a->counts + 2 * at,
                   a->width, a->blocks};
}

/* How many blocks of a row lie in this unit. */
INLINE int blocks_in(size_t width, size_t unit) {
    size_t left_over = (width - unit * UNIT) / BLOCK;
    return left_over < BLOCKS ? (int)left_over : BLOCKS;
}

/* Fetch a part of what lies behind these weights while one of their units is met: it comes next, and LANES streams
 * at once are more than a processor foresees. */
INLINE void fetch_ahead(Rows weights, size_t width, size_t unit) {
    size_t portion = LANES * weights.stride * UNIT / width;
    const uint8_t *next = weights.at + LANES * weights.stride + unit * portion;
    for (size_t byte = 0; byte < portion; byte += 64) __builtin_prefetch(next + byte, 0, FETCHED);
}

/* What the products of one half block, or block, start with where the zero of the codes is 2 to the power `zero`. */
INLINE int32_t start_of(const int32_t *counts, int half, const int zero, const int halves) {
    if (zero < 0) return NOTHING;
    if (halves == 2 && zero == 5) return counts[half];
    return NOTHING + ((counts[0] - NOTHING) + (counts[1] - NOTHING)) / 32 * (1 << zero);
}

/* The terms of one half block, or block, join the total: this line alone defines what a product is. */
INLINE floats joined(floats total, ints products, floats weight_scale, float scale) {
    return times_plus(floats_of_sums(products), times(weight_scale, same(scale)), total);
}
