/* Unpacks GGUF blocks: from the bytes of LANES rows to codes, scales and minima.
 *
 * A unit is 256 weights of a row, or the rest of it, in blocks of 32; a weight is
 *     scale * (code - zero) + minimum
 * with one scale per block (two in Q6_K), one minimum per block if the format has any, and codes of 8 bits. Nothing
 * is rounded. In formats of 256 weights scales and minima are small integer multiples of two factors of the unit,
 * and stay integers, so that sums over a unit are exact.
 */
#pragma once
#include "vector.h"

enum { PACKED = 1000 }; /* added to the type of a packed form */
enum { UNIT = 256, BLOCK = 32, BLOCKS = UNIT / BLOCK, QUADS = UNIT / 4 };

/* One unit of LANES rows. Row i of `codes` holds weights 4i to 4i+3 of every lane, lane after lane. */
typedef struct {
    uint8_t codes[QUADS][4 * LANES] __attribute__((aligned(64)));
    float scales[2 * BLOCKS][LANES] __attribute__((aligned(64))); /* of formats of 32 weights, as `minima` */
    float minima[2 * BLOCKS][LANES] __attribute__((aligned(64)));
    uint8_t multiples[2 * BLOCKS][4 * LANES] __attribute__((aligned(64))); /* vectors for join_multiples */
    uint8_t minimum_bytes[BLOCKS / 4][4 * LANES] __attribute__((aligned(64))); /* four in a lane */
    float factor[LANES] __attribute__((aligned(64))), minimum_factor[LANES] __attribute__((aligned(64)));
} Tile;

/* LANES rows of weights. */
typedef struct {
    const uint8_t *at;
    size_t stride;
} Rows;

typedef struct {
    int type;   /* GGUF's number for it */
    int values; /* weights in one stored block */
    int bytes;  /* its size */
    int zero;   /* the zero is 2 to this power; there is none if negative */
    int halves; /* scales for each block of 32 */
    int has_minimum;
    void (*unpack)(Rows rows, size_t unit, int blocks, Tile *tile);
} Format;

INLINE void turned_at(Rows rows, size_t offset, ints out[4]) { turned(rows.at + offset, rows.stride, out); }
/* The same of rows whose words were turned before, if they are `packed`. */
INLINE void columns_at(Rows rows, size_t offset, const int packed, ints out[4]) {
    if (!packed) turned_at(rows, offset, out);
    else for (size_t i = 0; i < 4; i++) out[i] = ints_at(rows.at + (offset + 4 * i) * LANES);
}
INLINE ints masked(ints a, uint8_t mask) { return both(a, same_int(0x01010101 * mask)); }

/* Q4_K and Q5_K: a half-precision scale and minimum for 256 weights, eight 6-bit multiples of each. */
typedef struct {
    ints scales[2], minima[2]; /* four bytes in every lane */
    floats factor, minimum_factor;
} SixBits;

INLINE SixBits six_bits(Rows rows, size_t at, const int packed) {
    ints head[4];
    columns_at(rows, at, packed, head);
    ints a = head[1], b = head[2], c = head[3];
    return (SixBits){
        {masked(a, 0x3f), either(masked(c, 0x0f), masked(right(a, 2), 0x30))},
        {masked(b, 0x3f), either(masked(right(c, 4), 0x0f), masked(right(b, 2), 0x30))},
        low_halves(head[0]),
        minus(same(0), low_halves(right(head[0], 16))),
    };
}

INLINE void six_bit_scales(Rows rows, size_t at, const int packed, Tile *tile) {
    SixBits six = six_bits(rows, at, packed);
    for (int i = 0; i < BLOCKS; i++) put_ints(tile->multiples[i], multiple(six.scales[i / 4], i % 4, 0));
    for (int i = 0; i < 2; i++) put_ints(tile->minimum_bytes[i], six.minima[i]);
    put_floats(tile->factor, six.factor), put_floats(tile->minimum_factor, six.minimum_factor);
}

