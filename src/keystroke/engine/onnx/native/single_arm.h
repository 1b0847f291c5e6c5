/* Multiplies one row of activations with weights while they are unpacked, on 64-bit ARM: most of decoding.
 *
 * The same terms in the same order as in product.h, so that the bits are the same. Weights are not transposed: only
 * the sums of a block, which are integers and independent of the order, are rearranged. In 256-weight formats the
 * final sums fit 16 bits, so that intermediate overflow is harmless.
 */
#pragma once
#include "activations.h"

/* The codes of 16 weights from 16 * part on in block `block` of the unit at `at`. */
INLINE ints sixteen_codes(const int type, const uint8_t *at, int block, int part) {
    const uint8x16_t low = vdupq_n_u8(15);
    uint8x16_t codes;
    if (type == 13) {
        uint8x16_t two = vld1q_u8(at + 48 + 32 * (block / 2) + 16 * part), fifth = vld1q_u8(at + 16 + 16 * part);
        fifth = block < 4 ? fifth << (4 - block) : fifth >> (block - 4);
        codes = (block % 2 ? two >> 4 : two & low) | (fifth & vdupq_n_u8(16));
    } else if (type == 8) {
        codes = vld1q_u8(at + 34 * block + 2 + 16 * part);
    } else if (type == 20) {
        uint8x16_t two = vld1q_u8(at + 18 * block + 2);
        codes = vqtbl1q_u8(vld1q_u8(IQ4_VALUES), part ? two >> 4 : two & low) ^ vdupq_n_u8(0x80); /* signed, as those of Q8_0 */
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

/* The products of 16 bytes, four per lane, plus `start` in the first. Loading `start` here is nearly free; compilers
 * would keep and copy it, which costs as much as a product. */
INLINE ints dot_16(const int32_t *start, ints codes, ints values) {
#if defined(__ARM_FEATURE_DOTPROD)
    ints products;
    __asm__("ldr %s0, %3\n\tsdot %0.4s, %1.16b, %2.16b" : "=&w"(products) : "w"(codes), "w"(values), "m"(*start));
    return products;
#else
    return dot(vsetq_lane_s32(*start, same_int(0), 0), codes, values);
#endif
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

/* Unrolls loops over blocks and rows, since registers cannot be indexed. */
#define UNROLLED _Pragma("GCC unroll 8")

static const int32_t nothing = NOTHING;

/* Q4_K: block `2 * pair` of a row in the first half of the sums, `2 * pair + 1` in the second, as four partial sums
 * each. One asm block, because compilers would choose a slower order of instructions. */
INLINE int16x8_t pair_of_q4_k(const uint8_t *at, int pair, const ints values[4]) {
    uint8x16_t first = vld1q_u8(at + 16 + 32 * pair), second = vld1q_u8(at + 32 + 32 * pair), low = vdupq_n_u8(15);
#if defined(__ARM_FEATURE_DOTPROD)
    ints lower, upper;
    __asm__("movi %0.4s, #0\n\tsdot %0.4s, %1.16b, %2.16b\n\tsdot %0.4s, %3.16b, %4.16b"
            : "=&w"(lower) : "w"(first & low), "w"(values[0]), "w"(second & low), "w"(values[1]));
    __asm__("movi %0.4s, #0\n\tsdot %0.4s, %1.16b, %2.16b\n\tsdot %0.4s, %3.16b, %4.16b"
            : "=&w"(upper) : "w"(first >> 4), "w"(values[2]), "w"(second >> 4), "w"(values[3]));
#else
    ints lower = dot(dot(same_int(0), (ints)(first & low), values[0]), (ints)(second & low), values[1]);
    ints upper = dot(dot(same_int(0), (ints)(first >> 4), values[2]), (ints)(second >> 4), values[3]);
#endif
    return packed(lower, upper);
}

/* The same for Q5_K. Its codes are up to 31: only sums of codes minus 16 fit 16 bits, and `meet_six_bits` adds the
 * difference. */
enum { LIFT = 4 };
INLINE int16x8_t pair_of_q5_k(const uint8_t *at, int pair, const ints values[4], const int32_t *starts) {
    ints sums[2];
    for (int i = 0; i < 2; i++) {
        sums[i] = dot_16(starts + i, sixteen_codes(13, at, 2 * pair + i, 0), values[2 * i]);
        sums[i] = dot(sums[i], sixteen_codes(13, at, 2 * pair + i, 1), values[2 * i + 1]);
    }
    return packed(sums[0], sums[1]);
}

/* Q4_K and Q5_K, one unit. */
INLINE floats meet_six_bits(const int type, Rows rows, size_t unit, Slice s, floats total) {
    const size_t bytes = type == 12 ? 144 : 176, at = unit * bytes;
    SixBits six = six_bits(rows, at);
    int16x8_t first = vreinterpretq_s16_s32(six.scales[0]), second = vreinterpretq_s16_s32(six.scales[1]);
    const int16x8_t in_pairs[2] = {vuzp1q_s16(first, second), vuzp2q_s16(first, second)}; /* as the shares have them */
    ints products[2] = {same_int(0), same_int(0)}; /* of two rows each, two in a row */
    UNROLLED for (int pair = 0; pair < 4; pair++) {
        fetch_ahead(rows, unit, bytes, (size_t)pair, 4);
        ints values[4];
        int16x8_t each[LANES];
        int32_t starts[2];
        UNROLLED for (int i = 0; i < 4; i++) values[i] = ints_at(s.codes + 2 * BLOCK * pair + 16 * i);
        UNROLLED for (int i = 0; i < 2; i++) starts[i] = start_of(s.counts + 2 * (2 * pair + i), 0, LIFT, 1);
        UNROLLED for (size_t i = 0; i < LANES; i++) {
            const uint8_t *row = rows.at + i * rows.stride + at;
            each[i] = type == 12 ? pair_of_q4_k(row, pair, values) : pair_of_q5_k(row, pair, values, starts);
        }
        int16x8_t sums = vpaddq_s16(vpaddq_s16(each[0], each[1]), vpaddq_s16(each[2], each[3]));
        int8x16_t scales = vreinterpretq_s8_s16(in_pairs[pair % 2]), shares = vld1q_s8(s.shares + 16 * (pair % 2));
        int16x8_t by = pair < 2 ? vmull_s8(vget_low_s8(scales), vget_low_s8(shares)) : vmull_high_s8(scales, shares);
        products[0] = vmlal_s16(products[0], vget_low_s16(sums), vget_low_s16(by));
        products[1] = vmlal_high_s16(products[1], sums, by);
    }
    ints joint = vpaddq_s32(products[0], products[1]);
    if (type == 13) joint = plus(joint, left(by_sums(six.scales[0], six.scales[1], s.split), LIFT));
    total = joined_unit(total, joint, six.factor, *s.unit);
    return joined_unit(total, by_sums(six.minima[0], six.minima[1], s.split), six.minimum_factor, *s.unit);
}

/* Q6_K, 128 weights of a row: the sums of the first halves of four blocks, then of the second, as two partial sums. */
INLINE int16x8_t half_blocks_of_q6_k(const uint8_t *at, int part, int half, const ints values[4], const int32_t *starts) {
    uint8x16_t first = vld1q_u8(at + 64 * part + 16 * half), second = vld1q_u8(at + 64 * part + 32 + 16 * half);
    uint8x16_t upper = vld1q_u8(at + 128 + 32 * part + 16 * half), higher = upper >> 2, six = vdupq_n_u8(0x3f);
    ints codes[4] = {
        (ints)(vsliq_n_u8(first, upper, 4) & six),
        (ints)(vsliq_n_u8(second, higher, 4) & six),
        (ints)vsriq_n_u8(upper & vdupq_n_u8(0x30), first, 4),
        (ints)vsriq_n_u8(higher, second, 4),
    };
    ints sums[4];
    for (int i = 0; i < 4; i++) sums[i] = dot_16(starts + 2 * i, codes[i], values[i]);
    return vpaddq_s16(packed(sums[0], sums[1]), packed(sums[2], sums[3]));
}

INLINE floats meet_q6_k(Rows rows, size_t unit, Slice s, floats total) {
    const size_t at = unit * 210;
    ints products[LANES] = {same_int(0), same_int(0), same_int(0), same_int(0)};
    const uint8x16_t in_halves = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    const int8x16_t shares = vld1q_s8(s.shares + 32);
    UNROLLED for (int part = 0; part < 2; part++) {
        int16x8_t each[LANES][2];
        UNROLLED for (int half = 0; half < 2; half++) {
            fetch_ahead(rows, unit, 210, (size_t)(2 * part + half), 4);
            ints values[4];
            UNROLLED for (int i = 0; i < 4; i++) values[i] = ints_at(s.codes + 4 * BLOCK * part + BLOCK * i + 16 * half);
            UNROLLED for (size_t i = 0; i < LANES; i++)
                each[i][half] = half_blocks_of_q6_k(rows.at + i * rows.stride + at, part, half, values, s.counts + 8 * part + half);
        }
        UNROLLED for (size_t i = 0; i < LANES; i++) {
            int8x16_t scales = vqtbl1q_s8(vld1q_s8((const int8_t *)rows.at + i * rows.stride + at + 192), in_halves);
            int16x8_t by = part ? vmull_high_s8(scales, shares) : vmull_s8(vget_low_s8(scales), vget_low_s8(shares));
            int16x8_t sums = vpaddq_s16(each[i][0], each[i][1]);
            products[i] = vmlal_high_s16(vmlal_s16(products[i], vget_low_s16(sums), vget_low_s16(by)), sums, by);
        }
    }
    ints joint = vpaddq_s32(vpaddq_s32(products[0], products[1]), vpaddq_s32(products[2], products[3]));
    return joined_unit(total, joint, half_of_rows(rows, at + 208), *s.unit);
}

/* Adds the products of the block at `at` to the total. */
INLINE floats meet_block(const int type, Rows rows, size_t at, Slice s, floats total) {
    const int has_minimum = type == 3 || type == 7, zero = type == 2 ? 3 : type == 6 ? 4 : -1;
    ints each[LANES];
    const int32_t start = start_of(s.counts, 0, zero, 1);
    for (size_t i = 0; i < LANES; i++) {
        const uint8_t *row = rows.at + i * rows.stride + at;
        each[i] = dot_16(zero < 0 ? &nothing : &start, sixteen_codes(type, row, 0, 0), ints_at(s.codes));
        each[i] = dot(each[i], sixteen_codes(type, row, 0, 1), ints_at(s.codes + 16));
    }
    ints products = vpaddq_s32(vpaddq_s32(each[0], each[1]), vpaddq_s32(each[2], each[3]));
    total = joined(total, products, half_of_rows(rows, at), s.scales[0]);
    return has_minimum ? times_plus(half_of_rows(rows, at + 2), same(s.sums[0]), total) : total;
}

/* Formats of 32 weights, block by block. */
INLINE floats meet_small(const int type, Rows rows, size_t unit, const size_t bytes, int blocks, Slice s, floats total) {
    size_t at = unit * BLOCKS * bytes;
    for (int block = 0; block < blocks; block++, at += bytes) {
        fetch_ahead(rows, unit, BLOCKS * bytes, (size_t)block, BLOCKS);
        total = meet_block(type, rows, at, s, total);
        s.codes += BLOCK, s.scales++, s.sums++, s.counts += 2;
    }
    return total;
}

/* The number of rows for which weights are unpacked anew. */
INLINE size_t singles_of(const Format *format) { return format->type == 8 ? 1 : 2; }

INLINE int has_single(const Format *format, size_t width) {
    return (void)width, format->type != 10 && format->type != 11 && format->type != 23;
}

INLINE floats multiply_type(const int type, const size_t bytes, Rows weights, const Activations *a, size_t row) {
    floats total = same(0);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        Slice s = slice_of(a, row, unit);
        if (type == 14) total = meet_q6_k(weights, unit, s, total);
        else if (type == 12 || type == 13) total = meet_six_bits(type, weights, unit, s, total);
        else total = meet_small(type, weights, unit, bytes, blocks_in(a->width, unit), s, total);
    }
    return total;
}

/* MXFP4. Both units for vectors are busy with the codes: scales come from a table, and a block's codes are loaded while the
 * one before is multiplied. */
static const int8_t MXFP4_SIGNED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#define EXPONENT(e) (e) < 2 ? 0x00200000u << (e) : ((e) - 1u) << 23
#define EXPONENTS_4(e) EXPONENT(e), EXPONENT(e + 1), EXPONENT(e + 2), EXPONENT(e + 3)
#define EXPONENTS_16(e) EXPONENTS_4(e), EXPONENTS_4(e + 4), EXPONENTS_4(e + 8), EXPONENTS_4(e + 12)
#define EXPONENTS_64(e) EXPONENTS_16(e), EXPONENTS_16(e + 16), EXPONENTS_16(e + 32), EXPONENTS_16(e + 48)
static const uint32_t MXFP4_SCALES[256] = {EXPONENTS_64(0), EXPONENTS_64(64), EXPONENTS_64(128), EXPONENTS_64(192)};

/* The products of 32 signed bytes, four per lane, plus NOTHING in the first. */
INLINE ints dot_32(int8x16_t first, ints x, int8x16_t second, ints y) {
#if defined(__ARM_FEATURE_DOTPROD)
    ints products;
    __asm__("ldr %s0, %5\n\tsdot %0.4s, %1.16b, %2.16b\n\tsdot %0.4s, %3.16b, %4.16b"
            : "=&w"(products) : "w"(first), "w"(x), "w"(second), "w"(y), "m"(nothing));
    return products;
#else
    return dot(dot_16(&nothing, (ints)first, x), (ints)second, y);
#endif
}

static floats multiply_mxfp4(Rows weights, const Activations *a, size_t row) {
    const uint8_t *at0 = weights.at, *at1 = at0 + weights.stride, *at2 = at1 + weights.stride, *at3 = at2 + weights.stride;
    const int8_t *values = a->codes + row * a->width;
    const float *scales = a->scales + row * a->blocks;
    const int8x16_t table = vld1q_s8(MXFP4_SIGNED);
    const uint8x16_t low = vdupq_n_u8(15);
    const size_t strip = LANES * weights.stride;
    const uint8_t *ahead = at0 + (strip > LEAST_AHEAD ? strip : LEAST_AHEAD);
    floats total = same(0);
#define ALL_ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define LOADED_MXFP4(r) uint8x16_t two##r = vld1q_u8(at##r + 1);
    ALL_ROWS(LOADED_MXFP4)
    for (size_t block = 0; block < a->blocks; block++, values += BLOCK) {
        size_t here = 17 * block, next = block + 1 < a->blocks ? here + 18 : 1;
        __builtin_prefetch(ahead + 64 * block, 0, FETCHED);
        ints x = ints_at(values), y = ints_at(values + 16);
#define CODES_MXFP4(r)                                                                                        \
    int8x16_t first##r = vqtbl1q_s8(table, two##r & low), second##r = vqtbl1q_s8(table, two##r >> 4);         \
    two##r = vld1q_u8(at##r + next);
        ALL_ROWS(CODES_MXFP4)
        uint32x4_t scale; /* without setting the other lanes, as compilers would do */
        __asm__("ldr %s0, %1" : "=w"(scale) : "m"(MXFP4_SCALES[at0[here]]));
        scale = vld1q_lane_u32(MXFP4_SCALES + at1[here], scale, 1);
        scale = vld1q_lane_u32(MXFP4_SCALES + at2[here], scale, 2);
        scale = vld1q_lane_u32(MXFP4_SCALES + at3[here], scale, 3);
#define SUM_MXFP4(r) ints sum##r = dot_32(first##r, x, second##r, y);
        ALL_ROWS(SUM_MXFP4)
        ints products = vpaddq_s32(vpaddq_s32(sum0, sum1), vpaddq_s32(sum2, sum3));
        total = joined(total, products, vreinterpretq_f32_u32(scale), scales[block]);
    }
    for (size_t byte = 64 * a->blocks; byte < strip; byte += 64) __builtin_prefetch(ahead + byte, 0, FETCHED);
    return total;
}

/* Multiplies row `row` of the activations with LANES rows of weights. */
static floats multiply_single(const Format *format, Rows weights, const Activations *a, size_t row) {
    switch (format->type) {
    case 2: return multiply_type(2, 18, weights, a, row);
    case 3: return multiply_type(3, 20, weights, a, row);
    case 6: return multiply_type(6, 22, weights, a, row);
    case 7: return multiply_type(7, 24, weights, a, row);
    case 8: return multiply_type(8, 34, weights, a, row);
    case 12: return multiply_type(12, 144, weights, a, row);
    case 13: return multiply_type(13, 176, weights, a, row);
    case 20: return multiply_type(20, 18, weights, a, row);
    case 39: return multiply_mxfp4(weights, a, row);
    default: return multiply_type(14, 210, weights, a, row);
    }
}
