/* Weights rearranged for products on 64-bit ARM, where memory allows a copy.
 *
 * A packed matrix has the bytes of the stored one, those of LANES rows in the order in which a product reads them: block
 * by block, the codes turned as in a Tile, then the scales. So products are one stream of aligned loads with nothing to
 * rearrange. The terms and their order are those of product.h, and so the bits.
 *
 * Q8_0: eight columns of codes. Q5_0: four vectors with a column in their low nibbles and the one four further in their
 * high ones; then 16 bytes whose bit j is set where column j lacks its fifth bit: such a code minus 16 has all upper bits.
 */
#pragma once
#include "rows_arm.h"

enum { PACKED = 1000, PACKED_AHEAD = 2048 };
static const Format PACKED_FORMATS[] = {
    {PACKED + 8, 32, 34, -1, 1, 0, NULL},
    {PACKED + 6, 32, 22, -1, 1, 0, NULL},
};

/* The packed form of a matrix of this format, or NULL. */
static const Format *packed_format(const Format *format, size_t height) {
    for (size_t i = 0; i < sizeof PACKED_FORMATS / sizeof *PACKED_FORMATS; i++) {
        if (PACKED_FORMATS[i].type == PACKED + format->type && height % LANES == 0) return PACKED_FORMATS + i;
    }
    return NULL;
}

/* Packs LANES rows. */
static void pack_rows(const Format *format, Rows rows, size_t width, uint8_t *out) {
    Tile tile;
    for (size_t unit = 0; unit * UNIT < width; unit++) {
        int blocks = blocks_in(width, unit);
        format->unpack(rows, unit, blocks, &tile);
        for (int block = 0; block < blocks; block++) {
            const uint8_t(*codes)[4 * LANES] = tile.codes + 8 * block;
            if (format->type == 8) {
                for (int i = 0; i < 8; i++, out += 16) {
                    for (int lane = 0; lane < 16; lane++) out[lane] = codes[i][lane] ^ 0x80;
                }
            } else {
                for (int i = 0; i < 4; i++, out += 16) {
                    for (int lane = 0; lane < 16; lane++) out[lane] = (uint8_t)((codes[i][lane] & 15) | codes[i + 4][lane] << 4);
                }
                memset(out, 0, 16);
                for (int i = 0; i < 8; i++) {
                    for (int lane = 0; lane < 16; lane++) out[lane] |= (uint8_t)((~codes[i][lane] >> 4 & 1) << i);
                }
                out += 16;
            }
            const uint8_t *scale = rows.at + (unit * BLOCKS + (size_t)block) * (size_t)format->bytes;
            for (size_t lane = 0; lane < LANES; lane++, out += 2) memcpy(out, scale + lane * rows.stride, 2);
        }
    }
}

static const int32_t nothings[LANES] = {NOTHING, NOTHING, NOTHING, NOTHING};

/* The products of the first four values, plus NOTHING: loaded here, since copying it costs as much as a product. */
INLINE ints started(ints column, ints values) {
#if defined(__ARM_FEATURE_DOTPROD)
    ints products;
    __asm__("ldr %q0, %3\n\tsdot %0.4s, %1.16b, %2.4b[0]" : "=&w"(products) : "w"(column), "w"(values), "m"(nothings));
    return products;
#else
    return DOT_QUAD(same_int(NOTHING), column, values, 0);
#endif
}

#define COLUMNS_OF_8                                                                        \
    ints c0 = ints_at(at), c1 = ints_at(at + 16), c2 = ints_at(at + 32), c3 = ints_at(at + 48); \
    ints c4 = ints_at(at + 64), c5 = ints_at(at + 80), c6 = ints_at(at + 96), c7 = ints_at(at + 112);
#define LOWER(i) (ints)vbslq_u8(vdupq_n_u8(15), vld1q_u8(at + 16 * i), vtstq_u8(upper, vdupq_n_u8(1 << i)))
#define UPPER(i) (ints)vsriq_n_u8(vtstq_u8(upper, vdupq_n_u8(16 << i)), vld1q_u8(at + 16 * i), 4)
#define COLUMNS_OF_6                                                                        \
    uint8x16_t upper = vld1q_u8(at + 64);                                                   \
    ints c0 = LOWER(0), c1 = LOWER(1), c2 = LOWER(2), c3 = LOWER(3);                        \
    ints c4 = UPPER(0), c5 = UPPER(1), c6 = UPPER(2), c7 = UPPER(3);

#define MULTIPLIED_PACKED(r)                                                       \
    {                                                                              \
        ints x = ints_at(values##r), y = ints_at(values##r + 16);                  \
        values##r += BLOCK;                                                        \
        ints s = started(c0, x);                                                   \
        s = DOT_QUAD(s, c1, x, 1), s = DOT_QUAD(s, c2, x, 2), s = DOT_QUAD(s, c3, x, 3); \
        s = DOT_QUAD(s, c4, y, 0), s = DOT_QUAD(s, c5, y, 1);                      \
        s = DOT_QUAD(s, c6, y, 2), s = DOT_QUAD(s, c7, y, 3);                      \
        total##r = joined(total##r, s, weight_scale, *scale##r++);                 \
    }
#define PACKED_ROWS(name, TIMES, type, bytes)                                                                           \
    static void name(const uint8_t *at, const Activations *a, size_t row, float (*total)[LANES]) { \
        TIMES(OPENED_FEW)                                                                                                \
        for (size_t block = 0; block < a->blocks; block++, at += LANES * bytes) {                                        \
            __builtin_prefetch(at + PACKED_AHEAD, 0, FETCHED);                                                           \
            __builtin_prefetch(at + PACKED_AHEAD + 64, 0, FETCHED);                                                      \
            COLUMNS_OF_##type                                                                                            \
            floats weight_scale = halves_at((const uint16_t *)(at + LANES * (bytes - 2)));                               \
            TIMES(MULTIPLIED_PACKED)                                                                                     \
        }                                                                                                                \
        TIMES(CLOSED)                                                                                                    \
    }
#define ONCE(DO) DO(0)
#define PACKED_TYPE(type, bytes)                              \
    PACKED_ROWS(one_packed_##type, ONCE, type, bytes)         \
    PACKED_ROWS(two_packed_##type, TWICE, type, bytes)        \
    PACKED_ROWS(four_packed_##type, FOUR_TIMES, type, bytes)  \
    PACKED_ROWS(eight_packed_##type, EIGHT_TIMES, type, bytes)
PACKED_TYPE(8, 34)
PACKED_TYPE(6, 22)

typedef void (*PackedRows)(const uint8_t *at, const Activations *a, size_t row, float (*total)[LANES]);
static const PackedRows PACKED_8[] = {eight_packed_8, four_packed_8, two_packed_8, one_packed_8};
static const PackedRows PACKED_6[] = {eight_packed_6, four_packed_6, two_packed_6, one_packed_6};

/* As `multiply`, with packed weights. */
static void multiply_packed(const Format *format, Rows weights, const Activations *a, size_t row, size_t rows,
                            float (*total)[LANES]) {
    const PackedRows *by_count = format->type == PACKED + 8 ? PACKED_8 : PACKED_6;
    for (size_t i = 0, count = 8, r = 0; i < 4; i++, count /= 2) {
        for (; r + count <= rows; r += count) by_count[i](weights.at, a, row + r, total + r);
    }
}
