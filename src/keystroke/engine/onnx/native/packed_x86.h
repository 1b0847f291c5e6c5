/* Weights rearranged for products on x86_64 with sixteen lanes, where memory allows a copy.
 *
 * A packed matrix has LANES rows after one another, as vectors of one word of four bytes of each row, in the order in which
 * a product reads them. So products are one stream of aligned loads with nothing to rearrange. The terms and their order are
 * those of product.h, and so the bits.
 *
 * Q8_0, for each two blocks: both scales, then the codes as in a Tile. Q4_K: a unit's words as they are stored. Q6_K: the same,
 * and the last two bytes, the factor, are a word too.
 */
#pragma once
#include "single_x86.h"

enum { PACKED_AHEAD = 4096, MOST_DIRECT = 8, VECTOR = 4 * LANES, PACKED_Q8_0_BYTES = 68, PACKED_Q6_K_BYTES = 212 };

static void unpack_packed_q8_0(Rows rows, size_t unit, int blocks, Tile *tile) {
    const uint8_t *at = rows.at + unit * (BLOCKS / 2) * PACKED_Q8_0_BYTES * LANES;
    for (int block = 0; block < blocks; block += 2) {
        ints scales = ints_at(at);
        put_floats(tile->scales[block], low_halves(scales)), put_floats(tile->scales[block + 1], low_halves(right(scales, 16)));
        memcpy(tile->codes[8 * block], at + VECTOR, 16 * VECTOR);
        at += 17 * VECTOR;
    }
}
static void unpack_packed_q4_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    q4_k_from(rows, unit * 144, 1, tile);
}
static void unpack_packed_q6_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    q6_k_from(rows, unit * PACKED_Q6_K_BYTES, 1, tile);
}

static const Format PACKED_FORMATS[] = {
    {PACKED + 8, 2 * BLOCK, PACKED_Q8_0_BYTES, 7, 1, 0, unpack_packed_q8_0},
    {PACKED + 12, UNIT, 144, -1, 1, 1, unpack_packed_q4_k},
    {PACKED + 14, UNIT, PACKED_Q6_K_BYTES, 5, 2, 0, unpack_packed_q6_k},
};

/* The packed form of a matrix of this format, or NULL. */
static const Format *packed_format(const Format *format, size_t height, size_t width) {
    for (size_t i = 0; i < sizeof PACKED_FORMATS / sizeof *PACKED_FORMATS; i++) {
        const Format *packed = PACKED_FORMATS + i;
        if (packed->type == PACKED + format->type && height % LANES == 0 && width % (size_t)packed->values == 0) return packed;
    }
    return NULL;
}

/* Packs LANES rows. */
static void pack_rows(const Format *format, Rows rows, size_t width, uint8_t *out) {
    const size_t step = format->type == 8 ? PACKED_Q8_0_BYTES : (size_t)format->bytes, words = (step + 3) / 4;
    for (size_t at = 0; at < row_bytes(format, width); at += step, out += words * VECTOR) {
        ints word[56], tail[4];
        if (format->type == 8) {
            turned_at(rows, at, word);
            turned_at(rows, at + 32, tail);
            word[0] = either(both(word[0], same_int(0xffff)), left(right(tail[0], 16), 16));
            for (size_t i = 0; i < 4; i++) turned_at(rows, at + 2 + 16 * i + 2 * (i / 2), word + 1 + 4 * i);
            for (size_t i = 1; i < words; i++) word[i] = differing(word[i], same_int((int32_t)0x80808080));
        } else {
            for (size_t i = 0; i < words / 4; i++) turned_at(rows, at + 16 * i, word + 4 * i);
        }
        if (format->type == 14) {
            turned_at(rows, at + 194, tail);
            word[52] = right(tail[3], 16);
        }
        for (size_t i = 0; i < words; i++) put_ints(out + i * VECTOR, word[i]);
    }
}

/* `count` rows of activations with LANES rows of Q8_0. */
INLINE void meet_packed_q8_0(const uint8_t *at, const Activations *a, size_t row, const int count, float (*total)[LANES]) {
    floats totals[MOST_DIRECT];
    for (int r = 0; r < count; r++) totals[r] = same(0);
    for (size_t block = 0; block < a->blocks; block += 2, at += 17 * VECTOR) {
        ints scales = ints_at(at);
        for (size_t i = 0; i < 2; i++) {
            ints products[MOST_DIRECT];
            floats weight_scale = low_halves(i ? right(scales, 16) : scales);
            size_t first = row * a->blocks + block + i;
            for (int r = 0; r < count; r++) products[r] = same_int(start_of(a->counts + 2 * (first + (size_t)r * a->blocks), 0, 7, 1));
            for (size_t j = 0; j < 8; j++) {
                const uint8_t *codes = at + (1 + 8 * i + j) * VECTOR;
                ints column = ints_at(codes);
                __builtin_prefetch(codes + PACKED_AHEAD, 0, FETCHED);
                for (int r = 0; r < count; r++) {
                    ints four = four_bytes(a->codes + (row + (size_t)r) * a->width + (block + i) * BLOCK + 4 * j);
                    products[r] = dot_wide(products[r], column, four);
                }
            }
            for (int r = 0; r < count; r++) totals[r] = joined(totals[r], products[r], weight_scale, a->scales[first + (size_t)r * a->blocks]);
        }
    }
    for (int r = 0; r < count; r++) put_floats(total[r], totals[r]);
}