/* 32 bytes hold two blocks: the first in the low nibbles, the second in the high ones. */
INLINE void q4_k_from(Rows rows, size_t at, const int packed, Tile *tile) {
    for (int i = 0; i < 32; i += 4) {
        ints column[4];
        columns_at(rows, at + 16 + 4 * (size_t)i, packed, column);
        uint8_t(*out)[4 * LANES] = tile->codes + i / 8 * 16 + i % 8;
        for (int j = 0; j < 4; j++) {
            put_ints(out[j], masked(column[j], 0x0f));
            put_ints(out[j + 8], masked(right(column[j], 4), 0x0f));
        }
    }
    six_bit_scales(rows, at, packed, tile);
}
static void unpack_q4_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    q4_k_from(rows, unit * 144, 0, tile);
}

/* Like Q4_K with a fifth bit: that of weight i in block b is bit b of byte i. */
static void unpack_q5_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    size_t at = unit * 176;
    for (int half = 0; half < 2; half++) {
        ints fifth[4];
        turned_at(rows, at + 16 + 16 * (size_t)half, fifth);
        for (int pair = 0; pair < 4; pair++) {
            ints column[4];
            turned_at(rows, at + 48 + 32 * (size_t)pair + 16 * (size_t)half, column);
            uint8_t(*out)[4 * LANES] = tile->codes + 16 * pair + 4 * half;
            for (int j = 0; j < 4; j++) {
                ints low = left(masked(right(fifth[j], 2 * pair), 1), 4);
                ints high = left(masked(right(fifth[j], 2 * pair + 1), 1), 4);
                put_ints(out[j], either(masked(column[j], 0x0f), low));
                put_ints(out[j + 8], either(masked(right(column[j], 4), 0x0f), high));
            }
        }
    }
    six_bit_scales(rows, at, 0, tile);
}

/* 128 weights: four lower bits in 64 bytes, 64 weights apart; two upper bits of four weights in each of 32. */
INLINE void q6_k_from(Rows rows, size_t at, const int packed, Tile *tile) {
    for (int i = 0; i < 16; i += 4) {
        int half = i / 8, from = i % 8;
        ints first[4], second[4], upper[4];
        columns_at(rows, at + 64 * (size_t)half + 4 * (size_t)from, packed, first);
        columns_at(rows, at + 64 * (size_t)half + 32 + 4 * (size_t)from, packed, second);
        columns_at(rows, at + 128 + 4 * (size_t)i, packed, upper);
        for (int j = 0; j < 4; j++) {
            uint8_t(*out)[4 * LANES] = tile->codes + 32 * half + from + j;
            put_ints(out[0], either(masked(first[j], 0x0f), left(masked(upper[j], 0x03), 4)));
            put_ints(out[8], either(masked(second[j], 0x0f), left(masked(upper[j], 0x0c), 2)));
            put_ints(out[16], either(masked(right(first[j], 4), 0x0f), masked(upper[j], 0x30)));
            put_ints(out[24], either(masked(right(second[j], 4), 0x0f), right(masked(upper[j], 0xc0), 2)));
        }
    }
    ints four[4], tail[4];
    columns_at(rows, at + 192, packed, four);
    if (packed) tail[3] = left(ints_at(rows.at + (at + 208) * LANES), 16);
    else turned_at(rows, at + 194, tail);
    put_floats(tile->factor, low_halves(right(tail[3], 16)));
    for (int i = 0; i < 16; i++) put_ints(tile->multiples[i], multiple(four[i / 4], i % 4, 1));
}
static void unpack_q6_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    q6_k_from(rows, unit * 210, 0, tile);
}

/* Q3_K: two lower bits like Q6_K's upper ones, a third in bit `block` of 32 bytes, and 6-bit multiples, less 32, of one
 * scale: the lower four bits of 16 in 8 bytes, the upper two in 4. */
