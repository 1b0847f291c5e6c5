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

enum { UNIT = 256, BLOCK = 32, BLOCKS = UNIT / BLOCK, QUADS = UNIT / 4 };

/* One unit of LANES rows. Row i of `codes` holds weights 4i to 4i+3 of every lane, lane after lane. */
typedef struct {
    uint8_t codes[QUADS][4 * LANES] __attribute__((aligned(64)));
    float scales[2 * BLOCKS][LANES] __attribute__((aligned(64))); /* of formats of 32 weights, as `minima` */
    float minima[BLOCKS][LANES] __attribute__((aligned(64)));
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
INLINE ints masked(ints a, uint8_t mask) { return both(a, same_int(0x01010101 * mask)); }

/* Q4_K and Q5_K: a half-precision scale and minimum for 256 weights, eight 6-bit multiples of each. */
typedef struct {
    ints scales[2], minima[2]; /* four bytes in every lane */
    floats factor, minimum_factor;
} SixBits;

INLINE SixBits six_bits(Rows rows, size_t at) {
    ints head[4];
    turned_at(rows, at, head);
    ints a = head[1], b = head[2], c = head[3];
    return (SixBits){
        {masked(a, 0x3f), either(masked(c, 0x0f), masked(right(a, 2), 0x30))},
        {masked(b, 0x3f), either(masked(right(c, 4), 0x0f), masked(right(b, 2), 0x30))},
        low_halves(head[0]),
        minus(same(0), low_halves(right(head[0], 16))),
    };
}

INLINE void six_bit_scales(Rows rows, size_t at, Tile *tile) {
    SixBits six = six_bits(rows, at);
    for (int i = 0; i < BLOCKS; i++) put_ints(tile->multiples[i], multiple(six.scales[i / 4], i % 4, 0));
    for (int i = 0; i < 2; i++) put_ints(tile->minimum_bytes[i], six.minima[i]);
    put_floats(tile->factor, six.factor), put_floats(tile->minimum_factor, six.minimum_factor);
}

/* 32 bytes hold two blocks: the first in the low nibbles, the second in the high ones. */
static void unpack_q4_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    size_t at = unit * 144;
    for (int i = 0; i < 32; i += 4) {
        ints column[4];
        turned_at(rows, at + 16 + 4 * (size_t)i, column);
        uint8_t(*out)[4 * LANES] = tile->codes + i / 8 * 16 + i % 8;
        for (int j = 0; j < 4; j++) {
            put_ints(out[j], masked(column[j], 0x0f));
            put_ints(out[j + 8], masked(right(column[j], 4), 0x0f));
        }
    }
    six_bit_scales(rows, at, tile);
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
    six_bit_scales(rows, at, tile);
}

/* 128 weights: four lower bits in 64 bytes, 64 weights apart; two upper bits of four weights in each of 32. */
static void unpack_q6_k(Rows rows, size_t unit, int blocks, Tile *tile) {
    (void)blocks;
    size_t at = unit * 210;
    for (int i = 0; i < 16; i += 4) {
        int half = i / 8, from = i % 8;
        ints first[4], second[4], upper[4];
        turned_at(rows, at + 64 * (size_t)half + 4 * (size_t)from, first);
        turned_at(rows, at + 64 * (size_t)half + 32 + 4 * (size_t)from, second);
        turned_at(rows, at + 128 + 4 * (size_t)i, upper);
        for (int j = 0; j < 4; j++) {
            uint8_t(*out)[4 * LANES] = tile->codes + 32 * half + from + j;
            put_ints(out[0], either(masked(first[j], 0x0f), left(masked(upper[j], 0x03), 4)));
            put_ints(out[8], either(masked(second[j], 0x0f), left(masked(upper[j], 0x0c), 2)));
            put_ints(out[16], either(masked(right(first[j], 4), 0x0f), masked(upper[j], 0x30)));
            put_ints(out[24], either(masked(right(second[j], 4), 0x0f), right(masked(upper[j], 0xc0), 2)));
        }
    }
    ints four[4], tail[4];
    turned_at(rows, at + 192, four);
    turned_at(rows, at + 194, tail);
    put_floats(tile->factor, low_halves(right(tail[3], 16)));
    for (int i = 0; i < 16; i++) put_ints(tile->multiples[i], multiple(four[i / 4], i % 4, 1));
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

static const Format FORMATS[] = {
    {2, 32, 18, 3, 1, 0, unpack_q4_0},     {3, 32, 20, -1, 1, 1, unpack_q4_1},
    {6, 32, 22, 4, 1, 0, unpack_q5_0},     {7, 32, 24, -1, 1, 1, unpack_q5_1},
    {8, 32, 34, 7, 1, 0, unpack_q8_0},     {12, 256, 144, -1, 1, 1, unpack_q4_k},
    {13, 256, 176, -1, 1, 1, unpack_q5_k}, {14, 256, 210, 5, 2, 0, unpack_q6_k},
};

static const Format *format_of(int64_t type) {
    for (size_t i = 0; i < sizeof FORMATS / sizeof *FORMATS; i++) {
        if (FORMATS[i].type == type) return FORMATS + i;
    }
    return NULL;
}

INLINE int is_large(const Format *format) { return format->values == UNIT; }

/* The scale of weight `i` of a tile's unit, and its minimum. */
INLINE float scale_at(const Format *format, const Tile *tile, size_t i, size_t lane) {
    size_t part = i * (size_t)format->halves / BLOCK;
    if (!is_large(format)) return tile->scales[part][lane];
    return tile->factor[lane] * (float)multiple_at(tile->multiples[part], lane);
}
INLINE float minimum_at(const Format *format, const Tile *tile, size_t i, size_t lane) {
    size_t block = i / BLOCK;
    if (!format->has_minimum) return 0;
    if (!is_large(format)) return tile->minima[block][lane];
    return tile->minimum_factor[lane] * (float)tile->minimum_bytes[block / 4][4 * lane + block % 4];
}

INLINE size_t row_bytes(const Format *format, size_t width) {
    return width / (size_t)format->values * (size_t)format->bytes;
}