/* The same with Q4_K. */
INLINE void meet_packed_q4_k(Rows rows, const Activations *a, size_t row, const int count, float (*total)[LANES]) {
    floats totals[MOST_DIRECT];
    for (int r = 0; r < count; r++) totals[r] = same(0);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        Slice s = slice_of(a, row, unit);
        size_t at = unit * 144;
        SixBits six = six_bits(rows, at, 1);
        ints joint[MOST_DIRECT];
        for (int r = 0; r < count; r++) joint[r] = same_int(0);
        for (int pair = 0; pair < 4; pair++) {
            ints products[2][MOST_DIRECT];
            for (int r = 0; r < count; r++) products[0][r] = products[1][r] = same_int(0);
            for (int word = 8 * pair; word < 8 * pair + 8; word++) {
                const uint8_t *codes = rows.at + (at + 16 + 4 * (size_t)word) * LANES;
                ints column = ints_at(codes);
                __builtin_prefetch(codes + PACKED_AHEAD, 0, FETCHED);
                for (int r = 0; r < count; r++) {
                    const int8_t *values = s.codes + (size_t)r * s.width + 32 * pair + 4 * word;
                    products[0][r] = dot(products[0][r], masked(column, 0x0f), four_bytes(values));
                    products[1][r] = dot(products[1][r], masked(right(column, 4), 0x0f), four_bytes(values + 32));
                }
            }
            for (int i = 0; i < 2; i++) {
                int block = 2 * pair + i;
                ints multiples = multiple(six.scales[block / 4], block % 4, 0);
                join_multiples(joint, products[i], multiples, s.shares, s.units * SHARES, block, count);
            }
        }
        for (int r = 0; r < count; r++) {
            float scale = s.unit[(size_t)r * s.units];
            ints minima = by_sums(six.minima[0], six.minima[1], s.split + (size_t)r * s.units * 16);
            totals[r] = joined_unit(totals[r], joint[r], six.factor, scale);
            totals[r] = joined_unit(totals[r], minima, six.minimum_factor, scale);
        }
    }
    for (int r = 0; r < count; r++) put_floats(total[r], totals[r]);
}

/* One unit of Q6_K with one row. Sums of a unit are exact, so their order does not matter. */
INLINE floats meet_packed_q6_k(const uint8_t *at, Slice s, floats total) {
    ints joint = same_int(0);
    for (int half = 0; half < 4; half++) { /* 128 weights are two of these */
        const uint8_t *lower = at + (16 * (half / 2) + 4 * (half % 2)) * VECTOR, *upper = at + (32 + 4 * half) * VECTOR;
        ints products[4];
        for (int k = 0; k < 4; k++) products[k] = same_int(start_of(s.counts + 2 * (4 * (half / 2) + k), half % 2, 5, 2));
        for (int j = 0; j < 4; j++) {
            ints first = ints_at(lower + j * VECTOR), second = ints_at(lower + (8 + j) * VECTOR), bits = ints_at(upper + j * VECTOR);
            for (int i = 0; i < 3; i++) __builtin_prefetch(at + (12 * half + 3 * j + i) * VECTOR + PACKED_AHEAD, 0, FETCHED);
            const int8_t *values = s.codes + 128 * (half / 2) + 16 * (half % 2) + 4 * j;
            products[0] = dot(products[0], either(masked(first, 0x0f), left(masked(bits, 0x03), 4)), four_bytes(values));
            products[1] = dot(products[1], either(masked(second, 0x0f), left(masked(bits, 0x0c), 2)), four_bytes(values + 32));
            products[2] = dot(products[2], either(masked(right(first, 4), 0x0f), masked(bits, 0x30)), four_bytes(values + 64));
            products[3] = dot(products[3], either(masked(right(second, 4), 0x0f), right(masked(bits, 0xc0), 2)), four_bytes(values + 96));
        }
        for (int k = 0; k < 4; k++) {
            int block = 4 * (half / 2) + k, part = 2 * block + half % 2;
            ints multiples = multiple(ints_at(at + (48 + part / 4) * VECTOR), part % 4, 1);
            join_multiples(&joint, products + k, multiples, s.shares, 0, block, 1);
        }
    }
    return joined_unit(total, joint, low_halves(ints_at(at + 52 * VECTOR)), *s.unit);
}

INLINE void meet_packed(const Format *format, Rows weights, const Activations *a, size_t row, const int count, float (*total)[LANES]) {
    if (format->type == PACKED + 8) meet_packed_q8_0(weights.at, a, row, count, total);
    else meet_packed_q4_k(weights, a, row, count, total);
}

/* As `multiply`, for few rows, which need no tile. Returns 0 where there is no such product, or they are too many. */
static int multiply_packed(const Format *format, Rows weights, const Activations *a, size_t row, size_t rows, float (*total)[LANES]) {
    if (format->type == PACKED + 14) {
        if (rows > 1) return 0;
        floats one = same(0);
        for (size_t unit = 0; unit * UNIT < a->width; unit++)
            one = meet_packed_q6_k(weights.at + unit * PACKED_Q6_K_BYTES * LANES, slice_of(a, row, unit), one);
        put_floats(total[0], one);
        return 1;
    }
    if (rows > MOST_DIRECT) return 0;
    for (size_t r = 0; r < rows;) {
        switch (rows - r) {
        case 1: meet_packed(format, weights, a, row + r, 1, total + r), r += 1; break;
        case 2: meet_packed(format, weights, a, row + r, 2, total + r), r += 2; break;
        case 3: meet_packed(format, weights, a, row + r, 3, total + r), r += 3; break;
        case MOST_DIRECT: meet_packed(format, weights, a, row + r, MOST_DIRECT, total + r), r += MOST_DIRECT; break;
        default: meet_packed(format, weights, a, row + r, 4, total + r), r += 4;
        }
    }
    return 1;
}
