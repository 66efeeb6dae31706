/* What the paths of 256-bit registers share of spans (spans.h): weights, scales and up to 4 rows; knows nothing of how
 * dots are summed.
 *
 * Included by avx256.inc.h; a path then defines add_half.
 */
#include "span_tile.inc.h"

INLINE void span_floats(const uint8_t *halves, float *out) {
    for (int c = 0; c < REGISTERS; c++)
        _mm256_storeu_ps(out + 8 * c, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + 16 * c))));
}

INLINE void fetch_head(const uint8_t *head, int64_t bytes, int64_t size) {
    for (int64_t i = 0; i < bytes; i += 64) {
        _mm_prefetch((const char *)(head + AHEAD + i), _MM_HINT_T1);
        if (i < SOON) _mm_prefetch((const char *)(head + size + i), _MM_HINT_T0);
    }
}

/* Columns of a block: `width` registers from one on that `data` points to, and some rows. */
typedef struct {
    form_facts f;
    int rows, width, whole; /* whether groups' scales are multiplied as whole numbers: reads_groups */
    const uint8_t *data, *levels, *groups; /* the last those of a head, of both halves */
    const int8_t *values;
} span_piece;

/* Adds the integer products of half h of a block to sums, by weights that are `zero_of` more than they mean; where
 * `whole` says so, times the half's scales. */
INLINE void add_half(span_piece p, int h, __m256i sums[PANEL][REGISTERS]);
INLINE int zero_of(form_facts f);

/* Bits from `from` on of each byte at bit `to`, whatever the others are. */
INLINE __m256i moved(__m256i bytes, int from, int to) {
    if (from > to) return _mm256_srli_epi16(bytes, from - to);
    return from < to ? _mm256_slli_epi16(bytes, to - from) : bytes;
}

/* Codes of register c and 4 values of K from 16 h + 4 v on. */
INLINE __m256i span_codes_of(span_piece p, int c, int h, int v) {
    const uint8_t *at = p.data + c * 32;
    const int slot = 2 * h + v / 2;
    if (p.f.bits == 2) return _mm256_and_si256(moved(load(at + v % 2 * 128), 2 * slot, 0), _mm256_set1_epi8(3));
    if (p.f.bits == 3) return _mm256_and_si256(moved(nibbles3(at, h, v % 2), v / 2 * 4, 0), _mm256_set1_epi8(7));
    const __m256i four = _mm256_and_si256(moved(load(at + v * 128), 4 * h, 0), _mm256_set1_epi8(15));
    if (p.f.bits == 4) return four;
    const __m256i upper = p.f.bits == 5 ? moved(load(at + 512), 4 * h + v, 4)
                                        : moved(load(at + 512 + v / 2 * 128), 2 * (2 * (v % 2) + h), 4);
    return _mm256_or_si256(four, _mm256_and_si256(upper, _mm256_set1_epi8(p.f.bits == 5 ? 16 : 48)));
}

/* What codes choose: levels plus 128. */
INLINE __m256i span_levels(span_piece p, __m256i codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p.levels)), codes);
}

/* Bytes of two groups and 8 columns, as pairs of 16 bits. */
INLINE __m256i group_pairs(span_piece p, const uint8_t *first, const uint8_t *second) {
    const __m128i one = _mm_loadl_epi64((const __m128i *)first), other = _mm_loadl_epi64((const __m128i *)second);
    const __m128i both = _mm_unpacklo_epi8(one, other);
    return p.f.bits == 2 ? _mm256_cvtepu8_epi16(both) : _mm256_cvtepi8_epi16(both);
}

/* Scales of two groups of register c, as pairs of 16 bits. */
INLINE __m256i scale_pairs(span_piece p, int c, int first, int second) {
    const uint8_t *groups = p.groups + 8 * c;
    const __m256i pairs = group_pairs(p, groups + first * SPAN_COLUMNS, groups + second * SPAN_COLUMNS);
    return p.f.bits == 2 ? _mm256_and_si256(pairs, _mm256_set1_epi16(15)) : pairs;
}

