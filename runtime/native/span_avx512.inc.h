/* Products of spans (spans.h) by AVX-512 VNNI: 16 columns to a register; knows only a span's blocks and up to 8 rows.
 *
 * Included by avx512vnni.c.
 */
#include "span_tile.inc.h"

/* Scales that one conversion makes floats are not stored as such. Of minima they are: read by blocks, not in one run, their
 * heads come from memory more slowly. */
INLINE int reads_groups(int form) { return form != FORM_4_MINIMUM && form != FORM_5_MINIMUM && !facts_of(form).levels; }

/* Sums of groups of 16 of 2 and 3 bits fit 16 bits, so that two are multiplied by their scales and added at once. */
INLINE int by_pairs(form_facts f) { return f.bits < 4; }

INLINE void span_floats(const uint8_t *halves, float *out) {
    for (int g = 0; g < 2; g++)
        _mm512_storeu_ps(out + 16 * g, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + 32 * g))));
}

INLINE void fetch_head(const uint8_t *head, int64_t bytes, int64_t size) {
    for (int64_t i = 0; i < bytes; i += 64) {
        fetch(head + i);
        if (i < SOON) _mm_prefetch((const char *)(head + size + i), _MM_HINT_T0);
    }
}

/* Few rows sum each half of a block apart in any form. */
INLINE int apart(form_facts f, int count) { return f.halves || count <= 2; }

/* Whether the upper half of a byte is multiplied where it is, 16 times as large. */
INLINE int in_place(form_facts f, int count) { return f.bits == 4 && !f.levels && count <= 2; }

/* Bits from..from+width-1 of each byte at bit `to`, whatever the others are. */
INLINE __m512i moved(__m512i bytes, int from, int to) {
    if (from > to) return _mm512_srli_epi16(bytes, (unsigned)(from - to));
    return from < to ? _mm512_slli_epi16(bytes, (unsigned)(to - from)) : bytes;
}

/* Weights of columns 16 g on and 4 values of K from 16 h + 4 v on. */
INLINE __m512i span_weights(form_facts f, int count, const span_view *t, const uint8_t *data, int g, int h, int v) {
    const uint8_t *at = data + g * 64;
    if (f.bits == 2) {
        const int slot = 2 * h + v / 2;
        return _mm512_and_si512(moved(_mm512_loadu_si512(at + v % 2 * 128), 2 * slot, 0), _mm512_set1_epi8(3));
    }
    if (f.bits == 3) {
        __m512i both = nibbles3(_mm512_loadu_si512(at + h * 128), _mm512_loadu_si512(at + 256), h, v % 2);
        return _mm512_and_si512(moved(both, v / 2 * 4, 0), _mm512_set1_epi8(7));
    }
    const __m512i four = _mm512_loadu_si512(at + v * 128), mask = _mm512_set1_epi8(15);
    if (h && in_place(f, count)) return _mm512_andnot_si512(mask, four);
    if (f.bits == 4) {
        const __m512i codes = _mm512_and_si512(moved(four, 4 * h, 0), mask);
        if (!f.levels) return codes;
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t->levels)), codes);
    }
    const __m512i upper = f.bits == 5 ? moved(_mm512_loadu_si512(at + 512), 4 * h + v, 4)
                                      : moved(_mm512_loadu_si512(at + 512 + v / 2 * 128), 2 * (2 * (v % 2) + h), 4);
    const __m512i both = _mm512_ternarylogic_epi32(mask, moved(four, 4 * h, 0), upper, 0xca);
    return _mm512_and_si512(both, _mm512_set1_epi8(f.bits == 5 ? 31 : 63));
}

/* The integer products of a block, less zero * sum, of columns 16 g to 16 (g + width) - 1; of each half of it, or all
 * with the first. */
