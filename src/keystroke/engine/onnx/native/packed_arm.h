/* Weights rearranged for products on 64-bit ARM, where memory allows a copy.
 *
 * A packed matrix has LANES rows after one another, in the order in which a product reads them: block by block, the codes
 * turned as in a Tile, then the scales. So products are one stream of aligned loads with nothing to
 * rearrange. The terms and their order are those of product.h, and so the bits.
 *
 * Q8_0: eight columns of codes. Q5_0: four vectors with a column in their low nibbles and the one four further in their
 * high ones; then 16 bytes whose bit j is set where column j lacks its fifth bit: such a code minus 16 has all upper bits.
 * Q4_K: for each pair of blocks eight columns, the first block in their low nibbles; then a unit's multiples as bytes,
 * block by block, those of the minima as in a Tile, and its two factors.
 * Q6_K: the columns of codes less 32, as bytes: a third more memory, but nothing to unpack; then a unit's multiples as bytes,
 * for each pair of blocks those of the first halves of both and of the second halves, and the factor.
 */
#pragma once
#include "rows_arm.h"

enum { PACKED_AHEAD = 2048, PACKED_Q4_K_BYTES = 592, PACKED_Q6_K_BYTES = 1104 };

static const Format PACKED_FORMATS[] = {
    {PACKED + 8, 32, 34, -1, 1, 0, NULL},
    {PACKED + 6, 32, 22, -1, 1, 0, NULL},
    {PACKED + 12, 256, PACKED_Q4_K_BYTES / LANES, -1, 1, 1, NULL},
    {PACKED + 14, 256, PACKED_Q6_K_BYTES / LANES, -1, 2, 0, NULL},
};

/* The packed form of a matrix of this format, or NULL. */
static const Format *packed_format(const Format *format, size_t height, size_t width) {
    (void)width;
    for (size_t i = 0; i < sizeof PACKED_FORMATS / sizeof *PACKED_FORMATS; i++) {
        if (PACKED_FORMATS[i].type == PACKED + format->type && height % LANES == 0) return PACKED_FORMATS + i;
    }
    return NULL;
}

static void pack_q4_k(Rows rows, size_t width, uint8_t *out) {
    Tile tile;
    for (size_t unit = 0; unit * UNIT < width; unit++) {
        unpack_q4_k(rows, unit, BLOCKS, &tile);
        for (int i = 0; i < QUADS / 2; i++, out += 16) {
            const uint8_t(*codes)[4 * LANES] = tile.codes + i / 8 * 16 + i % 8;
            for (int lane = 0; lane < 16; lane++) out[lane] = (uint8_t)(codes[0][lane] | codes[8][lane] << 4);
        }
        for (int block = 0; block < BLOCKS; block++, out += LANES) memcpy(out, tile.multiples[block], LANES);
        memcpy(out, tile.minimum_bytes, sizeof tile.minimum_bytes);
        out += sizeof tile.minimum_bytes;
        for (size_t i = 0; i < 2 * LANES; i++, out += 2) memcpy(out, rows.at + i % LANES * rows.stride + unit * 144 + i / LANES * 2, 2);
    }
}

static void pack_q6_k(Rows rows, size_t width, uint8_t *out) {
    Tile tile;
    for (size_t unit = 0; unit * UNIT < width; unit++, out += PACKED_Q6_K_BYTES) {
        unpack_q6_k(rows, unit, BLOCKS, &tile);
        for (int i = 0; i < 4 * LANES * QUADS; i++) out[i] = (uint8_t)(tile.codes[i / (4 * LANES)][i % (4 * LANES)] - 32);
        uint8_t *multiples = out + 1024;
        for (int i = 0; i < 2 * BLOCKS; i++) memcpy(multiples + i / 4 * 16 + i % 2 * 8 + i / 2 % 2 * 4, tile.multiples[i], LANES);
        for (size_t i = 0; i < LANES; i++) memcpy(out + 1088 + 2 * i, rows.at + i * rows.stride + unit * 210 + 208, 2);
        memset(out + 1096, 0, 8);
    }
}

