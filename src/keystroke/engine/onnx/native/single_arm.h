/* One row of activations with weights while they are unpacked, on 64-bit ARM: most of decoding is this.
 *
 * Law: the same terms in the same order as in `meet` of product.h, so the same bits. Weights are not turned:
 * a row's codes meet the values as they lie in memory, and only the sums of a block, which are integers and
 * so the same in any order, are put side by side. Scales and minima are products of a half-precision number
 * and a small integer that single precision holds, in whichever way they are computed.
 */
#pragma once
#include "activations.h"

/* The codes of 16 weights: those from 16 * part on in block `block` of the unit that a row has at `at`. */
INLINE ints sixteen_codes(const int type, const uint8_t *at, int block, int part) {
    const uint8x16_t low = vdupq_n_u8(15);
    uint8x16_t codes;
    if (type == 12 || type == 13) {
        uint8x16_t two = vld1q_u8(at + (type == 12 ? 16 : 48) + 32 * (block / 2) + 16 * part);
        codes = block % 2 ? two >> 4 : two & low;
        if (type == 13) {
            uint8x16_t fifth = vld1q_u8(at + 16 + 16 * part);
            fifth = block < 4 ? fifth << (4 - block) : fifth >> (block - 4);
            codes |= fifth & vdupq_n_u8(16);
        }
    } else if (type == 14) {
        int quarter = block % 4;
        uint8x16_t two = vld1q_u8(at + 64 * (block / 4) + 32 * (quarter % 2) + 16 * part);
        uint8x16_t upper = vld1q_u8(at + 128 + 32 * (block / 4) + 16 * part);
        upper = (quarter < 2 ? upper << (4 - 2 * quarter) : upper >> (2 * quarter - 4)) & vdupq_n_u8(0x30);
        codes = quarter < 2 ? vbslq_u8(low, two, upper) : vsriq_n_u8(upper, two, 4);
    } else if (type == 8) {
        codes = vld1q_u8(at + 34 * block + 2 + 16 * part);
    } else {
        int bytes = type == 2 ? 18 : type == 3 ? 20 : type == 6 ? 22 : 24;
        const uint8_t *stored = at + bytes * (block + 1) - 16;
        uint8x16_t two = vld1q_u8(stored);
        codes = part ? two >> 4 : two & low;
        if (type == 6 || type == 7) { /* bit i of 16 belongs to weight i */
            const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
            uint8x16_t bits = vcombine_u8(vdup_n_u8(stored[2 * part - 4]), vdup_n_u8(stored[2 * part - 3]));
            codes |= vtstq_u8(bits, bit) & vdupq_n_u8(16);
        }
    }
    return vreinterpretq_s32_u8(codes);
}

/* The products of 16 bytes, four in each lane; with those of 16 more. A zero that is written next to its use costs
 * nothing; the compilers would rather copy one that they keep. */
INLINE ints dot_16(ints codes, ints values) {
#if defined(__ARM_FEATURE_DOTPROD)
    ints products;
    __asm__("movi %0.4s, #0\n\tsdot %0.4s, %1.16b, %2.16b" : "=&w"(products) : "w"(codes), "w"(values));
    return products;
#else
    return dot(same_int(0), codes, values);
#endif
}
INLINE ints dot_32(const ints codes[2], const ints values[2]) {
    return dot(dot_16(codes[0], values[0]), codes[1], values[1]);
}