INLINE void span_dots(form_facts f, int count, int g, int width, const span_view *t, int64_t b, int64_t at,
                      __m512i dots[PANEL][2][2]) {
    const uint8_t *data = t->data + b * f.bits * 128;
    const int8_t *values = t->values + at * SPAN_BLOCK;
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int h = 0; h < 2; h++) {
            const int32_t half = f.halves ? t->row_halves[at + r] : 0, sum = t->row_sums[at + r] - half;
            const int32_t less = -f.zero * (f.halves && !h ? half : h && !f.halves ? 0 : sum);
            UNROLL for (int i = 0; i < width; i++) dots[r][i][h] = _mm512_set1_epi32(less);
        }
    UNROLL for (int v = 0; v < 4; v++)
        UNROLL for (int h = 0; h < 2; h++) {
            __m512i weights[2];
            UNROLL for (int i = 0; i < width; i++) weights[i] = span_weights(f, count, t, data, g + i, h, v);
            UNROLL for (int r = 0; r < count; r++) {
                const __m512i a = four(values + r * SPAN_BLOCK + h * 16 + v * 4);
                UNROLL for (int i = 0; i < width; i++) {
                    __m512i *dot = &dots[r][i][apart(f, count) ? h : 0];
                    *dot = _mm512_dpbusd_epi32(*dot, weights[i], a);
                    KEEP(*dot);
                }
            }
        }
    if (f.halves || !apart(f, count)) return;
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int i = 0; i < width; i++) {
            const __m512i second = in_place(f, count) ? _mm512_srai_epi32(dots[r][i][1], 4) : dots[r][i][1];
            dots[r][i][0] = _mm512_add_epi32(dots[r][i][0], second);
        }
}

/* Bytes of both groups of a block and 16 columns, as pairs of 16 bits. */
INLINE __m512i group_pairs(form_facts f, const span_view *t, int64_t b, int g) {
    const uint8_t *bytes = t->head + (f.bits == 2 ? 4 : 2) * SPAN_COLUMNS + 2 * b * SPAN_COLUMNS + g * LOWBIT_GROUP;
    const __m128i first = _mm_loadu_si128((const __m128i *)bytes);
    const __m128i second = _mm_loadu_si128((const __m128i *)(bytes + SPAN_COLUMNS));
    const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi8(first, second));
    const __m256i both = _mm256_inserti128_si256(low, _mm_unpackhi_epi8(first, second), 1);
    return f.bits == 2 ? _mm512_cvtepu8_epi16(both) : _mm512_cvtepi8_epi16(both);
}

/* The same as span_added, of pairs of groups. */
INLINE __m512 pairs_added(form_facts f, const span_view *t, int64_t at, int g, __m512i pairs, const __m512i dots[2],
                          __m512 sum) {
    const __m512 a = _mm512_set1_ps(t->row_scales[at]);
    const __m512i dot = _mm512_mask_blend_epi16(0xaaaaaaaa, dots[0], _mm512_slli_epi32(dots[1], 16));
    const __m512i scales = f.bits == 2 ? _mm512_and_si512(pairs, _mm512_set1_epi16(15)) : pairs;
    const __m512 both = _mm512_cvtepi32_ps(_mm512_madd_epi16(dot, scales));
    sum = _mm512_fmadd_ps(both, _mm512_mul_ps(_mm512_load_ps(t->scales->d + 16 * g), a), sum);
    if (!f.minimum) return sum;
    const int32_t half = t->row_halves[at], rest = t->row_sums[at] - half;
    const __m512i halves = _mm512_set1_epi32((int32_t)((uint32_t)rest << 16 | ((uint32_t)half & 0xffff)));
    const __m512 minima = _mm512_cvtepi32_ps(_mm512_madd_epi16(_mm512_srli_epi16(pairs, 4), halves));
    return _mm512_fnmadd_ps(minima, _mm512_mul_ps(_mm512_load_ps(t->scales->dmin + 16 * g), a), sum);
}

/* Scales and minima of a block and 16 columns, or the scales of its two halves. */
typedef struct {
    __m512 scale, other;
} column_groups;

INLINE column_groups groups_of(int form, const span_view *t, int64_t b, int g) {
    const form_facts f = facts_of(form);
    const int at = g * LOWBIT_GROUP, step = f.halves ? 2 : 1;
    column_groups made = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (!reads_groups(form)) {
        made.scale = _mm512_load_ps(t->scales->scales[step * b] + at);
        if (f.halves) made.other = _mm512_load_ps(t->scales->scales[2 * b + 1] + at);
        if (f.minimum) made.other = _mm512_load_ps(t->scales->minima[b] + at);
    } else if (f.halves) {
        const __m128i *bytes = (const __m128i *)(t->head + (2 + 2 * b) * SPAN_COLUMNS + at);
        made.scale = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
        made.other = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + SPAN_COLUMNS / 16)));
    } else {
        made.scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(t->head + 2 * (b * SPAN_COLUMNS + at))));
    }
    return made;
}