static void unpack_q3_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    size_t at = unit * 110;
    ints head[4], tail[4];
    for (int i = 0; i < 32; i += 16) {
        ints third[4], lower[4];
        turned_at(rows, at + (size_t)i, third);
        for (int half = 0; half < 2; half++) {
            turned_at(rows, at + 32 + 32 * (size_t)half + (size_t)i, lower);
            for (int j = 0; j < 4; j++) {
                for (int part = 0; part < 4; part++) {
                    int block = 4 * half + part;
                    ints upper = left(masked(right(third[j], block), 1), 2);
                    put_ints(tile->codes[8 * block + i / 4 + j], either(masked(right(lower[j], 2 * part), 3), upper));
                }
            }
        }
    }
    turned_at(rows, at + 94, tail); /* the last 16 bytes: multiples from the third on, then the scale */
    turned_at(rows, at + 92, head); /* the last four bytes of codes, then the multiples */
    ints a = head[1], b = head[2], c = head[3];
    put_floats(tile->factor, low_halves(right(tail[3], 16)));
    ints four[4] = {either(masked(a, 15), left(masked(c, 3), 4)), either(masked(b, 15), left(masked(right(c, 2), 3), 4)),
                    either(masked(right(a, 4), 15), left(masked(right(c, 4), 3), 4)),
                    either(masked(right(b, 4), 15), left(masked(right(c, 6), 3), 4))};
    for (int i = 0; i < 4; i++) { /* less 32: the sixth bit turned over is the sign */
        ints turned_over = differing(four[i], same_int(0x20202020)), sign = masked(turned_over, 0x20);
        four[i] = either(turned_over, either(left(sign, 1), left(sign, 2)));
    }
    for (int i = 0; i < 16; i++) put_ints(tile->multiples[i], multiple(four[i / 4], i % 4, 1));
}

/* Q2_K: 16 bytes with a scale and a minimum, four bits each, for 16 weights; two bits for each weight as in Q3_K; then
 * the factors of scales and minima. */
static void unpack_q2_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    size_t at = unit * 84;
    for (int i = 0; i < 64; i += 16) {
        ints column[4];
        turned_at(rows, at + 16 + (size_t)i, column);
        for (int j = 0; j < 4; j++) {
            for (int part = 0; part < 4; part++)
                put_ints(tile->codes[8 * (4 * (i / 32) + part) + i % 32 / 4 + j], masked(right(column[j], 2 * part), 3));
        }
    }
    ints pairs[4], tail[4];
    turned_at(rows, at, pairs);
    turned_at(rows, at + 68, tail);
    floats factor = low_halves(tail[3]), minimum_factor = minus(same(0), low_halves(right(tail[3], 16)));
    for (int i = 0; i < 16; i++) {
        ints pair = right(pairs[i / 4], 8 * (i % 4));
        put_floats(tile->scales[i], times(factor, floats_of(both(pair, same_int(15)))));
        put_floats(tile->minima[i], times(minimum_factor, floats_of(both(right(pair, 4), same_int(15)))));
    }
}

/* The older formats: blocks of 32 weights, each with a half-precision scale, optionally a minimum and 32 fifth
 * bits, and 16 bytes: weights 0 to 15 in the low nibbles, 16 to 31 in the high ones. */
