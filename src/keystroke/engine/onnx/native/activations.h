/* Activations, rounded to 8 bits in groups that share a scale: a block of 32, or for formats of 256 weights a unit.
 *
 * Law: how a row is rounded follows from that row alone. Where a few numbers of a row are so large that rounding
 * would lose the others, what was lost can be rounded too, as a second row. In a unit the codes of half a block sum
 * up to no more than MOST_HALF, all taken as positive, so that 16 bits hold what they and the codes of weights make:
 * should they be heavier, a larger scale makes them lighter. Knows nothing of weights but how the terms of a block
 * or a unit join a total.
 */
#pragma once
#include "formats.h"

/* How large the error of rounding may be, compared with what is small in a row: with its numbers, each counted as
 * no more than a sixteenth of the largest of its group. Normally distributed numbers have 0.0014; the first token
 * of a text, on whose few huge activations all attention rests, has 0.04 and loses everything else. */
static const float MOST_LOSS = 0.01f;
/* Codes of weights are at most 32 from their middle, and those of Q4_K, of which a sum has 32, at most 15. */
static const float MOST_HALF = 1023, LIGHTER_HALF = 1000; /* rounded anew, a few may be rounded up */

typedef struct {
    size_t rows, width, blocks, group; /* `group`: blocks that share a scale */
    int8_t *codes;   /* [rows][width] */
    float *scales;   /* [rows][blocks] */
    float *sums;     /* [rows][blocks]: what the codes of a block sum up to, scaled */
    int32_t *counts; /* [rows][2 * blocks]: NOTHING, less 32 times what the codes of each half block sum up to */
    int8_t *split;   /* [rows][2 * blocks]: for each unit what its blocks sum up to, modulo 128, then in 128s */
} Activations;

INLINE size_t activations_bytes(size_t rows, size_t width) { return rows * (width + width / BLOCK * 18 + 64); }

INLINE Activations activations_in(void *memory, size_t rows, size_t width, size_t group) {
    Activations a = {.rows = rows, .width = width, .blocks = width / BLOCK, .group = group};
    a.scales = memory;
    a.sums = a.scales + rows * a.blocks;
    a.counts = (int32_t *)(a.sums + rows * a.blocks);
    a.codes = (int8_t *)(a.counts + rows * a.blocks * 2);
    a.split = a.codes + rows * width;
    return a;
}

INLINE size_t group_of(const Format *format) { return is_large(format) ? BLOCKS : 1; }
INLINE size_t group_end(size_t first, size_t group, size_t blocks) { return first + group < blocks ? first + group : blocks; }

INLINE float largest_of(const float *x, size_t count) {
    floats most = magnitude(floats_at(x));
    for (size_t i = LANES; i < count; i += LANES) most = greater(most, magnitude(floats_at(x + i)));
    return greatest(most);
}

/* Whether rounding this row would lose too much. */
static int is_uneven(const float *x, size_t width, size_t group) {
    floats small = same(0);
    float error = 0;
    for (size_t block = 0, end; block < width / BLOCK; block = end) {
        end = group_end(block, group, width / BLOCK);
        size_t count = (end - block) * BLOCK;
        float largest = largest_of(x, count);
        for (size_t i = 0; i < count; i += LANES, x += LANES) {
            floats each = less(magnitude(floats_at(x)), same(largest / 16));
            small = times_plus(each, each, small);
        }
        error += largest * largest * ((float)count / (12.0f * 127.0f * 127.0f));
    }
    return error > MOST_LOSS * sum(small);
}

/* What rounding row `row` lost. */
static void residue(const float *x, size_t row, const Activations *a, float *out) {
    const int8_t *codes = a->codes + row * a->width;
    for (size_t i = 0; i < a->width; i++) out[i] = x[i] - (float)codes[i] * a->scales[row * a->blocks + i / BLOCK];
}

