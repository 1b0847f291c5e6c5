/* 64-bit ARM: vectors of four lanes, with the dot products of ARMv8.2 if the processor has them.
 *
 * See vector.h. Products are of signed bytes, so that the zero of codes can be subtracted. Integers below 2^22 become
 * floats in the low bits of one: a sum starts at NOTHING, the bits of 1.5 * 2^23, and ends with a subtraction. That is
 * exact and four times as fast as a conversion.
 */
#pragma once
#include <arm_neon.h>

#define LANES 4
enum { REGISTERS = 32, NOTHING = 0x4b400000, TAKES_ZERO = 1, FETCHED = 3, MOST_ROWS = 66 };
typedef int32x4_t ints;
typedef float32x4_t floats;

INLINE ints ints_at(const void *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
INLINE void put_ints(void *p, ints a) { vst1q_u8(p, vreinterpretq_u8_s32(a)); }
INLINE ints same_int(int32_t a) { return vdupq_n_s32(a); }
INLINE ints both(ints a, ints b) { return vandq_s32(a, b); }
INLINE ints either(ints a, ints b) { return vorrq_s32(a, b); }
INLINE ints differing(ints a, ints b) { return veorq_s32(a, b); }
INLINE ints plus(ints a, ints b) { return vaddq_s32(a, b); }
INLINE ints left(ints a, int by) { return (ints)((uint32x4_t)a << by); }
INLINE ints right(ints a, int by) { return (ints)((uint32x4_t)a >> by); }
INLINE ints signed_right(ints a, int by) { return a >> by; }
INLINE floats floats_of(ints a) { return vcvtq_f32_s32(a); }
INLINE ints nearest(floats a) { return vcvtnq_s32_f32(a); }
INLINE floats as_floats(ints a) { return vreinterpretq_f32_s32(a); }
INLINE floats floats_at(const float *p) { return vld1q_f32(p); }
INLINE void put_floats(float *p, floats a) { vst1q_f32(p, a); }
INLINE floats same(float a) { return vdupq_n_f32(a); }
INLINE floats add(floats a, floats b) { return vaddq_f32(a, b); }
INLINE floats minus(floats a, floats b) { return vsubq_f32(a, b); }
INLINE floats times(floats a, floats b) { return vmulq_f32(a, b); }
INLINE floats over(floats a, floats b) { return vdivq_f32(a, b); }
INLINE floats times_plus(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
INLINE floats greater(floats a, floats b) { return vmaxq_f32(a, b); }
INLINE floats greater_or_nan(floats a, floats b) { return vmaxq_f32(a, b); }
INLINE floats less(floats a, floats b) { return vminq_f32(a, b); }
INLINE floats whole(floats a) { return vrndnq_f32(a); }
INLINE floats magnitude(floats a) { return vabsq_f32(a); }
INLINE float greatest(floats a) { return vmaxvq_f32(a); }
INLINE float sum(floats a) { return vaddvq_f32(a); }
/* The sum of the magnitudes of 16 numbers, in one order on every processor. */
INLINE float weight_of_16(const float *p) {
    floats total = magnitude(floats_at(p));
    for (int i = 4; i < 16; i += 4) total = add(total, magnitude(floats_at(p + i)));
    return sum(total);
}
INLINE int32_t sum_ints(ints a) { return vaddvq_s32(a); }
INLINE floats halves_at(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void put_halves(uint16_t *p, floats a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
INLINE uint16_t half_of(float a) {
    __fp16 half = (__fp16)a;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
/* The lower 16 bits of every lane as a half-precision number. */
INLINE floats low_halves(ints a) { return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(a))); }
/* The lower bytes of 16 numbers. */
INLINE void put_16_bytes(int8_t *p, const ints a[4]) {
    int16x8_t first = vuzp1q_s16(vreinterpretq_s16_s32(a[0]), vreinterpretq_s16_s32(a[1]));
    int16x8_t second = vuzp1q_s16(vreinterpretq_s16_s32(a[2]), vreinterpretq_s16_s32(a[3]));
    vst1q_s8(p, vuzp1q_s8(vreinterpretq_s8_s16(first), vreinterpretq_s8_s16(second)));
}
/* Sums of products, each below 2^22, as floats. */
INLINE floats floats_of_sums(ints a) { return vsubq_f32(as_floats(a), as_floats(same_int(NOTHING))); }

/* Adds the four products of its bytes to every lane. */
INLINE ints dot(ints total, ints codes, ints values) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(total, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(values));
#else
    int8x16_t a = vreinterpretq_s8_s32(codes), b = vreinterpretq_s8_s32(values);
    int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return plus(total, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
#if defined(__ARM_FEATURE_DOTPROD)
#define DOT_QUAD(total, codes, values, i) \
    vdotq_laneq_s32(total, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(values), i)
#else
#define DOT_QUAD(total, codes, values, i) dot(total, codes, vdupq_laneq_s32(values, i))
#endif
/* The sum of the bytes of eight blocks of weights, four per lane, each times a number of its block; `split` holds the
 * low bytes of those numbers, signed, and then the high ones. */
INLINE ints by_sums(ints first, ints second, const int8_t *split) {
    ints numbers = ints_at(split);
    ints low = DOT_QUAD(DOT_QUAD(same_int(0), first, numbers, 0), second, numbers, 1);
    ints high = DOT_QUAD(DOT_QUAD(same_int(0), first, numbers, 2), second, numbers, 3);
    return plus(low, left(high, 8));
}
/* Multiplies `count` rows of values, `stride` apart, with `quads` rows of codes (a multiple of four), minus the zero. */
INLINE void dot_rows(const uint8_t (*codes)[4 * LANES], const int quads, const int8_t *values, size_t stride,
                     const int count, const int zero, ints *products) {
    for (int quad = 0; quad < quads; quad += 4) {
        ints column[4];
        for (int i = 0; i < 4; i++) {
            column[i] = ints_at(codes[quad + i]);
            if (zero >= 0) column[i] = vreinterpretq_s32_u8(vreinterpretq_u8_s32(column[i]) - (uint8_t)(1 << zero));
        }
        for (int r = 0; r < count; r++) {
            ints sixteen = ints_at(values + (size_t)r * stride + 4 * quad);
            products[r] = DOT_QUAD(products[r], column[0], sixteen, 0);
            products[r] = DOT_QUAD(products[r], column[1], sixteen, 1);
            products[r] = DOT_QUAD(products[r], column[2], sixteen, 2);
            products[r] = DOT_QUAD(products[r], column[3], sixteen, 3);
        }
    }
}

/* The shares of the eight blocks of a unit in the orders of the products: blocks 0 and 1 four times, 4 and 5, 2 and 3,
 * 6 and 7; then blocks 0 to 3 twice, and 4 to 7; then each four times. */
enum { SHARES = 80 };
INLINE void put_shares(int8_t *p, const int8_t shares[8]) {
    for (int i = 0; i < 32; i++) p[i] = shares[i / 16 * 2 + i / 8 % 2 * 4 + i % 2];
    for (int i = 0; i < 16; i++) p[32 + i] = shares[i / 8 * 4 + i % 4];
    for (int i = 0; i < 32; i++) p[48 + i] = shares[i / 4];
}
/* Byte `index` of every lane, twice. */
INLINE ints multiple(ints bytes, const int index, const int is_signed) {
    const uint8x16_t lanes = {0, 4, 8, 12, 0, 4, 8, 12};
    (void)is_signed;
    return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(bytes), lanes + (uint8_t)index));
}
INLINE int multiple_at(const void *multiples, size_t lane) { return ((const int8_t *)multiples)[lane]; }
/* The low 16 bits of two vectors: 16-bit products are four times as fast as 32-bit ones. */
INLINE int16x8_t packed(ints a, ints b) { return vuzp1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)); }
/* Adds the sums of block `block` times its multiples and its share to every total. */
INLINE void join_multiples(ints *totals, const ints *sums, ints multiples, const int8_t *shares, size_t stride,
                           const int block, const int count) {
    int8x8_t by = vget_low_s8(vreinterpretq_s8_s32(multiples));
    const int8_t *share = shares + 48 + 4 * block;
    for (int r = 0; r < count; r += 2, share += 2 * stride) {
        const int other = r + 1 < count;
        int32x2_t each[2]; /* in this way, and not through other registers as compilers would do it */
        __asm__("ldr %s0, %1" : "=w"(each[0]) : "m"(*(const int32_t *)share));
        __asm__("ldr %s0, %1" : "=w"(each[1]) : "m"(*(const int32_t *)(share + (other ? stride : 0))));
        int16x8_t scaled = vmull_s8(by, vreinterpret_s8_s32(vzip1_s32(each[0], each[1])));
        int16x8_t two = packed(sums[r], sums[r + other]);
        totals[r] = vmlal_s16(totals[r], vget_low_s16(two), vget_low_s16(scaled));
        if (other) totals[r + 1] = vmlal_high_s16(totals[r + 1], two, scaled);
    }
}

/* Transposes four vectors of four numbers. */
INLINE void turned_ints(const ints r[4], ints out[4]) {
    ints a = vtrn1q_s32(r[0], r[1]), b = vtrn2q_s32(r[0], r[1]);
    ints c = vtrn1q_s32(r[2], r[3]), d = vtrn2q_s32(r[2], r[3]);
    out[0] = (ints)vtrn1q_s64((int64x2_t)a, (int64x2_t)c), out[1] = (ints)vtrn1q_s64((int64x2_t)b, (int64x2_t)d);
    out[2] = (ints)vtrn2q_s64((int64x2_t)a, (int64x2_t)c), out[3] = (ints)vtrn2q_s64((int64x2_t)b, (int64x2_t)d);
}
/* Transposes 16 bytes of each of LANES rows: out[i] holds bytes 4i to 4i+3 of every row. */
INLINE void turned(const uint8_t *at, size_t stride, ints out[4]) {
    ints r[4];
    for (size_t i = 0; i < 4; i++) r[i] = ints_at(at + i * stride);
    turned_ints(r, out);
}
