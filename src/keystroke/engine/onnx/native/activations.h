/* Quantises activations to 8 bits in blocks of 32, each with its own scale.
 *
 * The codes of a row depend on that row alone. If a few values of a row are so large that the others would lose
 * their precision, the rounding error is quantised as a second row. For formats of 256 weights the scale of a block
 * is a small integer (its share) times the scale of its unit, so that the sum of a unit is an integer. There the
 * absolute codes of half a block sum up to at most MOST_HALF, so that their products with weight codes fit 16 bits.
 */
#pragma once
#include "formats.h"

/* The largest rounding error relative to the values of a row, each limited to a sixteenth of the largest of its
 * block. Normally distributed values have 0.0014; the first token of a text has a few huge activations (an attention
 * sink) and an error of 0.04. */
static const float MOST_LOSS = 0.01f;
/* Codes of weights are at most 32 from their middle, and those of Q4_K, of which a sum has 32, at most 15. */
enum { MOST_HALF = 1023, MOST_SHARE = 15 };

typedef struct {
    size_t rows, width, blocks;
    int in_units;    /* whether blocks have shares */
    int8_t *codes;   /* [rows][width] */
    float *scales;   /* [rows][blocks] */
    float *sums;     /* [rows][blocks]: what the codes of a block sum up to, scaled */
    int32_t *counts; /* [rows][2 * blocks]: NOTHING, less 32 times what the codes of each half block sum up to */
    float *units;    /* [rows][units]: the scales of units */
    int8_t *shares;  /* [rows][units][SHARES] */
    int8_t *split;   /* [rows][units][16]: the sums of blocks times their shares, modulo 256, then in 256s */
} Activations;

INLINE size_t activations_bytes(size_t rows, size_t width) {
    return rows * (width + width / BLOCK * 16 + (width / UNIT + 1) * (4 + SHARES + 16)) + 64;
}

INLINE Activations activations_in(void *memory, size_t rows, size_t width, int in_units) {
    Activations a = {.rows = rows, .width = width, .blocks = width / BLOCK, .in_units = in_units};
    size_t units = width / UNIT;
    a.scales = memory;
    a.sums = a.scales + rows * a.blocks;
    a.counts = (int32_t *)(a.sums + rows * a.blocks);
    a.units = (float *)(a.counts + rows * a.blocks * 2);
    a.codes = (int8_t *)(a.units + rows * units);
    a.shares = a.codes + rows * width;
    a.split = a.shares + rows * units * SHARES;
    return a;
}

INLINE float largest_of(const float *x, size_t count) {
    floats most = magnitude(floats_at(x));
    for (size_t i = LANES; i < count; i += LANES) most = greater(most, magnitude(floats_at(x + i)));
    return greatest(most);
}

/* Whether the rounding error of this row is too large. */
static int is_uneven(const float *x, size_t width, int in_units) {
    floats small = same(0);
    float error = 0, least = 0;
    for (size_t at = 0; at < width; at += BLOCK, x += BLOCK) {
        if (in_units && at % UNIT == 0) least = largest_of(x, UNIT) / MOST_SHARE;
        float largest = largest_of(x, BLOCK), rounded = largest > least ? largest : least;
        for (int i = 0; i < BLOCK; i += LANES) {
            floats each = less(magnitude(floats_at(x + i)), same(largest / 16));
            small = times_plus(each, each, small);
        }
        error += rounded * rounded * (BLOCK / (12.0f * 127.0f * 127.0f));
    }
    return error > MOST_LOSS * sum(small);
}

/* The rounding error of row `row`. */
static void residue(const float *x, size_t row, const Activations *a, float *out) {
    const int8_t *codes = a->codes + row * a->width;
    for (size_t i = 0; i < a->width; i++) out[i] = x[i] - (float)codes[i] * a->scales[row * a->blocks + i / BLOCK];
}

/* Quantises block `at` of all rows, with the values `x`; returns the sum of its codes. */
INLINE int32_t round_block(const float *x, size_t at, float scale, const Activations *a) {
    float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int8_t *codes = a->codes + at * BLOCK;
    int32_t count = 0;
    for (size_t half = 0; half < 2; half++) {
        ints rounded[16 / LANES], total = same_int(0);
        for (int i = 0; i < 16 / LANES; i++) {
            rounded[i] = nearest(times(floats_at(x + i * LANES), same(inverse)));
            total = plus(total, rounded[i]);
        }
        put_16_bytes(codes, rounded);
        x += 16, codes += 16;
        int32_t of_half = sum_ints(total);
        a->counts[2 * at + half] = NOTHING - 32 * of_half;
        count += of_half;
    }
    a->scales[at] = scale, a->sums[at] = scale * (float)count;
    return count;
}