/* Blocks `from` to `end` of a row, of which `x` is the first number; the sum of its heaviest half block. */
static float round_group(const float *x, size_t row, size_t from, size_t end, float scale, const Activations *a) {
    float inverse = scale > 0 ? 1.0f / scale : 0.0f, heaviest = 0;
    int8_t *codes = a->codes + row * a->width + from * BLOCK;
    for (size_t block = from; block < end; block++) {
        size_t at = row * a->blocks + block;
        int32_t count = 0;
        for (size_t half = 0; half < 2; half++) {
            ints total = same_int(0);
            floats weight = same(0);
            for (int i = 0; i < BLOCK / 2; i += LANES, x += LANES, codes += LANES) {
                ints rounded = nearest(times(floats_at(x), same(inverse)));
                put_bytes(codes, rounded);
                total = plus(total, rounded);
                weight = add(weight, magnitude(floats_of(rounded)));
            }
            int32_t sum_of_half = sum_ints(total);
            float weight_of_half = sum(weight); /* of small integers, so exact in any order */
            heaviest = weight_of_half > heaviest ? weight_of_half : heaviest;
            a->counts[2 * at + half] = NOTHING - 32 * sum_of_half;
            count += sum_of_half;
        }
        a->scales[at] = scale;
        a->sums[at] = scale * (float)count;
        if (a->group != BLOCKS) continue;
        int8_t *split = a->split + 2 * (at - block % BLOCKS) + block % BLOCKS;
        int32_t upper = (count + 64) >> 7;
        split[0] = (int8_t)(count - 128 * upper), split[BLOCKS] = (int8_t)upper;
    }
    return heaviest;
}

static void round_row(const float *x, size_t row, const Activations *a) {
    for (size_t block = 0, end; block < a->blocks; block = end) {
        end = group_end(block, a->group, a->blocks);
        const float *first = x + block * BLOCK;
        float scale = largest_of(first, (end - block) * BLOCK) / 127.0f;
        float heaviest = round_group(first, row, block, end, scale, a);
        if (a->group == BLOCKS && heaviest > MOST_HALF)
            round_group(first, row, block, end, scale * (heaviest / LIGHTER_HALF), a);
    }
}

/* Where the rows of activations that meet a unit lie. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *counts;
    const int8_t *split;
    size_t width, blocks;
} Slice;

INLINE Slice slice_of(const Activations *a, size_t row, size_t unit) {
    size_t at = row * a->blocks + unit * BLOCKS;
    return (Slice){a->codes + row * a->width + unit * UNIT, a->scales + at, a->sums + at, a->counts + 2 * at,
                   a->split + 2 * at, a->width, a->blocks};
}

/* How many blocks of a row lie in this unit. */
INLINE int blocks_in(size_t width, size_t unit) {
    size_t left_over = (width - unit * UNIT) / BLOCK;
    return left_over < BLOCKS ? (int)left_over : BLOCKS;
}

/* Fetch a part of what lies behind these weights while one of their units is met: it comes next, and LANES streams
 * at once are more than a processor foresees. */
INLINE void fetch_ahead(Rows weights, size_t unit, const size_t unit_bytes) {
    const size_t portion = LANES * unit_bytes;
    const uint8_t *next = weights.at + LANES * weights.stride + unit * portion;
    for (size_t byte = 0; byte < portion; byte += 64) __builtin_prefetch(next + byte, 0, FETCHED);
}

/* What the products of one half block, or block, start with where the zero of the codes is 2 to the power `zero`. */
INLINE int32_t start_of(const int32_t *counts, int half, const int zero, const int halves) {
    if (zero < 0) return NOTHING;
    if (halves == 2 && zero == 5) return counts[half];
    return NOTHING + ((counts[0] - NOTHING) + (counts[1] - NOTHING)) / 32 * (1 << zero);
}

/* The terms of one half block, or block, join the total: where formats of 32 weights are concerned, this line alone
 * defines what a product is. */
INLINE floats joined(floats total, ints products, floats weight_scale, float scale) {
    return times_plus(floats_of_sums(products), times(weight_scale, same(scale)), total);
}

/* The sum of bytes that eight blocks of weights have, four in a lane, each times what the values of its block sum
 * up to. */
INLINE ints by_sums(ints first, ints second, const int8_t *split) {
    ints low = dot(dot(same_int(0), first, four_bytes(split)), second, four_bytes(split + 4));
    ints high = dot(dot(same_int(0), first, four_bytes(split + 8)), second, four_bytes(split + 12));
    return plus(low, left(high, 7));
}

/* The terms of a unit join the total: what its sums, each times its multiple, and its minima came to are exact. This line
 * defines what a product is where formats of 256 weights are concerned. */
INLINE floats joined_unit(floats total, ints products, floats factor, float scale) {
    return times_plus(floats_of(products), times(factor, same(scale)), total);
}

/* Q5_K has codes of up to 31: 16 bits hold sums of codes less 16 only, and what was taken off is put back here. */
enum { LIFT = 4 };
INLINE ints lift(ints first, ints second, const int8_t *split) { return left(by_sums(first, second, split), LIFT); }