INLINE void unpack_old(Rows rows, size_t unit, int blocks, size_t bytes, int has_minimum, int fifths, Tile *tile) {
    for (int block = 0; block < blocks; block++) {
        size_t at = (unit * BLOCKS + (size_t)block) * bytes;
        ints head[4], column[4];
        turned_at(rows, at, head);
        turned_at(rows, at + bytes - 16, column);
        put_floats(tile->scales[block], low_halves(head[0]));
        if (has_minimum) put_floats(tile->minima[block], low_halves(right(head[0], 16)));
        ints fifth = has_minimum ? head[1] : either(right(head[0], 16), left(head[1], 16));
        for (int i = 0; i < 4; i++) {
            ints low = masked(column[i], 0x0f), high = masked(right(column[i], 4), 0x0f);
            if (fifths) { /* bit j belongs to weight j: four bits are spread over four bytes */
                ints l = both(right(fifth, 4 * i), same_int(15)), h = both(right(fifth, 16 + 4 * i), same_int(15));
                l = masked(either(either(l, left(l, 7)), either(left(l, 14), left(l, 21))), 1);
                h = masked(either(either(h, left(h, 7)), either(left(h, 14), left(h, 21))), 1);
                low = either(low, left(l, 4)), high = either(high, left(h, 4));
            }
            put_ints(tile->codes[8 * block + i], low);
            put_ints(tile->codes[8 * block + 4 + i], high);
        }
    }
}

static void unpack_q4_0(Rows rows, size_t unit, int blocks, Tile *tile) {
    unpack_old(rows, unit, blocks, 18, 0, 0, tile);
}
static void unpack_q4_1(Rows rows, size_t unit, int blocks, Tile *tile) {
    unpack_old(rows, unit, blocks, 20, 1, 0, tile);
}
static void unpack_q5_0(Rows rows, size_t unit, int blocks, Tile *tile) {
    unpack_old(rows, unit, blocks, 22, 0, 1, tile);
}
static void unpack_q5_1(Rows rows, size_t unit, int blocks, Tile *tile) {
    unpack_old(rows, unit, blocks, 24, 1, 1, tile);
}

/* Signed bytes; adding 128 makes codes of them. */
static void unpack_q8_0(Rows rows, size_t unit, int blocks, Tile *tile) {
    for (int block = 0; block < blocks; block++) {
        size_t at = (unit * BLOCKS + (size_t)block) * 34;
        ints head[4], column[8];
        turned_at(rows, at, head);
        turned_at(rows, at + 2, column);
        turned_at(rows, at + 18, column + 4);
        put_floats(tile->scales[block], low_halves(head[0]));
        for (int i = 0; i < 8; i++)
            put_ints(tile->codes[8 * block + i], differing(column[i], same_int((int32_t)0x80808080)));
    }
}

/* The values of 4-bit codes, four of them in each lane. */
INLINE ints looked_up(ints nibbles, const uint8_t values[16]) {
#if defined(__x86_64__)
    __m128i table = _mm_loadu_si128((const __m128i *)values);
#if LANES == 16
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
#else
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
#endif
#else
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(values), vreinterpretq_u8_s32(nibbles)));
#endif
}

/* 16 bytes of codes with 32 values from a table: weights 0 to 15 in the low nibbles, 16 to 31 in the high ones. */
INLINE void unpack_looked_up(Rows rows, size_t at, int block, const uint8_t values[16], Tile *tile) {
    ints column[4];
    turned_at(rows, at, column);
    for (int i = 0; i < 4; i++) {
        put_ints(tile->codes[8 * block + i], looked_up(masked(column[i], 0x0f), values));
        put_ints(tile->codes[8 * block + 4 + i], looked_up(masked(right(column[i], 4), 0x0f), values));
    }
}

/* MXFP4: an exponent and 32 numbers of four bits. Doubled they are whole: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives,
 * to which the zero 16 is added. */
static const uint8_t MXFP4_VALUES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

/* 2 to the power of exponent - 128, as a denormal where it is too small. */
INLINE uint32_t mxfp4_scale(uint8_t exponent) { return exponent >= 2 ? (uint32_t)(exponent - 1) << 23 : 0x00200000u << exponent; }

static void unpack_mxfp4(Rows rows, size_t unit, int blocks, Tile *tile) {
    for (int block = 0; block < blocks; block++) {
        size_t at = (unit * BLOCKS + (size_t)block) * 17;
        for (size_t lane = 0; lane < LANES; lane++) {
            uint32_t bits = mxfp4_scale(rows.at[lane * rows.stride + at]);
            memcpy(&tile->scales[block][lane], &bits, 4);
        }
        unpack_looked_up(rows, at + 1, block, MXFP4_VALUES, tile);
    }
}

