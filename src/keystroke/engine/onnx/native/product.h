/* Multiplies activations with weights as they are stored.
 *
 * The result of a row depends only on that row and the weights, to the last bit: with any other rows and on any code
 * path, it is the sum of the same terms in the same order. So drafts, prefix reuse and forks give exactly the text of
 * plain decoding. The products of a block are exact integers.
 */
#pragma once
#include "activations.h"
#define PACKS (LANES != 8) /* whether matrices have a packed form */
#if LANES == 16
#include "packed_x86.h"
#elif LANES == 8
#include "single_x86.h"
#else
#include "packed_arm.h"
#include "rows_arm.h"
#include "single_arm.h"
#endif

enum {
    TOGETHER = REGISTERS / 4,                   /* rows whose totals stay in registers */
    TOGETHER_LARGE = LANES == 4 ? 6 : TOGETHER, /* the same with formats of 256 weights, where more would not */
};

/* Adds the products of `count` rows, at most TOGETHER, with one unit of a 32-weight format to total [count][LANES]. */
INLINE void meet(const Tile *tile, int blocks, Slice s, const int count, const int zero, const int halves,
                 const int has_minimum, float (*total)[LANES]) {
    floats totals[TOGETHER];
    for (int r = 0; r < count; r++) totals[r] = floats_at(total[r]);
    for (int block = 0; block < blocks; block++) {
        for (int half = 0; half < halves; half++) {
            ints products[TOGETHER];
            for (int r = 0; r < count; r++) {
                const int32_t *counts = s.counts + ((size_t)r * s.blocks + (size_t)block) * 2;
                products[r] = same_int(start_of(counts, half, TAKES_ZERO ? -1 : zero, halves));
            }
            int at = block * 8 + half * 4;
            dot_rows(tile->codes + at, 8 / halves, s.codes + 4 * at, s.width, count, zero, products);
            floats weight_scale = floats_at(tile->scales[block * halves + half]);
            for (int r = 0; r < count; r++) {
                totals[r] = joined(totals[r], products[r], weight_scale, s.scales[(size_t)r * s.blocks + (size_t)block]);
            }
        }
        for (int half = 0; has_minimum && halves == 2 && half < 2; half++) {
            floats minimum = floats_at(tile->minima[block * 2 + half]);
            for (int r = 0; r < count; r++) {
                size_t at = (size_t)r * s.blocks + (size_t)block;
                int32_t of_half = (NOTHING - s.counts[2 * at + (size_t)half]) / 32;
                totals[r] = times_plus(minimum, same(s.scales[at] * (float)of_half), totals[r]);
            }
        }
        if (has_minimum && halves == 1) {
            floats minimum = floats_at(tile->minima[block]);
            for (int r = 0; r < count; r++) {
                totals[r] = times_plus(minimum, same(s.sums[(size_t)r * s.blocks + (size_t)block]), totals[r]);
            }
        }
    }
    for (int r = 0; r < count; r++) put_floats(total[r], totals[r]);
}

/* The same for a 256-weight format. `alike`: both halves of a block have the same scale, and are separate because
 * their sum does not fit 16 bits. */
INLINE void meet_large(const Tile *tile, Slice s, const int count, const int zero, const int halves,
                       const int has_minimum, const int alike, float (*total)[LANES]) {
    ints totals[TOGETHER];
    for (int r = 0; r < count; r++) totals[r] = same_int(0);
    for (int block = 0; block < BLOCKS; block++) {
        for (int half = 0; half < halves; half++) {
            ints sums[TOGETHER];
            for (int r = 0; r < count; r++) {
                const int32_t *counts = s.counts + ((size_t)r * s.blocks + (size_t)block) * 2;
                sums[r] = same_int(TAKES_ZERO || zero < 0 ? 0 : start_of(counts, half, zero, halves));
            }
            int at = block * 8 + half * 4;
            dot_rows(tile->codes + at, 8 / halves, s.codes + 4 * at, s.width, count, zero, sums);
            ints multiples = ints_at(tile->multiples[alike ? block : block * halves + half]);
            join_multiples(totals, sums, multiples, s.shares, s.units * SHARES, block, count);
        }
    }
    for (int r = 0; r < count; r++) {
        const int8_t *split = s.split + (size_t)r * s.units * 16;
        float scale = s.unit[(size_t)r * s.units];
        floats grown = joined_unit(floats_at(total[r]), totals[r], floats_at(tile->factor), scale);
        if (has_minimum) {
            ints minima = by_sums(ints_at(tile->minimum_bytes[0]), ints_at(tile->minimum_bytes[1]), split);
            grown = joined_unit(grown, minima, floats_at(tile->minimum_factor), scale);
        }
        put_floats(total[r], grown);
    }
}