static void round_unit(const float *x, size_t unit, const Activations *a) {
    float scales[BLOCKS], most = 0;
    for (size_t block = 0; block < BLOCKS; block++) {
        const float *first = x + block * BLOCK;
        float scale = largest_of(first, BLOCK) / 127.0f;
        for (int i = 0; i < BLOCK; i += 16) { /* any of 16 may be rounded up by half of one */
            float heavy = weight_of_16(first + i) / (MOST_HALF - 9);
            scale = heavy > scale ? heavy : scale;
        }
        scales[block] = scale;
        most = scale > most ? scale : most;
    }
    float of_unit = most / MOST_SHARE;
    int8_t shares[BLOCKS], *split = a->split + unit * 16;
    for (size_t block = 0; block < BLOCKS; block++) {
        float share = of_unit > 0 ? ceilf(scales[block] / of_unit) : 1;
        share = share < 1 ? 1 : share < MOST_SHARE ? share : MOST_SHARE; /* what is no number is MOST_SHARE */
        shares[block] = (int8_t)share;
        int32_t count = round_block(x + block * BLOCK, unit * BLOCKS + block, of_unit * share, a) * shares[block];
        int32_t upper = (count + 128) >> 8;
        split[block] = (int8_t)(count - 256 * upper), split[BLOCKS + block] = (int8_t)upper;
    }
    a->units[unit] = of_unit;
    put_shares(a->shares + unit * SHARES, shares);
}

static void round_row(const float *x, size_t row, const Activations *a) {
    if (a->in_units) {
        size_t units = a->width / UNIT;
        for (size_t unit = 0; unit < units; unit++) round_unit(x + unit * UNIT, row * units + unit, a);
        return;
    }
    for (size_t block = 0; block < a->blocks; block++)
        round_block(x + block * BLOCK, row * a->blocks + block, largest_of(x + block * BLOCK, BLOCK) / 127.0f, a);
}

/* The rows of activations that are multiplied with a unit. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *counts;
    size_t width, blocks;
    const float *unit;            /* what follows is of formats of 256 weights */
    const int8_t *shares, *split;
    size_t units;
} Slice;

INLINE Slice slice_of(const Activations *a, size_t row, size_t unit) {
    size_t at = row * a->blocks + unit * BLOCKS, units = a->width / UNIT, here = row * units + unit;
    return (Slice){a->codes + row * a->width + unit * UNIT, a->scales + at, a->sums + at, a->counts + 2 * at,
                   a->width, a->blocks, a->units + here, a->shares + here * SHARES, a->split + here * 16, units};
}

/* The number of blocks of a row in this unit. */
INLINE int blocks_in(size_t width, size_t unit) {
    size_t left_over = (width - unit * UNIT) / BLOCK;
    return left_over < BLOCKS ? (int)left_over : BLOCKS;
}

enum { LEAST_AHEAD = 12 << 10 }; /* bytes: memory answers late */

/* Prefetches a part of the next weights while a unit is processed: the hardware does not prefetch LANES streams at
 * once. `step` of `steps`: prefetching all at once may exceed the outstanding loads. */
INLINE void fetch_ahead(Rows weights, size_t unit, const size_t unit_bytes, const size_t step, const size_t steps) {
    const size_t portion = LANES * unit_bytes, strip = LANES * weights.stride;
    const uint8_t *next = weights.at + (strip > LEAST_AHEAD ? strip : LEAST_AHEAD) + unit * portion;
    for (size_t byte = 64 * step; byte < portion; byte += 64 * steps) __builtin_prefetch(next + byte, 0, FETCHED);
}

/* The initial sum of the products of a block or half block, whose codes have the zero 2 to the power `zero`. */
INLINE int32_t start_of(const int32_t *counts, int half, const int zero, const int halves) {
    if (zero < 0) return NOTHING;
    if (halves == 2) return NOTHING + (counts[half] - NOTHING) / 32 * (1 << zero);
    return NOTHING + ((counts[0] - NOTHING) + (counts[1] - NOTHING)) / 32 * (1 << zero);
}

/* Adds the terms of a block or half block to the total. For formats of 32 weights this line alone defines the
 * result. */
INLINE floats joined(floats total, ints products, floats weight_scale, float scale) {
    return times_plus(floats_of_sums(products), times(weight_scale, same(scale)), total);
}

/* Adds the terms of a unit to the total; its sums and minima are exact integers. For formats of 256 weights this line
 * alone defines the result. */
INLINE floats joined_unit(floats total, ints products, floats factor, float scale) {
    return times_plus(floats_of(products), times(factor, same(scale)), total);
}