/* A half-precision number of each row. */
INLINE floats half_of_rows(Rows rows, size_t at) {
    const uint16_t *first = (const uint16_t *)(rows.at + at), *second = (const uint16_t *)(rows.at + rows.stride + at);
    const uint16_t *third = (const uint16_t *)(rows.at + 2 * rows.stride + at);
    const uint16_t *fourth = (const uint16_t *)(rows.at + 3 * rows.stride + at);
    uint16x4_t halves = vld1_dup_u16(first);
    halves = vld1_lane_u16(second, halves, 1);
    halves = vld1_lane_u16(third, halves, 2);
    halves = vld1_lane_u16(fourth, halves, 3);
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

/* 2^23 and byte `index` of every lane. */
INLINE floats large_byte(ints a, int index) {
    uint32x4_t place = vaddq_u32(vdupq_n_u32(0xffffff00u + (uint32_t)index), (uint32x4_t){0, 4, 8, 12});
    uint8x16_t byte = vqtbl1q_u8(vreinterpretq_u8_s32(a), vreinterpretq_u8_u32(place));
    return as_floats(either(vreinterpretq_s32_u8(byte), same_int(0x4b000000)));
}

/* What the rows of a unit say of its scales: small integers, LANES rows by four blocks each, and what they are
 * multiples of. */
typedef struct {
    ints scales[4], minima[2];
    floats scale, minimum;
} Heads;

INLINE void read_heads(const int type, Rows rows, size_t at, Heads *h) {
    if (type == 12 || type == 13) {
        ints head[4];
        turned_at(rows, at, head);
        ints a = head[1], b = head[2], c = head[3];
        h->scales[0] = masked(a, 0x3f), h->scales[1] = either(masked(c, 0x0f), masked(right(a, 2), 0x30));
        h->minima[0] = masked(b, 0x3f), h->minima[1] = either(masked(right(c, 4), 0x0f), masked(right(b, 2), 0x30));
        h->scale = low_halves(head[0]), h->minimum = minus(same(0), low_halves(right(head[0], 16)));
    } else if (type == 14) {
        turned_at(rows, at + 192, h->scales);
        for (int i = 0; i < 4; i++) h->scales[i] = differing(h->scales[i], same_int((int32_t)0x80808080));
        h->scale = half_of_rows(rows, at + 208);
    }
}

/* Block `block` joins the total. */
INLINE floats meet_block(const int type, Rows rows, size_t at, const int block, const Heads *h, Slice s, floats total) {
    const int halves = type == 14 ? 2 : 1, zero = type == 14 ? 5 : type == 2 ? 3 : type == 6 ? 4 : -1;
    ints values[2] = {ints_at(s.codes + BLOCK * block), ints_at(s.codes + BLOCK * block + 16)};
    for (int half = 0; half < halves; half++) {
        ints each[LANES];
        for (size_t i = 0; i < LANES; i++) {
            const uint8_t *row = rows.at + i * rows.stride + at;
            ints codes[2] = {sixteen_codes(type, row, block, half)};
            if (halves == 1) codes[1] = sixteen_codes(type, row, block, 1);
            each[i] = halves == 1 ? dot_32(codes, values) : dot_16(codes[0], values[half]);
        }
        ints products = vpaddq_s32(vpaddq_s32(each[0], each[1]), vpaddq_s32(each[2], each[3]));
        const int32_t *sums = s.counts + 2 * block;
        products = plus(products, same_int(NOTHING + (zero < 0 ? 0 : (halves == 2 ? sums[half] : sums[0] + sums[1]) * (1 << (zero & 31)))));
        floats weight_scale;
        if (type == 12 || type == 13) {
            weight_scale = times(h->scale, minus(large_byte(h->scales[block / 4], block % 4), same(0x1p23f)));
        } else if (type == 14) {
            floats multiple = large_byte(h->scales[block / 2], 2 * (block % 2) + half);
            weight_scale = times(h->scale, minus(multiple, same(0x1p23f + 128)));
        } else weight_scale = half_of_rows(rows, at);
        total = joined(total, products, weight_scale, s.scales[block]);
    }
    if (type == 12 || type == 13) {
        floats minimum = times(h->minimum, minus(large_byte(h->minima[block / 4], block % 4), same(0x1p23f)));
        total = times_plus(minimum, same(s.sums[block]), total);
    } else if (type == 3 || type == 7) total = times_plus(half_of_rows(rows, at + 2), same(s.sums[block]), total);
    return total;
}

/* Formats of 256 weights: blocks differ in how they are unpacked, so each is written out. */
INLINE floats meet_large(const int type, Rows rows, size_t at, Slice s, floats total) {
    Heads h;
    read_heads(type, rows, at, &h);
    total = meet_block(type, rows, at, 0, &h, s, total);
    total = meet_block(type, rows, at, 1, &h, s, total);
    total = meet_block(type, rows, at, 2, &h, s, total);
    total = meet_block(type, rows, at, 3, &h, s, total);
    total = meet_block(type, rows, at, 4, &h, s, total);
    total = meet_block(type, rows, at, 5, &h, s, total);
    total = meet_block(type, rows, at, 6, &h, s, total);
    return meet_block(type, rows, at, 7, &h, s, total);
}

/* Formats of 32 weights: every block is the first of what follows. */
INLINE floats meet_small(const int type, Rows rows, size_t at, size_t bytes, int blocks, Slice s, floats total) {
    for (int block = 0; block < blocks; block++, at += bytes) {
        total = meet_block(type, rows, at, 0, NULL, s, total);
        s.codes += BLOCK, s.scales++, s.sums++, s.counts += 2;
    }
    return total;
}

INLINE int has_single(const Format *format) { return (void)format, 1; }

/* One row meets one unit, without a tile in between. */
INLINE floats meet_single(const Format *format, Rows rows, size_t unit, int blocks, Slice s, floats total) {
    size_t bytes = (size_t)format->bytes, at = unit * bytes * (size_t)(UNIT / format->values);
    switch (format->type) {
    case 12: return meet_large(12, rows, at, s, total);
    case 13: return meet_large(13, rows, at, s, total);
    case 14: return meet_large(14, rows, at, s, total);
    case 8: return meet_small(8, rows, at, 34, blocks, s, total);
    case 2: return meet_small(2, rows, at, 18, blocks, s, total);
    case 3: return meet_small(3, rows, at, 20, blocks, s, total);
    case 6: return meet_small(6, rows, at, 22, blocks, s, total);
    default: return meet_small(7, rows, at, 24, blocks, s, total);
    }
}
