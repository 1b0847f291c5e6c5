/* Several rows of activations at once with formats of 32 weights, on 64-bit ARM: drafts, and most of reading a prompt.
 *
 * The same terms in the same order as `meet` in product.h. Registers have names, because compilers also write arrays
 * of them to memory, and a store costs as much as a product.
 */
#pragma once
#include "single_arm.h"

#define EIGHT_TIMES(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

/* Q8_0: codes stay signed, so that no zero is subtracted. */
static void unpack_signed_q8_0(Rows rows, size_t unit, int blocks, Tile *tile) {
    for (int block = 0; block < blocks; block++) {
        size_t at = (unit * BLOCKS + (size_t)block) * 34;
        ints column[8];
        turned_at(rows, at + 2, column);
        turned_at(rows, at + 18, column + 4);
        put_floats(tile->scales[block], half_of_rows(rows, at));
        for (int i = 0; i < 8; i++) put_ints(tile->codes[8 * block + i], column[i]);
    }
}

INLINE ints four_codes(const uint8_t *codes, const int zero) {
    uint8x16_t found = vld1q_u8(codes);
    return vreinterpretq_s32_u8(zero < 0 ? found : found - (uint8_t)(1 << zero));
}

/* For formats with one scale and no minimum per block. */
INLINE void meet_eight(const Tile *tile, int blocks, Slice s, const int zero, float (*total)[LANES]) {
#define OPENED(r)                                 \
    floats total##r = floats_at(total[r]);        \
    const int8_t *values##r = s.codes + r * s.width; \
    const float *scale##r = s.scales + r * s.blocks;
    EIGHT_TIMES(OPENED)
    for (int block = 0; block < blocks; block++) {
        const uint8_t(*codes)[4 * LANES] = tile->codes + 8 * block;
#define STARTED(r) ints sum##r = same_int(NOTHING);
        EIGHT_TIMES(STARTED)
        UNROLLED for (int half = 0; half < 2; half++, codes += 4) {
            ints a = four_codes(codes[0], zero), b = four_codes(codes[1], zero);
            ints c = four_codes(codes[2], zero), d = four_codes(codes[3], zero);
#define MULTIPLIED(r)                          \
    {                                          \
        ints x = ints_at(values##r);           \
        values##r += 16;                       \
        sum##r = DOT_QUAD(sum##r, a, x, 0);    \
        sum##r = DOT_QUAD(sum##r, b, x, 1);    \
        sum##r = DOT_QUAD(sum##r, c, x, 2);    \
        sum##r = DOT_QUAD(sum##r, d, x, 3);    \
    }
            EIGHT_TIMES(MULTIPLIED)
        }
        floats weight_scale = floats_at(tile->scales[block]);
#define JOINED(r) total##r = joined(total##r, sum##r, weight_scale, *scale##r++);
        EIGHT_TIMES(JOINED)
    }
#define CLOSED(r) put_floats(total[r], total##r);
    EIGHT_TIMES(CLOSED)
}

/* A few rows with Q8_0: weights are loaded once for all of them, and not transposed. */
#define OPENED_FEW(r)                                              \
    floats total##r = same(0);                                     \
    const int8_t *values##r = a->codes + (row + r) * a->width;     \
    const float *scale##r = a->scales + (row + r) * a->blocks;
#define MULTIPLIED_FEW(r)                                                                                            \
    {                                                                                                                \
        ints x = ints_at(values##r), y = ints_at(values##r + 16);                                                    \
        values##r += BLOCK;                                                                                          \
        ints first = vpaddq_s32(dot(dot_16(&nothing, c[0], x), c[1], y), dot(dot_16(&nothing, c[2], x), c[3], y));   \
        ints second = vpaddq_s32(dot(dot_16(&nothing, c[4], x), c[5], y), dot(dot_16(&nothing, c[6], x), c[7], y));  \
        total##r = joined(total##r, vpaddq_s32(first, second), weight_scale, *scale##r++);                           \
    }
#define FEW_ROWS(name, TIMES)                                                                              \
    static void name(Rows weights, const Activations *a, size_t row, int ahead, float (*total)[LANES]) {   \
        const uint8_t *at = weights.at;                                                                    \
        TIMES(OPENED_FEW)                                                                                  \
        for (size_t block = 0; block < a->blocks; block++, at += 34) {                                     \
            if (ahead) fetch_ahead(weights, block / BLOCKS, BLOCKS * 34, block % BLOCKS, BLOCKS);          \
            ints c[2 * LANES];                                                                             \
            UNROLLED for (size_t i = 0; i < LANES; i++) {                                                  \
                c[2 * i] = ints_at(at + i * weights.stride + 2);                                           \
                c[2 * i + 1] = ints_at(at + i * weights.stride + 18);                                      \
            }                                                                                              \
            floats weight_scale = half_of_rows((Rows){at, weights.stride}, 0);                             \
            TIMES(MULTIPLIED_FEW)                                                                          \
        }                                                                                                  \
        TIMES(CLOSED)                                                                                      \
    }
#define TWICE(DO) DO(0) DO(1)
#define FOUR_TIMES(DO) TWICE(DO) DO(2) DO(3)
FEW_ROWS(two_of_q8_0, TWICE)
FEW_ROWS(four_of_q8_0, FOUR_TIMES)

static void multiply_few_q8_0(Rows weights, const Activations *a, size_t row, size_t rows, float (*total)[LANES]) {
    size_t r = 0;
    for (; r + 4 <= rows; r += 4) four_of_q8_0(weights, a, row + r, !r, total + r);
    for (; r + 2 <= rows; r += 2) two_of_q8_0(weights, a, row + r, !r, total + r);
    if (r < rows) put_floats(total[r], multiply_type(8, 34, weights, a, row + r));
}
