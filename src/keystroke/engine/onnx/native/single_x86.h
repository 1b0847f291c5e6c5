/* Multiplies one row of activations with weights while they are unpacked, on x86_64: Q4_K, the most common type, and
 * Q8_0, the type of the shipped model (with sixteen lanes only: elsewhere its codes need two parts).
 *
 * The same terms in the same order as in `meet` of product.h, so that the bits are the same.
 */
#pragma once
#include "activations.h"

INLINE size_t singles_of(const Format *format) { return (void)format, 1; } /* rows for which weights are unpacked anew */

INLINE int has_single(const Format *format, size_t width) {
    return format->unpack == unpack_q4_k || (LANES == 16 && format->unpack == unpack_q8_0 && width % (2 * BLOCK) == 0);
}

/* One row with one unit, without a tile in between: most of decoding. */
INLINE floats meet_q4_k(Rows rows, size_t unit, Slice s, floats total) {
    size_t at = unit * 144;
    SixBits six = six_bits(rows, at, 0);
    ints joint = same_int(0);
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
            ints multiples = multiple(six.scales[block / 4], block % 4, 0);
            join_multiples(&joint, products + i, multiples, s.shares, 0, block, 1);
        }
    }
    total = joined_unit(total, joint, six.factor, *s.unit);
    return joined_unit(total, by_sums(six.minima[0], six.minima[1], s.split), six.minimum_factor, *s.unit);
}

/* One row with two blocks of Q8_0, each a two-byte scale and 32 signed bytes. They are transposed as they are, 17
 * columns of four bytes: the first begins with one scale, the ninth ends with the other. */
INLINE floats meet_q8_0(Rows rows, size_t at, Slice s, int block, floats total) {
    ints column[20], products[2];
    for (int i = 0; i < 4; i++) turned_at(rows, at + 16 * (size_t)i, column + 4 * i);
    turned_at(rows, at + 52, column + 13);
    const int8_t *values = s.codes + BLOCK * block;
    const int8_t beside[8] = {0, 0, values[0], values[1], values[30], values[31], 0, 0}; /* a scale meets nothing */
    for (int i = 0; i < 2; i++) products[i] = same_int(start_of(s.counts + 2 * (block + i), 0, 7, 1));
    for (int i = 0; i < 17; i++) {
        const int8_t *four = i == 0 ? beside : i == 8 ? beside + 4 : values + 4 * i - (i < 8 ? 2 : 4);
        ints codes = differing(column[i], same_int((int32_t)0x80808080)); /* as unpack_q8_0 makes them */
        products[i > 8] = dot_wide(products[i > 8], codes, four_bytes(four));
    }
    total = joined(total, products[0], low_halves(column[0]), s.scales[block]);
    return joined(total, products[1], low_halves(right(column[8], 16)), s.scales[block + 1]);
}

/* Multiplies row `row` of the activations with LANES rows of weights. */
INLINE floats multiply_single(const Format *format, Rows weights, const Activations *a, size_t row) {
    floats total = same(0);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        Slice s = slice_of(a, row, unit);
        if (format->unpack == unpack_q4_k) {
            fetch_ahead(weights, unit, 144, 0, 1);
            total = meet_q4_k(weights, unit, s, total);
            continue;
        }
        fetch_ahead(weights, unit, 272, 0, 1);
        for (int block = 0; block < blocks_in(a->width, unit); block += 2)
            total = meet_q8_0(weights, (unit * BLOCKS + (size_t)block) * 34, s, block, total);
    }
    return total;
}