/* IQ4_NL: like Q4_0 with values from a table, to which 128 is added. IQ4_XS: eight such blocks with 6-bit multiples of
 * one scale. */
static const uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

static void unpack_iq4_nl(Rows rows, size_t unit, int blocks, Tile *tile) {
    for (int block = 0; block < blocks; block++) {
        size_t at = (unit * BLOCKS + (size_t)block) * 18;
        ints head[4];
        turned_at(rows, at, head);
        put_floats(tile->scales[block], low_halves(head[0]));
        unpack_looked_up(rows, at + 2, block, IQ4_VALUES, tile);
    }
}

static void unpack_iq4_xs(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    size_t at = unit * 136;
    ints head[4];
    turned_at(rows, at, head);
    float factor[LANES];
    put_floats(factor, low_halves(head[0]));
    for (int block = 0; block < BLOCKS; block++) {
        unpack_looked_up(rows, at + 8 + 16 * (size_t)block, block, IQ4_VALUES, tile);
        for (size_t lane = 0; lane < LANES; lane++) {
            const uint8_t *row = rows.at + lane * rows.stride + at;
            int upper = (row[2] | row[3] << 8) >> 2 * block & 3, lower = row[4 + block / 2] >> 4 * (block % 2) & 15;
            tile->scales[block][lane] = factor[lane] * (float)((lower | upper << 4) - 32);
        }
    }
}

static const Format FORMATS[] = {
    {2, 32, 18, 3, 1, 0, unpack_q4_0},     {3, 32, 20, -1, 1, 1, unpack_q4_1},
    {6, 32, 22, 4, 1, 0, unpack_q5_0},     {7, 32, 24, -1, 1, 1, unpack_q5_1},
    {8, 32, 34, 7, 1, 0, unpack_q8_0},     {12, 256, 144, -1, 1, 1, unpack_q4_k},
    {13, 256, 176, -1, 1, 1, unpack_q5_k}, {14, 256, 210, 5, 2, 0, unpack_q6_k},
    {39, 32, 17, 4, 1, 0, unpack_mxfp4},   {20, 32, 18, 7, 1, 0, unpack_iq4_nl},
    {23, 256, 136, 7, 1, 0, unpack_iq4_xs}, {11, 256, 110, 2, 2, 0, unpack_q3_k},
    {10, 256, 84, -1, 2, 1, unpack_q2_k},
};

static const Format *format_of(int64_t type) {
    for (size_t i = 0; i < sizeof FORMATS / sizeof *FORMATS; i++) {
        if (FORMATS[i].type == type) return FORMATS + i;
    }
    return NULL;
}

/* Whether a unit has one scale and its blocks small multiples; the codes of IQ4_XS are too large for such sums, and the
 * minima of Q2_K too many. */
INLINE int is_large(const Format *format) { return format->values == UNIT && format->type != 23 && format->type != 10; }

/* The scale of weight `i` of a tile's unit, and its minimum. */
INLINE float scale_at(const Format *format, const Tile *tile, size_t i, size_t lane) {
    size_t part = i * (size_t)format->halves / BLOCK;
    if (!is_large(format)) return tile->scales[part][lane];
    return tile->factor[lane] * (float)multiple_at(tile->multiples[part], lane);
}
INLINE float minimum_at(const Format *format, const Tile *tile, size_t i, size_t lane) {
    size_t block = i / BLOCK;
    if (!format->has_minimum) return 0;
    if (!is_large(format)) return tile->minima[i * (size_t)format->halves / BLOCK][lane];
    return tile->minimum_factor[lane] * (float)tile->minimum_bytes[block / 4][4 * lane + block % 4];
}

INLINE size_t row_bytes(const Format *format, size_t width) {
    return width / (size_t)format->values * (size_t)format->bytes;
}
