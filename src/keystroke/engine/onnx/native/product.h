/* Products of activations with weights as they are stored.
 *
 * Law: a row's result is a function of that row and of the weights alone, to the last bit: whatever other
 * rows come with it and on whichever path, every number is the sum of the same terms in the same order.
 * That is what lets drafts, prefixes and forks give the very text of plain decoding. The products of a block
 * are exact integers.
 */
#pragma once
#include "activations.h"
#if defined(__x86_64__)
#include "single_x86.h"
#else
#include "single_arm.h"
#endif

enum {
    TOGETHER = REGISTERS / 4,                      /* rows whose totals stay in registers */
    TOGETHER_BY_HALVES = LANES == 4 ? 4 : TOGETHER, /* the same with two scales a block, where more would not */
};

/* `count` rows, at most TOGETHER, meet one unit: total [count][LANES] grows by its products. */
INLINE void meet(const Tile *tile, int blocks, Slice s, const int count, const int zero, const int halves,
                 const int has_minimum, const int wide, float (*total)[LANES]) {
    floats totals[TOGETHER];
    for (int r = 0; r < count; r++) totals[r] = floats_at(total[r]);
    for (int block = 0; block < blocks; block++) {
        for (int half = 0; half < halves; half++) {
            ints products[TOGETHER];
            for (int r = 0; r < count; r++) {
                const int32_t *counts = s.counts + ((size_t)r * s.blocks + (size_t)block) * 2;
                products[r] = same_int(start_of(counts, half, zero, halves));
            }
            int at = block * 8 + half * 4;
            dot_rows(tile->codes + at, 8 / halves, s.codes + 4 * at, s.width, count, wide, products);
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
    const int together = halves == 2 ? TOGETHER_BY_HALVES : TOGETHER;
    size_t r = 0;
    for (; r + (size_t)together <= rows; r += (size_t)together)
        meet(tile, blocks, slice_of(a, row + r, unit), together, zero, halves, has_minimum, wide, total + r);
    for (; r + 2 <= rows; r += 2)
        meet(tile, blocks, slice_of(a, row + r, unit), 2, zero, halves, has_minimum, wide, total + r);
    for (; r < rows; r++)
        meet(tile, blocks, slice_of(a, row + r, unit), 1, zero, halves, has_minimum, wide, total + r);
}

/* `rows` rows from `row` on with LANES rows of weights: total [rows][LANES]. */
static void multiply(const Format *format, Rows weights, const Activations *a, size_t row, size_t rows,
                     float (*total)[LANES]) {
    if (rows <= SINGLES && has_single(format)) {
        for (size_t r = 0; r < rows; r++) put_floats(total[r], multiply_single(format, weights, a, row + r));
        return;
    }
    Tile tile;
    memset(total, 0, rows * sizeof *total);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        fetch_ahead(weights, a->width, unit);
        int blocks = blocks_in(a->width, unit);
        format->unpack(weights, unit, blocks, &tile);
        if (format->has_minimum) meet_rows(&tile, blocks, a, row, rows, unit, -1, 1, 1, 0, total);
        else if (format->halves == 2) meet_rows(&tile, blocks, a, row, rows, unit, 5, 2, 0, 0, total);
        else if (format->wide) meet_rows(&tile, blocks, a, row, rows, unit, WIDE_ZERO, 1, 0, 1, total);
        else if (format->zero == 3) meet_rows(&tile, blocks, a, row, rows, unit, 3, 1, 0, 0, total);
        else meet_rows(&tile, blocks, a, row, rows, unit, 4, 1, 0, 0, total);
    }
}
