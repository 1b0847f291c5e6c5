/* Products with matrices of plain numbers: 32 bits, half precision, bfloat16.
 *
 * Every result is the sum of one row's products in one order, whatever other rows are multiplied with it.
 */
#pragma once
#include "vector.h"

enum { PLAIN_F32 = 0, PLAIN_F16 = 1, PLAIN_BF16 = 30 };

INLINE int is_plain(int64_t type) { return type == PLAIN_F32 || type == PLAIN_F16 || type == PLAIN_BF16; }
INLINE size_t plain_bytes(int64_t type) { return type == PLAIN_F32 ? 4 : 2; }

INLINE float plain_number(const int64_t type, const uint8_t *p) {
    if (type == PLAIN_F32) {
        float value;
        memcpy(&value, p, 4);
        return value;
    }
    uint16_t bits[LANES] = {0};
    memcpy(bits, p, 2);
    if (type == PLAIN_F16) {
        float lanes[LANES];
        put_floats(lanes, halves_at(bits));
        return lanes[0];
    }
    uint32_t wide = (uint32_t)bits[0] << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* LANES numbers. */
INLINE floats plain_at(const int64_t type, const uint8_t *p) {
    if (type == PLAIN_F32) return floats_at((const float *)p);
    if (type == PLAIN_F16) return halves_at((const uint16_t *)p);
    uint16_t bits[LANES];
    uint32_t wide[LANES];
    memcpy(bits, p, sizeof bits);
    for (int i = 0; i < LANES; i++) wide[i] = (uint32_t)bits[i] << 16;
    return as_floats(ints_at(wide));
}

enum { DOTS = 4, DOT_ROWS = 4 }; /* vectors of a row, and rows, whose sums stay in registers */

/* out[r] = the product of row r of x, `step` numbers apart, with a row of weights, for `count` rows. */
INLINE void dot_plain(const int64_t type, const uint8_t *weights, const float *x, size_t step, size_t width,
                      const int count, float *out) {
    floats total[DOT_ROWS][DOTS];
    size_t each = plain_bytes(type), i = 0;
    for (int r = 0; r < count; r++) {
        for (int d = 0; d < DOTS; d++) total[r][d] = same(0);
    }
    for (; i + DOTS * LANES <= width; i += DOTS * LANES) {
        for (size_t d = 0; d < DOTS; d++) {
            floats w = plain_at(type, weights + (i + d * LANES) * each);
            for (int r = 0; r < count; r++)
                total[r][d] = times_plus(w, floats_at(x + (size_t)r * step + i + d * LANES), total[r][d]);
        }
    }
    for (; i + LANES <= width; i += LANES) {
        floats w = plain_at(type, weights + i * each);
        for (int r = 0; r < count; r++) total[r][0] = times_plus(w, floats_at(x + (size_t)r * step + i), total[r][0]);
    }
    for (int r = 0; r < count; r++) {
        out[r] = sum(add(add(total[r][0], total[r][1]), add(total[r][2], total[r][3])));
        for (size_t j = i; j < width; j++) out[r] += plain_number(type, weights + j * each) * x[(size_t)r * step + j];
    }
}

/* out[r * out_step] for `rows` rows. */
static void dot_rows_plain(int64_t type, const uint8_t *weights, const float *x, size_t step, size_t width,
                           size_t rows, float *out, size_t out_step) {
    for (size_t r = 0; r < rows; r += DOT_ROWS) {
        float some[DOT_ROWS];
        int count = rows - r < DOT_ROWS ? (int)(rows - r) : DOT_ROWS;
        const float *from = x + r * step;
        for (int i = 0; i < count; ) { /* constants, so that sums stay in registers */
            int part = count - i == DOT_ROWS ? DOT_ROWS : 1;
            const float *at = from + (size_t)i * step;
            if (part == DOT_ROWS) {
                if (type == PLAIN_F32) dot_plain(PLAIN_F32, weights, at, step, width, DOT_ROWS, some);
                else if (type == PLAIN_F16) dot_plain(PLAIN_F16, weights, at, step, width, DOT_ROWS, some);
                else dot_plain(PLAIN_BF16, weights, at, step, width, DOT_ROWS, some);
            } else {
                if (type == PLAIN_F32) dot_plain(PLAIN_F32, weights, at, step, width, 1, some + i);
                else if (type == PLAIN_F16) dot_plain(PLAIN_F16, weights, at, step, width, 1, some + i);
                else dot_plain(PLAIN_BF16, weights, at, step, width, 1, some + i);
            }
            i += part;
        }
        for (int i = 0; i < count; i++) out[(r + (size_t)i) * out_step] = some[i];
    }
}