/* Adds a block's products of 16 columns to the sum of a row; `whole` is its scale times its sum. */
INLINE __m512 span_added(form_facts f, const span_view *t, column_groups s, int64_t at, int g, float whole,
                         const __m512i dots[2], __m512 sum) {
    const __m512 a = _mm512_set1_ps(t->row_scales[at]);
    if (!f.halves) {
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[0]), _mm512_mul_ps(s.scale, a), sum);
        return f.minimum ? _mm512_fnmadd_ps(s.other, _mm512_set1_ps(whole), sum) : sum;
    }
    const __m512 first = _mm512_mul_ps(s.scale, _mm512_cvtepi32_ps(dots[0]));
    const __m512 both = _mm512_fmadd_ps(s.other, _mm512_cvtepi32_ps(dots[1]), first);
    return _mm512_fmadd_ps(both, _mm512_mul_ps(_mm512_load_ps(t->scales->d + 16 * g), a), sum);
}

/* Scales times sums of `count` rows. */
INLINE void products_of_sums(int count, const span_view *t, int64_t at, float *out) {
    const __mmask8 all = (__mmask8)((1 << count) - 1);
    const __m256i sums = _mm256_maskz_loadu_epi32(all, t->row_sums + at);
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_maskz_loadu_ps(all, t->row_scales + at), _mm256_cvtepi32_ps(sums)));
}

/* Adds the products of a span and `count` <= PANEL rows to their sums. Groups of 16 have twice as many integer sums, so more
 * than four rows of them take 16 columns at a time. */
INLINE void span_panel(int form, int count, const span_view *view, int64_t first, float *sums) {
    const span_view t = *view;
    const form_facts f = facts_of(form);
    const int width = f.halves && count > 4 ? 1 : 2, held = count <= (f.halves ? 4 : HELD);
    __m512 totals[PANEL][2];
    UNROLL for (int r = 0; r < count && held; r++)
        UNROLL for (int g = 0; g < 2; g++) totals[r][g] = _mm512_loadu_ps(sums + r * LOWBIT_TILE + g * LOWBIT_GROUP);
    for (int64_t b = 0; b < t.blocks; b++) {
        const int64_t at = b * t.m + first;
        for (int line = 0; line < 2 * f.bits; line++) fetch(t.data + (b * 2 * f.bits + line) * 64);
        UNROLL for (int g = 0; g < 2; g += width) {
            __m512i dots[PANEL][2][2];
            span_dots(f, count, g, width, &t, b, at, dots);
            float wholes[PANEL];
            if (f.minimum && !f.halves) products_of_sums(count, &t, at, wholes);
            if (!held) FENCE();
            UNROLL for (int i = g; i < g + width; i++) {
                __m512i pairs;
                column_groups scales;
                if (by_pairs(f)) pairs = group_pairs(f, &t, b, i);
                else scales = groups_of(form, &t, b, i);
                UNROLL for (int r = 0; r < count; r++) {
                    float *sum = sums + r * LOWBIT_TILE + i * LOWBIT_GROUP;
                    const __m512 before = held ? totals[r][i] : _mm512_loadu_ps(sum);
                    totals[r][i] = by_pairs(f) ? pairs_added(f, &t, at + r, i, pairs, dots[r][i - g], before)
                                               : span_added(f, &t, scales, at + r, i, wholes[r], dots[r][i - g], before);
                    if (!held) _mm512_storeu_ps(sum, totals[r][i]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < count && held; r++)
        UNROLL for (int g = 0; g < 2; g++) _mm512_storeu_ps(sums + r * LOWBIT_TILE + g * LOWBIT_GROUP, totals[r][g]);
}

typedef void span_function(const span_view *t, int64_t first, float *sums);

#define ONE_SPAN(form, count)                                                                  \
    NOINLINE void span_##form##_##count(const span_view *t, int64_t first, float *sums) {      \
        span_panel(form, count, t, first, sums);                                               \
    }
#define SPAN_COUNTS(what, form)                                                                \
    what(form, 1) what(form, 2) what(form, 3) what(form, 4) what(form, 5) what(form, 6) what(form, 7) what(form, 8)
#define SPAN_NAME(form, count) span_##form##_##count,
#define SPAN_FUNCTIONS(form) SPAN_COUNTS(ONE_SPAN, form)
#define SPAN_NAMES(form) [form] = {SPAN_COUNTS(SPAN_NAME, form)},
ALL_FORMS(SPAN_FUNCTIONS)
static span_function *const span_functions[FORMS][PANEL] = {ALL_FORMS(SPAN_NAMES)};

INLINE void add_span(int form, const span_view *t, int64_t first, int64_t count, float *sums) {
    for (int64_t r = 0; r < count; r += PANEL)
        span_functions[form][smaller(count - r, PANEL) - 1](t, first + r, sums + r * LOWBIT_TILE);
}
