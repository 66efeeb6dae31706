/* Products of spans (spans.h) by both NEON paths: weights, scales and up to 4 rows; knows nothing of how products are
 * summed.
 *
 * Included by neon.inc.h. Levels are arranged as 8-bit weights are, BIAS8 below what the table has.
 */
#include "span_tile.inc.h"

/* Columns of a block for some rows: straight from its bytes, or from weights that were unpacked and arranged before. */
typedef struct {
    form_facts f;
    int pairs, rows, quads, unpacked;
    const uint8_t *data, *levels;
    const int8_t *values;
} span_piece;

INLINE int reads_groups(int form) { return (void)form, 0; }

INLINE void span_floats(const uint8_t *halves, float *out) {
    for (int q = 0; q < QUADS; q++) vst1q_f32(out + 4 * q, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(halves + 8 * q))));
}

INLINE void fetch_head(const uint8_t *head, int64_t bytes, int64_t size) { (void)head, (void)bytes, (void)size; }

INLINE int zero_of(form_facts f) { return f.levels ? SPAN_LEVEL_ZERO - BIAS8 : f.zero; }

/* Bits from `from` on of each byte at bit `to`. */
INLINE uint8x16_t moved(uint8x16_t bytes, int from, int to) { return vshlq_u8(bytes, vdupq_n_s8((int8_t)(to - from))); }

/* Weights of 4 columns and 4 values of K from 16 h + 4 v on. */
INLINE uint8x16_t span_weights(span_piece p, int quad, int h, int v) {
    const uint8_t *at = p.data + quad * 16;
    const int slot = 2 * h + v / 2, from = v / 2 * 4 + 2 * h + v % 2;
    if (p.f.bits == 2) return vandq_u8(moved(vld1q_u8(at + v % 2 * 128), 2 * slot, 0), vdupq_n_u8(3));
    if (p.f.bits == 3) {
        const uint8x16_t low = vandq_u8(moved(vld1q_u8(at + h * 128), 2 * v, 0), vdupq_n_u8(3));
        return vorrq_u8(low, vandq_u8(moved(vld1q_u8(at + LOWBIT_CHUNK_HIGH), from, 2), vdupq_n_u8(4)));
    }
    const uint8x16_t four = vandq_u8(moved(vld1q_u8(at + v * 128), 4 * h, 0), vdupq_n_u8(15));
    if (p.f.levels) return vqtbl1q_u8(vld1q_u8(p.levels), four);
    if (p.f.bits == 4) return four;
    if (p.f.bits == 5) return vorrq_u8(four, vandq_u8(moved(vld1q_u8(at + 512), 4 * h + v, 4), vdupq_n_u8(16)));
    const uint8x16_t upper = moved(vld1q_u8(at + 512 + v / 2 * 128), 2 * (2 * (v % 2) + h), 4);
    return vorrq_u8(four, vandq_u8(upper, vdupq_n_u8(48)));
}

/* Weights of 4 columns and 8 values of K from 16 h + 8 j on, as accumulate takes them. */
INLINE void span_arranged(span_piece p, int quad, int h, int j, uint8x16_t weights[2]) {
    const int at = unpacked_at(16 * h + 8 * j, quad);
    UNROLL for (int i = 0; i < 2; i++)
        weights[i] = p.unpacked ? vld1q_u8(p.data + at + 16 * i) : span_weights(p, quad, h, 2 * j + i);
    if (!p.unpacked) arrange(p.f.levels ? BITS8 : BITS4, p.pairs, weights);
}

/* The integer products of half h of a block, of quads from `quad` on. */
INLINE void half_dots(span_piece p, int h, int quad, int32x4_t dots[PANEL][QUADS]) {
    const int step = p.pairs ? 2 : 1;
    UNROLL for (int j = 0; j < 2; j++) {
        activations a[PANEL];
        UNROLL for (int r = 0; r < p.rows; r += step) {
            const int8_t *row = p.values + r * SPAN_BLOCK + 16 * h + 8 * j;
            a[r] = fetch(p.pairs, row, r + 1 < p.rows ? row + SPAN_BLOCK : row);
        }
        UNROLL for (int q = 0; q < p.quads; q++) {
            uint8x16_t weights[2];
            span_arranged(p, quad + q, h, j, weights);
            UNROLL for (int r = 0; r < p.rows; r += step)
                accumulate(p.pairs, weights, a[r], &dots[r][q], &dots[r + step - 1][q]);
            FENCE();
        }
    }
}

INLINE void span_start(int32x4_t dots[PANEL][QUADS]) {
    UNROLL for (int r = 0; r < PANEL; r++)
        UNROLL for (int q = 0; q < QUADS; q++) dots[r][q] = vdupq_n_s32(0);
}

INLINE void span_collect(span_piece p, int32x4_t dots[PANEL][QUADS]) {
    if (!p.pairs) return;
    UNROLL for (int r = 0; r < p.rows; r += 2)
        UNROLL for (int q = 0; q < p.quads; q++) collect(&dots[r][q], &dots[r + 1][q]);
}

INLINE float32x4_t less_zero(form_facts f, int32x4_t dot, int32_t sum) {
    return vcvtq_f32_s32(vsubq_s32(dot, vdupq_n_s32(zero_of(f) * sum)));
}