/* Packs LANES rows. */
static void pack_rows(const Format *format, Rows rows, size_t width, uint8_t *out) {
    Tile tile;
    if (format->type == 12 || format->type == 14) {
        (format->type == 12 ? pack_q4_k : pack_q6_k)(rows, width, out);
        return;
    }
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

/* The same without NOTHING. */
INLINE ints started_at_0(ints column, ints values) {
#if defined(__ARM_FEATURE_DOTPROD)
    ints products;
    __asm__("movi %0.4s, #0\n\tsdot %0.4s, %1.16b, %2.4b[0]" : "=&w"(products) : "w"(column), "w"(values));
    return products;
#else
    return DOT_QUAD(same_int(0), column, values, 0);
#endif
}

/* Prefetches where it is written: compilers would put all of a unit's in a row, more than the core has outstanding loads. */
INLINE void fetch_here(const uint8_t *at) { __asm__ volatile("prfm pldl1keep, %a0" : : "p"(at) : "memory"); }

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
#define OPENED_Q4_K(r)                                                          \
    floats total##r = same(0);                                                  \
    const int8_t *values##r = a->codes + (row + r) * a->width;                  \
    const int8_t *shares##r = a->shares + (row + r) * units * SHARES + 48;      \
    const int8_t *split##r = a->split + (row + r) * units * 16;                 \
    const float *unit##r = a->units + (row + r) * units;
#define STARTED_Q4_K(r) ints sum##r = same_int(0);
#define MULTIPLIED_Q4_K(r)                                                                        \
    {                                                                                             \
        ints x = ints_at(values##r), y = ints_at(values##r + 16);                                 \
        values##r += BLOCK;                                                                       \
        ints s = started_at_0(c0, x);                                                             \
        s = DOT_QUAD(s, c1, x, 1), s = DOT_QUAD(s, c2, x, 2), s = DOT_QUAD(s, c3, x, 3);          \
        s = DOT_QUAD(s, c4, y, 0), s = DOT_QUAD(s, c5, y, 1);                                     \
        s = DOT_QUAD(s, c6, y, 2), s = DOT_QUAD(s, c7, y, 3);                                     \
        int16x8_t by = vmull_s8(multiples, vld1_s8(shares##r + 8 * pair));                        \
        sum##r = vmlal_s16(sum##r, vmovn_s32(s), upper ? vget_high_s16(by) : vget_low_s16(by));   \
    }
#define JOINED_Q4_K(r)                                                                                \
    {                                                                                                 \
        total##r = joined_unit(total##r, sum##r, factor, *unit##r);                                   \
        total##r = joined_unit(total##r, by_sums(first, second, split##r), minimum_factor, *unit##r); \
        shares##r += SHARES, split##r += 16, unit##r++;                                               \
    }
#define NIBBLES(i) (ints)(upper ? vld1q_u8(at + 128 * pair + 16 * i) >> 4 : vld1q_u8(at + 128 * pair + 16 * i) & vdupq_n_u8(15))
#define PACKED_Q4_K(name, TIMES)                                                                                \
    static void name(const uint8_t *at, const Activations *a, size_t row, float (*total)[LANES]) {              \
        const size_t units = a->width / UNIT;                                                                   \
        TIMES(OPENED_Q4_K)                                                                                      \
        for (size_t unit = 0; unit < units; unit++, at += PACKED_Q4_K_BYTES) {                                  \
            TIMES(STARTED_Q4_K)                                                                                 \
            UNROLLED for (int pair = 0; pair < 4; pair++) {                                                     \
                int8x8_t multiples = vld1_s8((const int8_t *)at + 512 + 8 * pair);                              \
                fetch_here(at + PACKED_AHEAD + 148 * pair);                                                     \
                fetch_here(at + PACKED_AHEAD + 148 * pair + 64);                                                \
                UNROLLED for (int upper = 0; upper < 2; upper++) {                                              \
                    ints c0 = NIBBLES(0), c1 = NIBBLES(1), c2 = NIBBLES(2), c3 = NIBBLES(3);                    \
                    ints c4 = NIBBLES(4), c5 = NIBBLES(5), c6 = NIBBLES(6), c7 = NIBBLES(7);                    \
                    TIMES(MULTIPLIED_Q4_K)                                                                      \
                }                                                                                               \
            }                                                                                                   \
            ints first = ints_at(at + 544), second = ints_at(at + 560);                                         \
            floats factor = halves_at((const uint16_t *)(at + 576));                                            \
            floats minimum_factor = minus(same(0), halves_at((const uint16_t *)(at + 584)));                    \
            TIMES(JOINED_Q4_K)                                                                                  \
        }                                                                                                       \
        TIMES(CLOSED)                                                                                           \
    }

#define OPENED_Q6_K(r)                                                     \
    floats total##r = same(0);                                             \
    const int8_t *values##r = a->codes + (row + r) * a->width;             \
    const int8_t *shares##r = a->shares + (row + r) * units * SHARES + 48; \
    const float *unit##r = a->units + (row + r) * units;
#define MULTIPLIED_Q6_K(r)                                                                        \
    {                                                                                             \
        ints x = ints_at(values##r + 2 * BLOCK * pair + BLOCK * upper + 16 * half);               \
        ints s = started_at_0(c0, x);                                                             \
        s = DOT_QUAD(s, c1, x, 1), s = DOT_QUAD(s, c2, x, 2), s = DOT_QUAD(s, c3, x, 3);          \
        int16x8_t by = vmull_s8(multiples, vld1_s8(shares##r + 8 * pair));                        \
        sum##r = vmlal_s16(sum##r, vmovn_s32(s), upper ? vget_high_s16(by) : vget_low_s16(by));   \
    }
#define JOINED_Q6_K(r)                                                                     \
    {                                                                                      \
        total##r = joined_unit(total##r, sum##r, factor, *unit##r++);                      \
        values##r += UNIT, shares##r += SHARES;                                            \
    }
#define CODES_OF_Q6_K(i) ints_at(at + 256 * pair + 128 * upper + 64 * half + 16 * i)
#define PACKED_Q6_K(name, TIMES)                                                                          \
    static void name(const uint8_t *at, const Activations *a, size_t row, float (*total)[LANES]) {        \
        const size_t units = a->width / UNIT;                                                             \
        TIMES(OPENED_Q6_K)                                                                                \
        for (size_t unit = 0; unit < units; unit++, at += PACKED_Q6_K_BYTES) {                            \
            TIMES(STARTED_Q4_K)                                                                           \
            UNROLLED for (int pair = 0; pair < 4; pair++) {                                               \
                UNROLLED for (int half = 0; half < 2; half++) {                                           \
                    int8x8_t multiples = vld1_s8((const int8_t *)at + 1024 + 16 * pair + 8 * half);       \
                    fetch_here(at + PACKED_AHEAD / 2 + 276 * pair + 128 * half);                              \
                    fetch_here(at + PACKED_AHEAD / 2 + 276 * pair + 128 * half + 64);                         \
                    UNROLLED for (int upper = 0; upper < 2; upper++) {                                    \
                        ints c0 = CODES_OF_Q6_K(0), c1 = CODES_OF_Q6_K(1);                                \
                        ints c2 = CODES_OF_Q6_K(2), c3 = CODES_OF_Q6_K(3);                                \
                        TIMES(MULTIPLIED_Q6_K)                                                            \
                    }                                                                                     \
                }                                                                                         \
            }                                                                                             \
            floats factor = halves_at((const uint16_t *)(at + 1088));                                     \
            TIMES(JOINED_Q6_K)                                                                            \
        }                                                                                                 \
        TIMES(CLOSED)                                                                                     \
    }

#define ONCE(DO) DO(0)
#define THRICE(DO) TWICE(DO) DO(2)
#define FIVE_TIMES(DO) FOUR_TIMES(DO) DO(4)
#define SIX_TIMES(DO) FIVE_TIMES(DO) DO(5)
#define SEVEN_TIMES(DO) SIX_TIMES(DO) DO(6)
#define PACKED_TYPE(type, bytes)                                \
    PACKED_ROWS(one_packed_##type, ONCE, type, bytes)           \
    PACKED_ROWS(two_packed_##type, TWICE, type, bytes)          \
    PACKED_ROWS(three_packed_##type, THRICE, type, bytes)       \
    PACKED_ROWS(four_packed_##type, FOUR_TIMES, type, bytes)    \
    PACKED_ROWS(five_packed_##type, FIVE_TIMES, type, bytes)    \
    PACKED_ROWS(six_packed_##type, SIX_TIMES, type, bytes)      \
    PACKED_ROWS(seven_packed_##type, SEVEN_TIMES, type, bytes)  \
    PACKED_ROWS(eight_packed_##type, EIGHT_TIMES, type, bytes)
PACKED_TYPE(8, 34)
PACKED_TYPE(6, 22)
PACKED_Q4_K(one_packed_12, ONCE)
PACKED_Q4_K(two_packed_12, TWICE)
PACKED_Q4_K(three_packed_12, THRICE)
PACKED_Q4_K(four_packed_12, FOUR_TIMES)
PACKED_Q6_K(one_packed_14, ONCE)
PACKED_Q6_K(two_packed_14, TWICE)
PACKED_Q6_K(three_packed_14, THRICE)
PACKED_Q6_K(four_packed_14, FOUR_TIMES)

typedef void (*PackedRows)(const uint8_t *at, const Activations *a, size_t row, float (*total)[LANES]);
#define UP_TO_4(type) one_packed_##type, two_packed_##type, three_packed_##type, four_packed_##type
#define UP_TO_8(type) UP_TO_4(type), five_packed_##type, six_packed_##type, seven_packed_##type, eight_packed_##type
static const PackedRows PACKED_8[] = {UP_TO_8(8)}, PACKED_6[] = {UP_TO_8(6)};
static const PackedRows PACKED_12[] = {UP_TO_4(12)}, PACKED_14[] = {UP_TO_4(14)}; /* eight would not fit the registers */

/* As `multiply`, with packed weights. */
static void multiply_packed(const Format *format, Rows weights, const Activations *a, size_t row, size_t rows,
                            float (*total)[LANES]) {
    const int type = format->type - PACKED;
    const PackedRows *by_count = type == 8 ? PACKED_8 : type == 6 ? PACKED_6 : type == 12 ? PACKED_12 : PACKED_14;
    const size_t most = type < 12 ? 8 : 4;
    for (size_t r = 0, count; r < rows; r += count) {
        count = rows - r < most ? rows - r : most;
        by_count[count - 1](weights.at, a, row + r, total + r);
    }
}
