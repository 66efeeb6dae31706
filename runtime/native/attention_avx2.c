/* The AVX2 path of attention and of float matrices: a vector is two registers; knows only its operations. */
#include "arithmetic.inc.h"
#include "attention.h"
#include "tile.h"

#if defined(__AVX2__)
#include <immintrin.h>

typedef struct {
    __m256 low, high;
} vec;

#define BOTH(low, high) \
    return (vec) { low, high }

INLINE vec vec_set(float x) { BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE vec vec_load(const float *at) { BOTH(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)); }
INLINE void vec_store(float *at, vec x) { _mm256_storeu_ps(at, x.low), _mm256_storeu_ps(at + 8, x.high); }
INLINE vec vec_add(vec a, vec b) { BOTH(_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)); }
INLINE vec vec_sub(vec a, vec b) { BOTH(_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)); }
INLINE vec vec_mul(vec a, vec b) { BOTH(_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)); }
INLINE vec vec_div(vec a, vec b) { BOTH(_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)); }
INLINE vec vec_max(vec a, vec b) { BOTH(_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)); }

INLINE vec vec_fma(vec a, vec b, vec c) {
    BOTH(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}

INLINE vec vec_abs(vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    BOTH(_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high));
}

INLINE vec vec_sign(vec size, vec of) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    BOTH(_mm256_or_ps(size.low, _mm256_and_ps(sign, of.low)), _mm256_or_ps(size.high, _mm256_and_ps(sign, of.high)));
}

INLINE vec vec_zero_below(vec x, vec least, vec y) {
    BOTH(_mm256_andnot_ps(_mm256_cmp_ps(x.low, least.low, _CMP_LT_OQ), y.low),
         _mm256_andnot_ps(_mm256_cmp_ps(x.high, least.high, _CMP_LT_OQ), y.high));
}

INLINE __m256 half_within(__m256 x, int from, int to, __m256 other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane);
    const __m256i outside = _mm256_or_si256(before, _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(to - 1)));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(outside));
}

INLINE vec vec_within(vec x, int from, int to, vec other) {
    BOTH(half_within(x.low, from, to, other.low), half_within(x.high, from - 8, to - 8, other.high));
}

INLINE __m256 half_power(__m256 shifted) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000 - 127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

INLINE vec vec_power(vec shifted) { BOTH(half_power(shifted.low), half_power(shifted.high)); }

INLINE vec vec_halves(const uint8_t *at) {
    const __m128i *halves = (const __m128i *)at;
    BOTH(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
}

INLINE __m256 eight_int8(const int8_t *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

INLINE vec vec_int8(const int8_t *at) { BOTH(eight_int8(at), eight_int8(at + 8)); }

INLINE __m256 eight_fourths(const uint8_t *at, int c) {
    const __m256i fours = _mm256_loadu_si256((const __m256i *)at);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sll_epi32(fours, _mm_cvtsi32_si128(24 - 8 * c)), 24));
}

INLINE vec vec_fourth(const uint8_t *at, int c) { BOTH(eight_fourths(at, c), eight_fourths(at + 32, c)); }

INLINE __m256 eight_nibbles(const uint8_t *at, int shift) {
    const __m256i moved = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)at), _mm_cvtsi32_si128(shift));
    return _mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(15)));
}

INLINE vec vec_nibbles(const uint8_t *at, int c, int high) {
    BOTH(eight_nibbles(at, 8 * c + 4 * high), eight_nibbles(at + 32, 8 * c + 4 * high));
}

/* Six rows of sums fill 12 of 16 registers; few rows take two vectors, so that additions do not wait for each other. */
enum { PANEL = 6, WIDE_ROWS = 3 };
#define EVERY_ROWS(what) what(1) what(2) what(3) what(4) what(5) what(6)

#include "attention.inc.h"
#include "floats.inc.h"

const attention_path attention_avx2 = {"avx2", write_rows, attend, merge, normalise_floats, multiply_floats};
#else
const attention_path attention_avx2 = {"avx2", NULL, NULL, NULL, NULL, NULL};
#endif
