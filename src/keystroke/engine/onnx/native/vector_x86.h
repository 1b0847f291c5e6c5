/* x86_64: vectors of sixteen lanes with AVX-512 VNNI, of eight with AVX2.
 *
 * See vector.h. Codes are unsigned bytes and values signed ones, as in the processor's products.
 */
#pragma once
#include <immintrin.h>

enum { NOTHING = 0, TAKES_ZERO = 0, FETCHED = 2, MOST_ROWS = 128 };

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define LANES 16
enum { REGISTERS = 32 };
typedef __m512i ints;
typedef __m512 floats;

INLINE ints ints_at(const void *p) { return _mm512_loadu_si512(p); }
INLINE void put_ints(void *p, ints a) { _mm512_storeu_si512(p, a); }
INLINE ints same_int(int32_t a) { return _mm512_set1_epi32(a); }
INLINE ints both(ints a, ints b) { return _mm512_and_si512(a, b); }
INLINE ints either(ints a, ints b) { return _mm512_or_si512(a, b); }
INLINE ints differing(ints a, ints b) { return _mm512_xor_si512(a, b); }
INLINE ints plus(ints a, ints b) { return _mm512_add_epi32(a, b); }
INLINE ints left(ints a, int by) { return _mm512_slli_epi32(a, (unsigned)by); }
INLINE ints right(ints a, int by) { return _mm512_srli_epi32(a, (unsigned)by); }
INLINE ints signed_right(ints a, int by) { return _mm512_srai_epi32(a, (unsigned)by); }
INLINE floats floats_of(ints a) { return _mm512_cvtepi32_ps(a); }
INLINE ints nearest(floats a) { return _mm512_cvtps_epi32(a); }
INLINE floats as_floats(ints a) { return _mm512_castsi512_ps(a); }
INLINE floats floats_at(const float *p) { return _mm512_loadu_ps(p); }
INLINE void put_floats(float *p, floats a) { _mm512_storeu_ps(p, a); }
INLINE floats same(float a) { return _mm512_set1_ps(a); }
INLINE floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats minus(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats times(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats over(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats times_plus(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats greater(floats a, floats b) { return _mm512_max_ps(a, b); }
/* NaN if either is one; `greater` returns `b` then. */
INLINE floats greater_or_nan(floats a, floats b) {
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}
INLINE floats less(floats a, floats b) { return _mm512_min_ps(a, b); }
INLINE floats whole(floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE floats magnitude(floats a) { return _mm512_abs_ps(a); }
INLINE float greatest(floats a) { return _mm512_reduce_max_ps(a); }
INLINE float sum(floats a) { return _mm512_reduce_add_ps(a); }
INLINE int32_t sum_ints(ints a) { return _mm512_reduce_add_epi32(a); }
INLINE floats halves_at(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void put_halves(uint16_t *p, floats a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
/* The lower 16 bits of every lane as a half-precision number. */
INLINE floats low_halves(ints a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
INLINE void put_bytes(int8_t *p, ints a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
/* Adds the four products of its bytes, unsigned times signed, to every lane. */
INLINE ints dot(ints total, ints codes, ints values) { return _mm512_dpbusd_epi32(total, codes, values); }
INLINE ints dot_wide(ints total, ints codes, ints values) { return dot(total, codes, values); }
/* Adds the two products of its signed 16-bit halves to every lane. */
INLINE ints dot_words(ints total, ints a, ints b) { return _mm512_dpwssd_epi32(total, a, b); }
INLINE ints times_words(ints a, ints b) { return _mm512_mullo_epi16(a, b); }
/* Transposes 16 bytes of each of LANES rows: out[i] holds bytes 4i to 4i+3 of every row. */
INLINE void turned(const uint8_t *at, size_t stride, ints out[4]) {
    ints r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(at + (size_t)i * stride)));
        for (int part = 1; part < 4; part++) {
            __m128i four = _mm_loadu_si128((const void *)(at + (size_t)(4 * part + i) * stride));
            r[i] = _mm512_mask_broadcast_i32x4(r[i], (__mmask16)(15 << 4 * part), four);
        }
    }
    ints a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    ints c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    out[0] = _mm512_unpacklo_epi64(a, c), out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d), out[3] = _mm512_unpackhi_epi64(b, d);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
enum { REGISTERS = 16 };
typedef __m256i ints;
typedef __m256 floats;

INLINE ints ints_at(const void *p) { return _mm256_loadu_si256(p); }
INLINE void put_ints(void *p, ints a) { _mm256_storeu_si256(p, a); }
INLINE ints same_int(int32_t a) { return _mm256_set1_epi32(a); }
INLINE ints both(ints a, ints b) { return _mm256_and_si256(a, b); }
INLINE ints either(ints a, ints b) { return _mm256_or_si256(a, b); }
INLINE ints differing(ints a, ints b) { return _mm256_xor_si256(a, b); }
INLINE ints plus(ints a, ints b) { return _mm256_add_epi32(a, b); }
INLINE ints left(ints a, int by) { return _mm256_slli_epi32(a, by); }
INLINE ints right(ints a, int by) { return _mm256_srli_epi32(a, by); }
INLINE ints signed_right(ints a, int by) { return _mm256_srai_epi32(a, by); }
INLINE floats floats_of(ints a) { return _mm256_cvtepi32_ps(a); }
INLINE ints nearest(floats a) { return _mm256_cvtps_epi32(a); }
INLINE floats as_floats(ints a) { return _mm256_castsi256_ps(a); }
INLINE floats floats_at(const float *p) { return _mm256_loadu_ps(p); }
INLINE void put_floats(float *p, floats a) { _mm256_storeu_ps(p, a); }
INLINE floats same(float a) { return _mm256_set1_ps(a); }
INLINE floats add(floats a, floats b) { return _mm256_add_ps(a, b); }
INLINE floats minus(floats a, floats b) { return _mm256_sub_ps(a, b); }
INLINE floats times(floats a, floats b) { return _mm256_mul_ps(a, b); }
INLINE floats over(floats a, floats b) { return _mm256_div_ps(a, b); }
INLINE floats times_plus(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE floats greater(floats a, floats b) { return _mm256_max_ps(a, b); }
/* NaN if either is one; `greater` returns `b` then. */
INLINE floats greater_or_nan(floats a, floats b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
INLINE floats less(floats a, floats b) { return _mm256_min_ps(a, b); }
INLINE floats whole(floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE floats magnitude(floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE float greatest(floats a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
INLINE float sum(floats a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE int32_t sum_ints(ints a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}
INLINE floats halves_at(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void put_halves(uint16_t *p, floats a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m128i low_words(ints a) {
    __m256i packed = _mm256_packus_epi32(both(a, same_int(0xffff)), _mm256_setzero_si256());
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
INLINE floats low_halves(ints a) { return _mm256_cvtph_ps(low_words(a)); }
INLINE void put_bytes(int8_t *p, ints a) {
    __m128i words = low_words(a);
    words = _mm_and_si128(words, _mm_set1_epi16(0xff));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
INLINE ints times_words(ints a, ints b) { return _mm256_mullo_epi16(a, b); }
#if defined(__AVXVNNI__)
INLINE ints dot(ints total, ints codes, ints values) { return _mm256_dpbusd_avx_epi32(total, codes, values); }
INLINE ints dot_wide(ints total, ints codes, ints values) { return dot(total, codes, values); }
INLINE ints dot_words(ints total, ints a, ints b) { return _mm256_dpwssd_avx_epi32(total, a, b); }
#else
INLINE ints dot_words(ints total, ints a, ints b) { return plus(total, _mm256_madd_epi16(a, b)); }
/* Two products are summed in 16 bits first, enough for codes below 128; larger ones need two parts. */
INLINE ints dot(ints total, ints codes, ints values) {
    ints pairs = _mm256_maddubs_epi16(codes, values);
    return plus(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE ints dot_wide(ints total, ints codes, ints values) {
    total = dot(total, both(codes, _mm256_set1_epi8(127)), values);
    ints top = both(_mm256_srli_epi16(codes, 7), _mm256_set1_epi8(1));
    return plus(total, _mm256_madd_epi16(_mm256_maddubs_epi16(top, values), _mm256_set1_epi16(128)));
}
#endif
INLINE void turned(const uint8_t *at, size_t stride, ints out[4]) {
    ints r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_castsi128_si256(_mm_loadu_si128((const void *)(at + (size_t)i * stride)));
        r[i] = _mm256_inserti128_si256(r[i], _mm_loadu_si128((const void *)(at + (size_t)(4 + i) * stride)), 1);
    }
    ints a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
    ints c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
    out[0] = _mm256_unpacklo_epi64(a, c), out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d), out[3] = _mm256_unpackhi_epi64(b, d);
}
#else
#error "no vectors of bytes with products on this processor"
#endif

/* The sum of the magnitudes of 16 numbers, in one order on every processor. */
INLINE float weight_of_16(const float *p) {
    __m128 sign = _mm_set1_ps(-0.0f), total = _mm_andnot_ps(sign, _mm_loadu_ps(p));
    for (int i = 4; i < 16; i += 4) total = _mm_add_ps(total, _mm_andnot_ps(sign, _mm_loadu_ps(p + i)));
    total = _mm_add_ps(total, _mm_shuffle_ps(total, total, 0xb1));
    return _mm_cvtss_f32(_mm_add_ss(total, _mm_movehl_ps(total, total)));
}
/* The lower bytes of 16 numbers. */
INLINE void put_16_bytes(int8_t *p, const ints *a) {
    for (int i = 0; i < 16 / LANES; i++) put_bytes(p + i * LANES, a[i]);
}
INLINE uint16_t half_of(float a) { return _cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT); }
/* Sums of products as floats. */
INLINE floats floats_of_sums(ints a) { return floats_of(a); }

INLINE ints four_bytes(const int8_t *p) {
    int32_t value;
    memcpy(&value, p, 4);
    return same_int(value);
}
/* The shares of the eight blocks of a unit, 32 bits each. */
enum { SHARES = 32 };
INLINE void put_shares(int8_t *p, const int8_t shares[8]) {
    for (int i = 0; i < 8; i++) {
        int32_t share = shares[i];
        memcpy(p + 4 * i, &share, sizeof share);
    }
}
/* Byte `index` of every lane as its low 16 bits. */
INLINE ints multiple(ints bytes, const int index, const int is_signed) {
    if (!is_signed) return both(right(bytes, 8 * index), same_int(255));
    return both(signed_right(left(bytes, 24 - 8 * index), 24), same_int(0xffff));
}
INLINE int multiple_at(const void *multiples, size_t lane) { return (int16_t)((const int32_t *)multiples)[lane]; }
/* Adds the sums of block `block` times its multiples and its share to every total. */
INLINE void join_multiples(ints *totals, const ints *sums, ints multiples, const int8_t *shares, size_t stride,
                           const int block, const int count) {
    for (int r = 0; r < count; r++) {
        ints by = times_words(multiples, four_bytes(shares + (size_t)r * stride + 4 * block));
        totals[r] = dot_words(totals[r], sums[r], by);
    }
}
/* The sum of the bytes of eight blocks of weights, four per lane, each times a number of its block; `split` holds the
 * low bytes of those numbers, signed, and then the high ones. */
INLINE ints by_sums(ints first, ints second, const int8_t *split) {
    ints low = dot(dot(same_int(0), first, four_bytes(split)), second, four_bytes(split + 4));
    ints high = dot(dot(same_int(0), first, four_bytes(split + 8)), second, four_bytes(split + 12));
    return plus(low, left(high, 8));
}
/* Multiplies `count` rows of values, `stride` apart, with `quads` rows of codes. */
INLINE void dot_rows(const uint8_t (*codes)[4 * LANES], const int quads, const int8_t *values, size_t stride,
                     const int count, const int zero, ints *products) {
    for (int quad = 0; quad < quads; quad++) {
        ints column = ints_at(codes[quad]);
        for (int r = 0; r < count; r++) {
            ints four = four_bytes(values + (size_t)r * stride + 4 * quad);
            products[r] = zero == 7 ? dot_wide(products[r], column, four) : dot(products[r], column, four);
        }
    }
}