/* Adds a block's products of 4 columns from `at` on to the sum of a row. */
INLINE float32x4_t span_added(form_facts f, const span_view *t, int64_t b, int64_t row, int at, int32x4_t dot,
                              int32x4_t second, float32x4_t sum) {
    const span_scales *s = t->scales;
    const float a = t->row_scales[row];
    const int32_t all = t->row_sums[row];
    if (!f.halves) {
        sum = vfmaq_f32(sum, less_zero(f, dot, all), vmulq_n_f32(vld1q_f32(s->scales[b] + at), a));
        return f.minimum ? vfmsq_f32(sum, vld1q_f32(s->minima[b] + at), vdupq_n_f32(a * (float)all)) : sum;
    }
    const int32_t half = t->row_halves[row], rest = all - half;
    const float32x4_t first = vmulq_f32(vld1q_f32(s->scales[2 * b] + at), less_zero(f, dot, half));
    const float32x4_t both = vfmaq_f32(first, vld1q_f32(s->scales[2 * b + 1] + at), less_zero(f, second, rest));
    sum = vfmaq_f32(sum, both, vmulq_n_f32(vld1q_f32(s->d + at), a));
    if (!f.minimum) return sum;
    const float32x4_t minima = vfmaq_f32(vmulq_n_f32(vld1q_f32(s->minima[2 * b] + at), (float)half),
                                         vld1q_f32(s->minima[2 * b + 1] + at), vdupq_n_f32((float)rest));
    return vfmsq_f32(sum, minima, vmulq_n_f32(vld1q_f32(s->dmin + at), a));
}

/* Adds the products of a block, all 32 columns, to the rows' sums. */
INLINE void span_block(span_piece p, const span_view *t, int64_t b, int64_t at, float *sums) {
    p.values = t->values + at * SPAN_BLOCK, p.levels = t->levels, p.quads = p.rows > 2 ? QUADS / 2 : QUADS;
    UNROLL for (int quad = 0; quad < QUADS; quad += p.quads) {
        int32x4_t dots[PANEL][QUADS], seconds[PANEL][QUADS];
        span_start(dots);
        span_start(seconds);
        half_dots(p, 0, quad, dots);
        half_dots(p, 1, quad, p.f.halves ? seconds : dots);
        span_collect(p, dots);
        if (p.f.halves) span_collect(p, seconds);
        UNROLL for (int r = 0; r < p.rows; r++)
            UNROLL for (int q = 0; q < p.quads; q++) {
                float *sum = sums + r * LOWBIT_TILE + (quad + q) * 4;
                vst1q_f32(sum, span_added(p.f, t, b, at + r, (quad + q) * 4, dots[r][q], seconds[r][q], vld1q_f32(sum)));
            }
    }
}

/* Few rows: straight from the bytes. */
INLINE void span_stream(int form, int rows, const span_view *t, int64_t first, float *sums) {
    span_piece p = {.f = facts_of(form), .pairs = PAIRS && rows > 1, .rows = rows};
    for (int64_t b = 0; b < t->blocks; b++) {
        p.data = t->data + b * p.f.bits * 128;
        span_block(p, t, b, b * t->m + first, sums);
    }
}

/* One unpacked block for any number of rows. */
INLINE void span_unpacked_rows(span_piece p, const span_view *t, int64_t b, int64_t first, int64_t count, float *sums) {
    for (p.rows = PANEL; count >= PANEL; count -= PANEL, first += PANEL, sums += PANEL * LOWBIT_TILE)
        span_block(p, t, b, b * t->m + first, sums);
    UNROLL for (p.rows = 1; p.rows < PANEL; p.rows++)
        if (count == p.rows) span_block(p, t, b, b * t->m + first, sums);
}

/* More rows: each block unpacked once. */
INLINE void span_resident(int form, const span_view *t, int64_t first, int64_t count, float *sums) {
    _Alignas(64) uint8_t unpacked[SPAN_BLOCK * LOWBIT_TILE];
    span_piece p = {.f = facts_of(form), .pairs = PAIRS, .levels = t->levels};
    for (int64_t b = 0; b < t->blocks; b++) {
        p.data = t->data + b * p.f.bits * 128;
        UNROLL for (int k = 0; k < 4; k++)
            for (int q = 0; q < QUADS; q++) {
                uint8x16_t weights[2];
                span_arranged(p, q, k / 2, k % 2, weights);
                vst1q_u8(unpacked + unpacked_at(8 * k, q), weights[0]);
                vst1q_u8(unpacked + unpacked_at(8 * k, q) + 16, weights[1]);
            }
        const span_piece rest = {.f = p.f, .pairs = PAIRS, .unpacked = 1, .data = unpacked};
        span_unpacked_rows(rest, t, b, first, count, sums);
    }
}

typedef void span_function(const span_view *t, int64_t first, int64_t count, float *sums);

#define SPAN_FUNCTION(form)                                                                            \
    NOINLINE void span_##form(const span_view *t, int64_t first, int64_t count, float *sums) {         \
        if (count == 1) span_stream(form, 1, t, first, sums);                                          \
        if (count == 2) span_stream(form, 2, t, first, sums);                                          \
        if (count == 3) span_stream(form, 3, t, first, sums);                                          \
        if (count == 4) span_stream(form, 4, t, first, sums);                                          \
        if (count > PANEL) span_resident(form, t, first, count, sums);                                 \
    }
#define SPAN_NAME(form) [form] = span_##form,
ALL_FORMS(SPAN_FUNCTION)
static span_function *const span_functions[FORMS] = {ALL_FORMS(SPAN_NAME)};

INLINE void add_span(int form, const span_view *t, int64_t first, int64_t count, float *sums) {
    span_functions[form](t, first, count, sums);
}
