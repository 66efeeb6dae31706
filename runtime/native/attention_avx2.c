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
INLINE void vec_transpose(const float *from, int64_t step, float *to) {
    for (int64_t i = 0; i < LANES; i += 4)
        for (int64_t c = 0; c < LANES; c += 4) {
            __m128 rows[4];
            for (int64_t r = 0; r < 4; r++) rows[r] = _mm_loadu_ps(from + (i + r) * step + c);
            _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
            for (int64_t r = 0; r < 4; r++) _mm_storeu_ps(to + (c + r) * LANES + i, rows[r]);
        }
}
INLINE vec vec_load(const float *at) { BOTH(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)); }
INLINE void vec_store(float *at, vec x) { _mm256_storeu_ps(at, x.low), _mm256_storeu_ps(at + 8, x.high); }
INLINE void vec_fetch(intptr_t at) { _mm_prefetch((const char *)at, _MM_HINT_T1); }
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

INLINE float vec_fold_sum(vec x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE float vec_fold_max(vec x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE __m256 eight_bfloats(const uint8_t *at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
}
INLINE vec vec_bfloats(const uint8_t *at) { BOTH(eight_bfloats(at), eight_bfloats(at + 16)); }
INLINE vec vec_halves(const uint8_t *at) {
    const __m128i *halves = (const __m128i *)at;
    BOTH(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
}

INLINE __m256 eight_int8(const int8_t *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

INLINE vec vec_int8(const int8_t *at) { BOTH(eight_int8(at), eight_int8(at + 8)); }

INLINE vec vec_levels(__m128i bytes) {
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
    BOTH(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
         _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))));
}

INLINE vec vec_halves_of(const uint8_t *at, int high) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return vec_levels(high ? _mm_srli_epi16(bytes, 4) : bytes);
}

INLINE vec vec_eight(const uint8_t *at) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)at);
    return vec_levels(_mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)));
}

INLINE __m256 eight_nibbles(const uint8_t *at, int shift) {
    const __m256i moved = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)at), _mm_cvtsi32_si128(shift));
    return _mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(15)));
}

INLINE vec vec_nibbles(const uint8_t *at, int c, int high) {
    BOTH(eight_nibbles(at, 8 * c + 4 * high), eight_nibbles(at + 32, 8 * c + 4 * high));
}

typedef struct {
    __m256i low, high;
} ivec;

INLINE ivec both(__m256i low, __m256i high) { return (ivec){low, high}; }
INLINE ivec ivec_set(int32_t x) { return both(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE vec ivec_float(ivec x) { BOTH(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)); }

INLINE ivec ivec_max_bits(ivec most, vec x) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    return both(_mm256_max_epi32(most.low, _mm256_and_si256(_mm256_castps_si256(x.low), size)),
                _mm256_max_epi32(most.high, _mm256_and_si256(_mm256_castps_si256(x.high), size)));
}

INLINE int32_t ivec_fold_max(ivec x) {
    const __m256i eight = _mm256_max_epi32(x.low, x.high);
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}

/* One side of the instruction's products is unsigned: keys give their signs to queries. Two products of at most
 * 127 * 127 fit 16 bits. */
enum { KEY_BIAS = 0 };
typedef struct {
    ivec keys, sizes;
} kvec;

INLINE kvec kvec_load(const uint8_t *at) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)at), high = _mm256_loadu_si256((const __m256i *)at + 1);
    return (kvec){{low, high}, {_mm256_abs_epi8(low), _mm256_abs_epi8(high)}};
}

/* A sum of integers, added now: GCC would put additions off until it has no registers for what is to be added. */
INLINE __m256i added(__m256i sum, __m256i x) {
    sum = _mm256_add_epi32(sum, x);
#if defined(__GNUC__)
    __asm__("" : "+x"(sum));
#endif
    return sum;
}

INLINE __m256i eight_dots(__m256i sum, __m256i keys, __m256i sizes, __m256i q) {
    const __m256i pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(q, keys));
    return added(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE ivec ivec_dot(ivec sum, kvec k, int32_t q) {
    const __m256i four = _mm256_set1_epi32(q);
    return both(eight_dots(sum.low, k.keys.low, k.sizes.low, four), eight_dots(sum.high, k.keys.high, k.sizes.high, four));
}

INLINE void vec_store_levels(int16_t *at, vec shifted) {
    const __m256i zero = _mm256_set1_epi32(0x4b400000);
    const __m256i words = _mm256_packs_epi32(_mm256_sub_epi32(_mm256_castps_si256(shifted.low), zero),
                                       _mm256_sub_epi32(_mm256_castps_si256(shifted.high), zero));
    _mm256_storeu_si256((__m256i *)at, _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0)));
}

typedef struct {
    ivec even, odd;
} four;

INLINE __m256i first_of_words(__m256i t) { return _mm256_srai_epi16(_mm256_slli_epi16(t, 8), 8); }
INLINE __m256i second_of_words(__m256i t) { return _mm256_srai_epi16(t, 8); }

INLINE four four_load(const int8_t *at) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)at), high = _mm256_loadu_si256((const __m256i *)at + 1);
    return (four){both(first_of_words(low), first_of_words(high)), both(second_of_words(low), second_of_words(high))};
}

INLINE ivec ivec_add_four(ivec sum, four values, const int16_t *levels) {
    int32_t first, second;
    memcpy(&first, levels, sizeof first), memcpy(&second, levels + 2, sizeof second);
    const __m256i even = _mm256_set1_epi32(first), odd = _mm256_set1_epi32(second);
    sum.low = added(sum.low, _mm256_madd_epi16(values.even.low, even));
    sum.high = added(sum.high, _mm256_madd_epi16(values.even.high, even));
    sum.low = added(sum.low, _mm256_madd_epi16(values.odd.low, odd));
    sum.high = added(sum.high, _mm256_madd_epi16(values.odd.high, odd));
    return sum;
}

/* Six rows of sums fill 12 of 16 registers; few rows take two vectors, so that additions do not wait for each other. */
enum { PANEL = 6, WIDE_ROWS = 3, INT_PANEL = 4, INT_WIDTH = 1 };
#define EVERY_ROWS(what) what(1) what(2) what(3) what(4) what(5) what(6)
#define EVERY_INT_ROWS(what) what(1) what(2) what(3) what(4)

#include "attention.inc.h"
#include "floats.inc.h"
#include "activation.inc.h"
#include "recurrence.inc.h"

const attention_path attention_avx2 = {"avx2", write_rows, attend, merge,
                                       normalise_floats, multiply_floats, activate, &recurrence_functions};
#else
const attention_path attention_avx2 = {"avx2", NULL, NULL, NULL, NULL, NULL, NULL};
#endif
