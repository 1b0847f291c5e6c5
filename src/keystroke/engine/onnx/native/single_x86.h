/* One row of activations with weights while they are unpacked, on x86_64: Q4_K, of which most files are made.
 *
 * Law: the same terms in the same order as in `meet` of product.h, so the same bits.
 */
#pragma once
#include "activations.h"

enum { SINGLES = 1 }; /* rows for which weights are unpacked anew */

INLINE int has_single(const Format *format) { return format->unpack == unpack_q4_k; }

/* One row meets one unit, without a tile in between: most of decoding is this. */
INLINE floats meet_q4_k(Rows rows, size_t unit, Slice s, floats total) {
    size_t at = unit * 144;
    SixBits six = six_bits(rows, at);
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

/* Row `row` of the activations with LANES rows of weights. */
INLINE floats multiply_single(const Format *format, Rows weights, const Activations *a, size_t row) {
    (void)format;
    floats total = same(0);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        fetch_ahead(weights, unit, 144, 0, 1);
        total = meet_q4_k(weights, unit, slice_of(a, row, unit), total);
    }
    return total;
}
