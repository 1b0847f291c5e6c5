/* Products of activations with weights as they are stored.
 *
 * Law: a row's result is a function of that row and of the weights alone, to the last bit: whatever other
 * rows come with it and on whichever path, every number is the sum of the same terms in the same order.
 * That is what lets drafts, prefixes and forks give the very text of plain decoding. Activations are rounded
 * to 8 bits in blocks of 32, each with its own scale; the products of a block are exact integers. Where a few
 * numbers of a row are so large that this would lose the others, what was lost is rounded too, as a second row.
 */
#pragma once
#include "formats.h"

enum {
    MOST_ROWS = 128,                /* rows that meet a unit of weights while it is unpacked */
    TOGETHER = LANES == 16 ? 8 : 4, /* rows whose totals stay in registers */
};
/* How large the error of rounding may be, compared with what is small in a row: with its numbers, each counted as
 * no more than a sixteenth of the largest of its block. Normally distributed numbers have 0.0014; the first token
 * of a text, on whose few huge activations all attention rests, has 0.04 and loses everything else. */
static const float MOST_LOSS = 0.01f;

typedef struct {
    size_t rows, width, blocks;
    int8_t *codes;   /* [rows][width] */
    float *scales;   /* [rows][blocks] */
    float *sums;     /* [rows][blocks]: what the codes of a block sum up to, scaled */
    int32_t *counts; /* [rows][2 * blocks]: less what the codes of each half block sum up to */
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
        memcpy(a->counts + (row * a->blocks + block) * 2, half, sizeof half);
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

INLINE ints four_bytes(const int8_t *p) {
    int32_t value;
    memcpy(&value, p, 4);
    return same_int(value);
}

/* The terms of one half block, or block, join the total: this line alone defines what a product is. */
INLINE floats joined(floats total, ints products, floats weight_scale, float scale) {
    return times_plus(floats_of(products), times(weight_scale, same(scale)), total);
}

/* `count` rows, at most TOGETHER, meet one unit: total [count][LANES] grows by its products. */
INLINE void meet(const Tile *tile, int blocks, Slice s, const int count, const int zero, const int halves,
                 const int has_minimum, const int wide, float (*total)[LANES]) {
    floats totals[TOGETHER];
    for (int r = 0; r < count; r++) totals[r] = floats_at(total[r]);
    for (int block = 0; block < blocks; block++) {
        for (int half = 0; half < halves; half++) {
            ints products[TOGETHER];
            for (int r = 0; r < count; r++) {
                const int32_t *sums = s.counts + ((size_t)r * s.blocks + (size_t)block) * 2;
                products[r] = same_int(zero < 0 ? 0 : (halves == 2 ? sums[half] : sums[0] + sums[1]) * (1 << (zero & 31)));
            }
            for (int quad = 0; quad < 8 / halves; quad++) {
                int at = block * 8 + half * 4 + quad;
                ints codes = ints_at(tile->codes[at]);
                for (int r = 0; r < count; r++) {
                    ints values = four_bytes(s.codes + (size_t)r * s.width + 4 * at);
                    products[r] = wide ? dot_wide(products[r], codes, values) : dot(products[r], codes, values);
                }
            }
            floats weight_scale = floats_at(tile->scales[block * halves + half]);
            for (int r = 0; r < count; r++) {
                totals[r] = joined(totals[r], products[r], weight_scale, s.scales[(size_t)r * s.blocks + (size_t)block]);
            }
        }
        if (has_minimum) {
            floats minimum = floats_at(tile->minima[block]);
            for (int r = 0; r < count; r++) {
                totals[r] = times_plus(minimum, same(s.sums[(size_t)r * s.blocks + (size_t)block]), totals[r]);
            }
        }
    }
    for (int r = 0; r < count; r++) put_floats(total[r], totals[r]);
}

INLINE void meet_rows(const Tile *tile, int blocks, const Activations *a, size_t row, size_t rows, size_t unit,
                      const int zero, const int halves, const int has_minimum, const int wide,
                      float (*total)[LANES]) {
    size_t r = 0;
    for (; r + TOGETHER <= rows; r += TOGETHER)
        meet(tile, blocks, slice_of(a, row + r, unit), TOGETHER, zero, halves, has_minimum, wide, total + r);
    for (; r + 2 <= rows; r += 2)
        meet(tile, blocks, slice_of(a, row + r, unit), 2, zero, halves, has_minimum, wide, total + r);
    for (; r < rows; r++)
        meet(tile, blocks, slice_of(a, row + r, unit), 1, zero, halves, has_minimum, wide, total + r);
}

/* One row meets one unit of Q4_K while it is unpacked, without a tile in between: most of decoding is this. The
 * same terms in the same order as in `meet`, so the same bits. */
INLINE floats meet_q4_k(Rows rows, size_t unit, Slice s, floats total) {
    size_t at = unit * 144;
    ints head[4];
    turned_at(rows, at, head);
    floats scale = low_halves(head[0]), minimum = minus(same(0), low_halves(right(head[0], 16)));
    ints a = head[1], b = head[2], c = head[3];
    ints scales[2] = {masked(a, 0x3f), either(masked(c, 0x0f), masked(right(a, 2), 0x30))};
    ints minima[2] = {masked(b, 0x3f), either(masked(right(c, 4), 0x0f), masked(right(b, 2), 0x30))};
    for (int pair = 0; pair < 4; pair++) {
        ints products[2] = {same_int(0), same_int(0)};
        for (int half = 0; half < 2; half++) {
            ints column[4];
            turned_at(rows, at + 16 + 32 * (size_t)pair + 16 * (size_t)half, column);
            const int8_t *values = s.codes + 64 * pair + 16 * half;
            for (int j = 0; j < 4; j++) {
                products[0] = dot(products[0], masked(column[j], 0x0f), four_bytes(values + 4 * j));
                products[1] = dot(products[1], masked(right(column[j], 4), 0x0f), four_bytes(values + 32 + 4 * j));
            }
        }
        for (int i = 0; i < 2; i++) {
            int block = 2 * pair + i;
            floats weight_scale = times(scale, byte_of(scales[block / 4], block % 4));
            floats weight_minimum = times(minimum, byte_of(minima[block / 4], block % 4));
            total = joined(total, products[i], weight_scale, s.scales[block]);
            total = times_plus(weight_minimum, same(s.sums[block]), total);
        }
    }
    return total;
}

/* `rows` rows from `row` on with LANES rows of weights: total [rows][LANES]. What lies behind these weights is
 * fetched meanwhile: it comes next, and LANES streams at once are more than a processor foresees. */
static void multiply(const Format *format, Rows weights, const Activations *a, size_t row, size_t rows,
                     float (*total)[LANES]) {
    Tile tile;
    const uint8_t *next = weights.at + LANES * weights.stride;
    size_t portion = LANES * weights.stride * UNIT / a->width;
    int fused = rows == 1 && format->unpack == unpack_q4_k;
    floats one = same(0);
    memset(total, 0, rows * sizeof *total);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        for (size_t byte = 0; byte < portion; byte += 64) __builtin_prefetch(next + byte, 0, 2);
        next += portion;
        if (fused) {
            one = meet_q4_k(weights, unit, slice_of(a, row, unit), one);
            continue;
        }
        size_t left_over = (a->width - unit * UNIT) / BLOCK;
        int blocks = left_over < BLOCKS ? (int)left_over : BLOCKS;
        format->unpack(weights, unit, blocks, &tile);
        if (format->has_minimum) meet_rows(&tile, blocks, a, row, rows, unit, -1, 1, 1, 0, total);
        else if (format->halves == 2) meet_rows(&tile, blocks, a, row, rows, unit, 5, 2, 0, 0, total);
        else if (format->wide) meet_rows(&tile, blocks, a, row, rows, unit, 7, 1, 0, 1, total);
        else if (format->zero == 3) meet_rows(&tile, blocks, a, row, rows, unit, 3, 1, 0, 0, total);
        else meet_rows(&tile, blocks, a, row, rows, unit, 4, 1, 0, 0, total);
    }
    if (fused) put_floats(total[0], one);
}
