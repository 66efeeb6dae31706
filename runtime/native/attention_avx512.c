/* The AVX-512 path of attention and of float matrices: a vector is a register; knows only its operations. */
#include "arithmetic.inc.h"
#include "attention.h"
#include "tile.h"

#if defined(__AVX512VNNI__) || (defined(_MSC_VER) && defined(__AVX512F__))
#include <immintrin.h>

typedef __m512 vec;

INLINE vec vec_set(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_load(const float *at) { return _mm512_loadu_ps(at); }
INLINE void vec_store(float *at, vec x) { _mm512_storeu_ps(at, x); }
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

INLINE vec vec_halves(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE vec vec_int8(const int8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

INLINE vec vec_fourth(const uint8_t *at, int c) {
    const __m512i fours = _mm512_sll_epi32(_mm512_loadu_si512(at), _mm_cvtsi32_si128(24 - 8 * c));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(fours, 24));
}

INLINE vec vec_nibbles(const uint8_t *at, int c, int high) {
    const __m512i moved = _mm512_srl_epi32(_mm512_loadu_si512(at), _mm_cvtsi32_si128(8 * c + 4 * high));
    return _mm512_cvtepi32_ps(_mm512_and_si512(moved, _mm512_set1_epi32(15)));
}

enum { PANEL = 8, WIDE_ROWS = 8 };
#define EVERY_ROWS(what) what(1) what(2) what(3) what(4) what(5) what(6) what(7) what(8)

#include "attention.inc.h"
#include "floats.inc.h"

const attention_path attention_avx512 = {"avx512", write_rows, attend, merge, normalise_floats, multiply_floats};
#else
const attention_path attention_avx512 = {"avx512", NULL, NULL, NULL, NULL, NULL};
#endif