/* Two whole numbers in each lane. */
INLINE __m256i pair_of(int32_t low, int32_t high) {
    return _mm256_set1_epi32((int32_t)((uint32_t)high << 16 | ((uint32_t)low & 0xffff)));
}

/* Adds the products of a block whose groups' scales are whole numbers: these go to the integer sums. Half a zero times a
 * sum fits 16 bits. */
INLINE void add_whole_piece(span_piece p, const span_view *t, int64_t b, int part, int64_t at, float *sums) {
    __m256i dots[PANEL][REGISTERS];
    p.groups = t->head + (p.f.bits == 2 ? 4 : 2) * SPAN_COLUMNS + 2 * b * SPAN_COLUMNS + part * 8;
    UNROLL for (int c = 0; c < p.width; c++) {
        const __m256i twice = _mm256_slli_epi16(scale_pairs(p, c, 0, 1), 1);
        UNROLL for (int r = 0; r < p.rows; r++) {
            const int32_t half = t->row_halves[at + r], rest = t->row_sums[at + r] - half, zero = p.f.zero / 2;
            dots[r][c] = zero ? _mm256_madd_epi16(twice, pair_of(-zero * half, -zero * rest)) : _mm256_setzero_si256();
        }
    }
    add_half(p, 0, dots);
    add_half(p, 1, dots);
    UNROLL for (int c = 0; c < p.width; c++) {
        const int column = (part + c) * 8;
        const __m256 d = _mm256_load_ps(t->scales->d + column), dmin = _mm256_load_ps(t->scales->dmin + column);
        const __m256i minima = _mm256_srli_epi16(group_pairs(p, p.groups + 8 * c, p.groups + SPAN_COLUMNS + 8 * c), 4);
        UNROLL for (int r = 0; r < p.rows; r++) {
            float *sum = sums + r * LOWBIT_TILE + column;
            const int32_t half = t->row_halves[at + r], rest = t->row_sums[at + r] - half;
            const __m256 a = _mm256_set1_ps(t->row_scales[at + r]);
            __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][c]), _mm256_mul_ps(d, a), _mm256_loadu_ps(sum));
            if (p.f.minimum) {
                const __m256 taken = _mm256_cvtepi32_ps(_mm256_madd_epi16(minima, pair_of(half, rest)));
                y = _mm256_fnmadd_ps(taken, _mm256_mul_ps(dmin, a), y);
            }
            _mm256_storeu_ps(sum, y);
        }
    }
}

/* Adds a block's products of 8 columns from `at` on to the sum of a row. */
INLINE __m256 span_added(form_facts f, const span_view *t, int64_t b, int64_t row, int at, __m256i dot, __m256i second,
                         __m256 sum) {
    const span_scales *s = t->scales;
    const __m256 a = _mm256_set1_ps(t->row_scales[row]);
    const __m256 whole = _mm256_cvtepi32_ps(_mm256_set1_epi32(t->row_sums[row]));
    if (!f.halves) {
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(_mm256_load_ps(s->scales[b] + at), a), sum);
        return f.minimum ? _mm256_fnmadd_ps(_mm256_load_ps(s->minima[b] + at), _mm256_mul_ps(a, whole), sum) : sum;
    }
    const __m256 first = _mm256_mul_ps(_mm256_load_ps(s->scales[2 * b] + at), _mm256_cvtepi32_ps(dot));
    const __m256 both = _mm256_fmadd_ps(_mm256_load_ps(s->scales[2 * b + 1] + at), _mm256_cvtepi32_ps(second), first);
    sum = _mm256_fmadd_ps(both, _mm256_mul_ps(_mm256_load_ps(s->d + at), a), sum);
    if (!f.minimum) return sum;
    const __m256 half = _mm256_cvtepi32_ps(_mm256_set1_epi32(t->row_halves[row])), rest = _mm256_sub_ps(whole, half);
    const __m256 minima = _mm256_fmadd_ps(_mm256_load_ps(s->minima[2 * b + 1] + at), rest,
                                          _mm256_mul_ps(_mm256_load_ps(s->minima[2 * b] + at), half));
    return _mm256_fnmadd_ps(minima, _mm256_mul_ps(_mm256_load_ps(s->dmin + at), a), sum);
}

