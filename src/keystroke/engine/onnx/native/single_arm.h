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
        upper = quarter < 2 ? upper << (4 - 2 * quarter) : upper >> (2 * quarter - 4);
        if (quarter < 3) upper &= vdupq_n_u8(0x30);
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

/* The products of 16 bytes, four in each lane, and `start` in the first. Loading it next to its use costs next to
 * nothing; the compilers would rather copy one that they keep, which costs as much as a product. */
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

/* Small integers, one byte for each of four blocks in every lane, and the half-precision numbers that they are
 * multiples of. A byte becomes a float by lying in the lower bits of 2^23; `less` is what that adds to a product.
 * (Signed ones lie 8 bits further up, plus 128: so that single precision holds what is to be taken off.) */
typedef struct {
    ints bytes[4];
    floats factor, less;
} Multiples;

static const int32_t nothing = NOTHING, large[LANES] = {0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000};

INLINE void set_factor(Multiples *m, floats factor, const int is_signed) {
    m->factor = is_signed ? times(factor, same(0x1p-8f)) : factor;
    m->less = times(m->factor, same(is_signed ? -0x1p23f - 0x1p15f : -0x1p23f));
}

/* The scales or minima of block `index`: the factor times byte `index` of every lane. What an instruction writes
 * over is loaded, which costs next to nothing. */
INLINE floats multiple(const Multiples *m, int index, const int is_signed) {
    floats number, product;
    uint32_t place = is_signed ? 0xffff00ffu + (uint32_t)(index % 4 << 8) : 0xffffff00u + (uint32_t)(index % 4);
    uint32x4_t lanes = {0, 4, 8, 12};
    uint32x4_t places = vaddq_u32(vdupq_n_u32(place), is_signed ? lanes << 8 : lanes);
    __asm__("ldr %q0, %3\n\ttbx %0.16b, {%1.16b}, %2.16b"
            : "=&w"(number) : "w"(m->bytes[index / 4]), "w"(places), "m"(large));
    __asm__("ldr %q0, %3\n\tfmla %0.4s, %1.4s, %2.4s" : "=&w"(product) : "w"(m->factor), "w"(number), "m"(m->less));
    return product;
}

INLINE void read_heads(const int type, Rows rows, size_t at, Multiples *scales, Multiples *minima) {
    if (type == 14) {
        turned_at(rows, at + 192, scales->bytes);
        for (int i = 0; i < 4; i++) scales->bytes[i] = differing(scales->bytes[i], same_int((int32_t)0x80808080));
        set_factor(scales, half_of_rows(rows, at + 208), 1);
        return;
    }
    ints head[4];
    turned_at(rows, at, head);
    ints a = head[1], b = head[2], c = head[3];
    scales->bytes[0] = masked(a, 0x3f), scales->bytes[1] = either(masked(c, 0x0f), masked(right(a, 2), 0x30));
    minima->bytes[0] = masked(b, 0x3f), minima->bytes[1] = either(masked(right(c, 4), 0x0f), masked(right(b, 2), 0x30));
    set_factor(scales, low_halves(head[0]), 0);
    set_factor(minima, minus(same(0), low_halves(right(head[0], 16))), 0);
}

/* Block `block` joins the total. */
INLINE floats meet_block(const int type, Rows rows, size_t at, const int block, const Multiples *scales,
                         const Multiples *minima, Slice s, floats total) {
    const int has_minimum = type == 12 || type == 13 || type == 3 || type == 7;
    const int halves = type == 14 ? 2 : 1, zero = type == 14 ? 5 : type == 2 ? 3 : type == 6 ? 4 : -1;
    const ints values[2] = {ints_at(s.codes + BLOCK * block), ints_at(s.codes + BLOCK * block + 16)};
    for (int half = 0; half < halves; half++) {
        ints each[LANES];
        int32_t computed;
        const int32_t *start = zero < 0 ? &nothing : s.counts + 2 * block + half;
        if (zero == 3 || zero == 4) computed = start_of(s.counts + 2 * block, half, zero, halves), start = &computed;
        for (size_t i = 0; i < LANES; i++) {
            const uint8_t *row = rows.at + i * rows.stride + at;
            ints codes = sixteen_codes(type, row, block, half);
            each[i] = dot_16(start, codes, values[half]);
            if (halves == 1) each[i] = dot(each[i], sixteen_codes(type, row, block, 1), values[1]);
        }
        ints products = vpaddq_s32(vpaddq_s32(each[0], each[1]), vpaddq_s32(each[2], each[3]));
        floats weight_scale = type >= 12 ? multiple(scales, halves * block + half, type == 14) : half_of_rows(rows, at);
        total = joined(total, products, weight_scale, s.scales[block]);
    }
    if (has_minimum) {
        floats minimum = type >= 12 ? multiple(minima, block, 0) : half_of_rows(rows, at + 2);
        total = times_plus(minimum, same(s.sums[block]), total);
    }
    return total;
}

/* Formats of 256 weights: blocks differ in how they are unpacked, so each is written out. */
INLINE floats meet_large(const int type, Rows rows, size_t at, Slice s, floats total) {
    Multiples scales, minima;
    read_heads(type, rows, at, &scales, &minima);
    total = meet_block(type, rows, at, 0, &scales, &minima, s, total);
    total = meet_block(type, rows, at, 1, &scales, &minima, s, total);
    total = meet_block(type, rows, at, 2, &scales, &minima, s, total);
    total = meet_block(type, rows, at, 3, &scales, &minima, s, total);
    total = meet_block(type, rows, at, 4, &scales, &minima, s, total);
    total = meet_block(type, rows, at, 5, &scales, &minima, s, total);
    total = meet_block(type, rows, at, 6, &scales, &minima, s, total);
    return meet_block(type, rows, at, 7, &scales, &minima, s, total);
}

/* Formats of 32 weights: every block is the first of what follows. */
INLINE floats meet_small(const int type, Rows rows, size_t at, size_t bytes, int blocks, Slice s, floats total) {
    for (int block = 0; block < blocks; block++, at += bytes) {
        total = meet_block(type, rows, at, 0, NULL, NULL, s, total);
        s.codes += BLOCK, s.scales++, s.sums++, s.counts += 2;
    }
    return total;
}

enum { SINGLES = 2 }; /* rows for which weights are unpacked anew */

INLINE int has_single(const Format *format) { return (void)format, 1; }

INLINE floats multiply_type(const int type, const size_t bytes, Rows weights, const Activations *a, size_t row) {
    const int large = type >= 12;
    floats total = same(0);
    for (size_t unit = 0; unit * UNIT < a->width; unit++) {
        Slice s = slice_of(a, row, unit);
        fetch_ahead(weights, a->width, unit);
        if (large) total = meet_large(type, weights, unit * bytes, s, total);
        else total = meet_small(type, weights, unit * BLOCKS * bytes, bytes, blocks_in(a->width, unit), s, total);
    }
    return total;
}

/* Row `row` of the activations with LANES rows of weights. */
static floats multiply_single(const Format *format, Rows weights, const Activations *a, size_t row) {
    switch (format->type) {
    case 2: return multiply_type(2, 18, weights, a, row);
    case 3: return multiply_type(3, 20, weights, a, row);
    case 6: return multiply_type(6, 22, weights, a, row);
    case 7: return multiply_type(7, 24, weights, a, row);
    case 8: return multiply_type(8, 34, weights, a, row);
    case 12: return multiply_type(12, 144, weights, a, row);
    case 13: return multiply_type(13, 176, weights, a, row);
    default: return multiply_type(14, 210, weights, a, row);
    }
}
