/* The AVX-512 path of attention and of float matrices: a vector is a register; knows only its operations. */
#include "arithmetic.inc.h"
#include "attention.h"
#include "tile.h"

#if defined(__AVX512VNNI__) || (defined(_MSC_VER) && defined(__AVX512F__))
#include <immintrin.h>

typedef __m512 vec;

/* Registers of four runs of four: within the runs first, then the runs themselves. */
INLINE void vec_transpose(const float *from, int64_t step, float *to) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * step);
    for (int i = 0; i < 16; i += 4) {
        const __m512 low = _mm512_unpacklo_ps(a[i], a[i + 1]), high = _mm512_unpackhi_ps(a[i], a[i + 1]);
        const __m512 low2 = _mm512_unpacklo_ps(a[i + 2], a[i + 3]), high2 = _mm512_unpackhi_ps(a[i + 2], a[i + 3]);
        b[i] = _mm512_shuffle_ps(low, low2, 0x44), b[i + 1] = _mm512_shuffle_ps(low, low2, 0xee);
        b[i + 2] = _mm512_shuffle_ps(high, high2, 0x44), b[i + 3] = _mm512_shuffle_ps(high, high2, 0xee);
    }
    for (int i = 0; i < 4; i++) {
        const __m512 first = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), second = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        const __m512 third = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd), fourth = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        _mm512_storeu_ps(to + i * 16, _mm512_shuffle_f32x4(first, second, 0x88));
        _mm512_storeu_ps(to + (i + 8) * 16, _mm512_shuffle_f32x4(first, second, 0xdd));
        _mm512_storeu_ps(to + (i + 4) * 16, _mm512_shuffle_f32x4(third, fourth, 0x88));
        _mm512_storeu_ps(to + (i + 12) * 16, _mm512_shuffle_f32x4(third, fourth, 0xdd));
    }
}

INLINE vec vec_set(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_load(const float *at) { return _mm512_loadu_ps(at); }
INLINE void vec_store(float *at, vec x) { _mm512_storeu_ps(at, x); }
INLINE void vec_fetch(intptr_t at) { _mm_prefetch((const char *)at, _MM_HINT_T1); }
INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec vec_abs(vec x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
INLINE vec vec_sign(vec size, vec of) { return _mm512_or_ps(size, _mm512_and_ps(_mm512_set1_ps(-0.0f), of)); }
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }

INLINE vec vec_zero_below(vec x, vec least, vec y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y);
}

INLINE vec vec_within(vec x, int from, int to, vec other) {
    const unsigned low = from > 0 ? 0xffffu << from : 0xffffu, high = to < LANES ? (1u << to) - 1 : 0xffffu;
    return _mm512_mask_mov_ps(other, (__mmask16)(low & high), x);
}

INLINE vec vec_power(vec shifted) {
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000 - 127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}

INLINE __m256 upper_half(vec x) { return _mm512_extractf32x8_ps(x, 1); }

INLINE float vec_fold_sum(vec x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), upper_half(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE float vec_fold_max(vec x) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), upper_half(x));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE vec vec_bfloats(const uint8_t *at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16));
}
INLINE vec vec_halves(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE vec vec_int8(const int8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

INLINE vec vec_levels(__m128i bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))));
}

INLINE vec vec_halves_of(const uint8_t *at, int high) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return vec_levels(high ? _mm_srli_epi16(bytes, 4) : bytes);
}

INLINE vec vec_eight(const uint8_t *at) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)at);
    return vec_levels(_mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)));
}

INLINE vec vec_nibbles(const uint8_t *at, int c, int high) {
    const __m512i moved = _mm512_srl_epi32(_mm512_loadu_si512(at), _mm_cvtsi32_si128(8 * c + 4 * high));
    return _mm512_cvtepi32_ps(_mm512_and_si512(moved, _mm512_set1_epi32(15)));
}

typedef __m512i ivec, kvec;

INLINE ivec ivec_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vec ivec_float(ivec x) { return _mm512_cvtepi32_ps(x); }

INLINE ivec ivec_max_bits(ivec most, vec x) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_max_epi32(most, bits);
}

INLINE int32_t ivec_fold_max(ivec x) { return _mm512_reduce_max_epi32(x); }

/* One side of the instruction's products is unsigned. */
enum { KEY_BIAS = 128 };
INLINE kvec kvec_load(const uint8_t *at) {
    return _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_set1_epi8((char)0x80));
}
INLINE ivec ivec_dot(ivec sum, kvec keys, int32_t q) { return _mm512_dpbusd_epi32(sum, keys, _mm512_set1_epi32(q)); }

INLINE void vec_store_levels(int16_t *at, vec shifted) {
    /* The lowest 16 bits of ROUNDER are 0. */
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(_mm512_castps_si512(shifted)));
}

typedef struct {
    __m512i even, odd;
} four;

INLINE four four_load(const int8_t *at) {
    const __m512i t = _mm512_loadu_si512(at);
    return (four){_mm512_srai_epi16(_mm512_slli_epi16(t, 8), 8), _mm512_srai_epi16(t, 8)};
}

INLINE ivec ivec_add_four(ivec sum, four values, const int16_t *levels) {
    int32_t even, odd;
    memcpy(&even, levels, sizeof even), memcpy(&odd, levels + 2, sizeof odd);
    sum = _mm512_dpwssd_epi32(sum, values.even, _mm512_set1_epi32(even));
    return _mm512_dpwssd_epi32(sum, values.odd, _mm512_set1_epi32(odd));
}

enum { PANEL = 8, WIDE_ROWS = 8, INT_PANEL = 8, INT_WIDTH = 2 };
#define EVERY_INT_ROWS(what) EVERY_ROWS(what)
#define EVERY_ROWS(what) what(1) what(2) what(3) what(4) what(5) what(6) what(7) what(8)

#include "attention.inc.h"
#include "floats.inc.h"
#include "activation.inc.h"
#include "recurrence.inc.h"

const attention_path attention_avx512 = {"avx512", write_rows, attend, merge,
                                         normalise_floats, multiply_floats, activate, &recurrence_functions};
#else
const attention_path attention_avx512 = {"avx512", NULL, NULL, NULL, NULL, NULL, NULL};
#endif