/* Adds the products of a block, of `width` registers from `part` on. */
INLINE void add_span_piece(span_piece p, const span_view *t, int64_t b, int part, int64_t at, float *sums) {
    __m256i dots[PANEL][REGISTERS], seconds[PANEL][REGISTERS];
    UNROLL for (int r = 0; r < p.rows; r++)
        UNROLL for (int c = 0; c < p.width; c++) {
            const int32_t half = p.f.halves ? t->row_halves[at + r] : t->row_sums[at + r];
            dots[r][c] = _mm256_set1_epi32(-zero_of(p.f) * half);
            seconds[r][c] = _mm256_set1_epi32(-zero_of(p.f) * (t->row_sums[at + r] - half));
        }
    add_half(p, 0, dots);
    add_half(p, 1, p.f.halves ? seconds : dots);
    UNROLL for (int c = 0; c < p.width; c++)
        UNROLL for (int r = 0; r < p.rows; r++) {
            float *sum = sums + r * LOWBIT_TILE + (part + c) * 8;
            const __m256 before = _mm256_loadu_ps(sum);
            _mm256_storeu_ps(sum, span_added(p.f, t, b, at + r, (part + c) * 8, dots[r][c], seconds[r][c], before));
        }
}

/* Adds the products of a span and `rows` <= PANEL rows to their sums. */
INLINE void span_panel(int form, int rows, const span_view *view, int64_t first, float *sums) {
    const span_view t = *view;
    const form_facts f = facts_of(form);
    const int width = rows <= 2 ? 4 : 2;
    for (int64_t b = 0; b < t.blocks; b++) {
        const int64_t at = b * t.m + first;
        const uint8_t *data = t.data + b * f.bits * 128;
        UNROLL for (int line = 0; line < 2 * f.bits; line++)
            _mm_prefetch((const char *)(data + AHEAD + line * 64), _MM_HINT_T1);
        UNROLL for (int part = 0; part < REGISTERS; part += width) {
            const span_piece p = {
                .f = f, .rows = rows, .width = width, .whole = reads_groups(form), .data = data + part * 32,
                .levels = t.levels, .values = t.values + at * SPAN_BLOCK};
            if (reads_groups(form)) add_whole_piece(p, &t, b, part, at, sums);
            else add_span_piece(p, &t, b, part, at, sums);
        }
    }
}

typedef void span_function(const span_view *t, int64_t first, float *sums);

#define ONE_SPAN(form, rows)                                                               \
    NOINLINE void span_##form##_##rows(const span_view *t, int64_t first, float *sums) {   \
        span_panel(form, rows, t, first, sums);                                            \
    }
#define SPAN_NAME(form, rows) span_##form##_##rows,
#define SPAN_FUNCTIONS(form) ONE_SPAN(form, 1) ONE_SPAN(form, 2) ONE_SPAN(form, 3) ONE_SPAN(form, 4)
#define SPAN_NAMES(form) [form] = {SPAN_NAME(form, 1) SPAN_NAME(form, 2) SPAN_NAME(form, 3) SPAN_NAME(form, 4)},
ALL_FORMS(SPAN_FUNCTIONS)
static span_function *const span_functions[FORMS][PANEL] = {ALL_FORMS(SPAN_NAMES)};

INLINE void add_span(int form, const span_view *t, int64_t first, int64_t count, float *sums) {
    for (int64_t r = 0; r < count; r += PANEL)
        span_functions[form][smaller(count - r, PANEL) - 1](t, first + r, sums + r * LOWBIT_TILE);
}