INLINE void meet_some(const Tile *tile, int blocks, Slice s, const int count, const int large, const int zero,
                      const int halves, const int has_minimum, const int alike, float (*total)[LANES]) {
    if (large) meet_large(tile, s, count, zero, halves, has_minimum, alike, total);
#if LANES == 4
    else if (count == 8 && halves == 1 && !has_minimum) meet_eight(tile, blocks, s, zero, total);
#endif
    else meet(tile, blocks, s, count, zero, halves, has_minimum, total);
}

INLINE void meet_rows(const Tile *tile, int blocks, const Activations *a, size_t row, size_t rows, size_t unit,
                      const int large, const int zero, const int halves, const int has_minimum, const int alike,
                      float (*total)[LANES]) {
    const int together = large ? TOGETHER_LARGE : TOGETHER;
    size_t r = 0;
    for (; r + (size_t)together <= rows; r += (size_t)together)
        meet_some(tile, blocks, slice_of(a, row + r, unit), together, large, zero, halves, has_minimum, alike, total + r);
    for (; r + 2 <= rows; r += 2)
        meet_some(tile, blocks, slice_of(a, row + r, unit), 2, large, zero, halves, has_minimum, alike, total + r);
    for (; r < rows; r++)
        meet_some(tile, blocks, slice_of(a, row + r, unit), 1, large, zero, halves, has_minimum, alike, total + r);
}

/* The products of `rows` rows from `row` on with LANES rows of weights: total [rows][LANES]. Compiled as a part of its own
 * (product.c), beside the rest. */
void multiply(const Format *format, Rows weights, const Activations *a, size_t row, size_t rows, float (*total)[LANES]);

#ifdef PRODUCTS
void multiply(const Format *format, Rows weights, const Activations *a, size_t row, size_t rows,
                     float (*total)[LANES]) {
#if LANES == 4
    if (format->type > PACKED) {
        multiply_packed(format, weights, a, row, rows, total);
        return;
    }
#endif
#if LANES == 16
    if (format->type > PACKED && multiply_packed(format, weights, a, row, rows, total)) return;
#endif
    if (rows <= singles_of(format) && has_single(format, a->width)) {
        for (size_t r = 0; r < rows; r++) put_floats(total[r], multiply_single(format, weights, a, row + r));
        return;
    }
#if LANES == 4
    if (rows < TOGETHER && format->type == 8) {
        multiply_few_q8_0(weights, a, row, rows, total);
        return;
    }
#endif
    Tile tile;
    const size_t unit_bytes = row_bytes(format, UNIT);
    memset(total, 0, rows * sizeof *total);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        fetch_ahead(weights, unit, unit_bytes, 0, 1);
        int blocks = blocks_in(a->width, unit);
#if LANES == 4
        if (format->type == 8) unpack_signed_q8_0(weights, unit, blocks, &tile);
        else
#endif
            format->unpack(weights, unit, blocks, &tile);
        switch (format->type % PACKED) {
        case 12: meet_rows(&tile, blocks, a, row, rows, unit, 1, -1, 1, 1, 0, total); break;
        case 13: meet_rows(&tile, blocks, a, row, rows, unit, 1, -1, 2, 1, 1, total); break;
        case 14: meet_rows(&tile, blocks, a, row, rows, unit, 1, 5, 2, 0, 0, total); break;
#if LANES == 4
        case 8: meet_rows(&tile, blocks, a, row, rows, unit, 0, -1, 1, 0, 0, total); break;
#else
        case 8:
#endif
        case 20:
        case 23: meet_rows(&tile, blocks, a, row, rows, unit, 0, 7, 1, 0, 0, total); break;
        case 2: meet_rows(&tile, blocks, a, row, rows, unit, 0, 3, 1, 0, 0, total); break;
        case 10: meet_rows(&tile, blocks, a, row, rows, unit, 0, -1, 2, 1, 0, total); break;
        case 11: meet_rows(&tile, blocks, a, row, rows, unit, 1, 2, 2, 0, 0, total); break;
        case 39:
        case 6: meet_rows(&tile, blocks, a, row, rows, unit, 0, 4, 1, 0, 0, total); break;
        default: meet_rows(&tile, blocks, a, row, rows, unit, 0, -1, 1, 1, 0, total);
        }
    }
}
#endif

/* The numbers of one stored row. */
static void widen_row(const Format *format, const uint8_t *row, size_t width, float *out) {
    for (size_t unit = 0; unit * UNIT < width; unit++) {
        Tile tile;
        int blocks = blocks_in(width, unit);
        format->unpack((Rows){row, 0}, unit, blocks, &tile);
        for (size_t i = 0; i < (size_t)blocks * BLOCK; i++) {
            int code = tile.codes[i / 4][i % 4] - (format->zero < 0 ? 0 : 1 << format->zero);
            out[unit * UNIT + i] = scale_at(format, &tile, i, 0) * (float)code + minimum_at(format, &tile, i, 0);
        }
    }
}
