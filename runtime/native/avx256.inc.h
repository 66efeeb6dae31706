/* What the paths of 256-bit registers share: unpacking, scales, panels of rows; knows nothing of how dots are summed.
 *
 * A path includes this file and then defines add_dots.
 */
#include <immintrin.h>

#include "lowbit.h"
#include "values.h"

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);

#include "kernel.inc.h"

#if defined(_MSC_VER) && !defined(__clang__)
#define INLINE static __forceinline
#define NOINLINE static __declspec(noinline)
#else
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#endif

/* Has a value where it is written. */
#if defined(__GNUC__)
#define KEEP(value) __asm__("" : "+x"(value))
#else
#define KEEP(value) (void)0
#endif

/* Rows whose sums, of 16 columns, stay in registers beside the weights. */
enum { PANEL = 4 };
/* From this many rows on arithmetic takes longer than a tile's bytes, and the memory system no longer runs ahead by
 * itself: it is told AHEAD bytes early. */
#ifndef FF
#define FF 4
#endif
#ifndef RUN
#define RUN 128
#endif
#ifndef AH
#define AH 2048
#endif
enum { FETCH_FROM = FF, AHEAD = AH };
/* Formats, by how bytes become weights. */
enum { BITS2, BITS4, BITS8, HIGH8 };
/* Registers of 8 columns in a tile, and bytes of a tile by 4 consecutive k. */
enum { PARTS = 4, STEP = 128 };

/* One tile of a matrix and all rows. */
typedef struct {
    const uint8_t *data, *low, *zeros;
    const uint16_t *scales;
    const int8_t *values;
    const float *row_scales;
    const int32_t *row_sums;
    int64_t m, blocks; /* m of all rows: the stride between blocks */
} tile_view;

/* What add_dots multiplies: one block of weights and rows, `parts` registers of 8 columns wide. */
typedef struct {
    const uint8_t *data, *low, *ahead, *low_ahead;
    const int8_t *values;
    int format, block, count, parts;
} job;

/* Adds the integer products of one block to sums, in the units of values.h. */
INLINE void add_dots(job j, __m256i sums[PANEL][PARTS]);

INLINE void fetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

INLINE int slots(int format) { return format == BITS2 ? 4 : 2; }

INLINE __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

INLINE __m256i four(const int8_t *values) {
    int32_t word;
    memcpy(&word, values, sizeof word);
    return _mm256_set1_epi32(word);
}

/* Weights of 8 columns, 4 consecutive k of the s-th part of the block. */
INLINE __m256i unpack(int format, int s, __m256i data, __m256i low) {
    const __m256i two = _mm256_set1_epi8(3), four = _mm256_set1_epi8(15), high = _mm256_set1_epi8(-16);
    if (format == BITS2) return _mm256_and_si256(_mm256_srli_epi16(data, 2 * s), two);
    if (format == BITS8 && s == 0)
        return _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(data, four), 4), _mm256_and_si256(low, four));
    if (format == BITS8)
        return _mm256_or_si256(_mm256_and_si256(data, high), _mm256_and_si256(_mm256_srli_epi16(low, 4), four));
    return _mm256_and_si256(s == 0 ? data : _mm256_srli_epi16(data, 4), four);
}

/* Scales of 8 columns of a block, in the units of values.h. */
INLINE __m256 column_scales(int format, const tile_view *t, int64_t b, int part) {
    const uint16_t *scales = t->scales + b * LOWBIT_TILE + part * 8;
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)scales));
    __m256 values = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    return format == HIGH8 ? _mm256_mul_ps(values, _mm256_set1_ps(0.5f)) : values;
}

/* Zero points of 8 columns of a block times minus a row's sum of activations. */
INLINE __m256i offsets(int format, const tile_view *t, int64_t b, int part, int32_t row_sum) {
    if (!t->zeros) {
        int32_t middle = format == BITS2 ? 2 : format == BITS4 ? 8 : format == BITS8 ? 128 : 2 * 128 - 15;
        return _mm256_set1_epi32(-middle * row_sum);
    }
    const uint8_t *bytes = t->zeros + b * LOWBIT_TILE + part * 8;
    __m256i zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
    if (format == HIGH8) zeros = _mm256_sub_epi32(_mm256_slli_epi32(zeros, 1), _mm256_set1_epi32(15));
    /* Both factors fit 16 bits, the sum being at most 128 * 127; the other half of each lane multiplies zero. */
    return _mm256_madd_epi16(zeros, _mm256_set1_epi32(-row_sum & 0xffff));
}

/* Adds one block's products, from register `part` of the tile on, less zero * sum, scaled, to the rows' sums. */
INLINE void add_block(job j, const tile_view *t, int64_t b, int part, int64_t first, float *sums) {
    int64_t at = b * t->m + first;
    __m256i dots[PANEL][PARTS];
    for (int r = 0; r < j.count; r++)
        for (int c = 0; c < j.parts; c++) dots[r][c] = offsets(j.format, t, b, part + c, t->row_sums[at + r]);
    j.values = t->values + at * j.block;
    add_dots(j, dots);
    for (int c = 0; c < j.parts; c++) {
        __m256 scales = column_scales(j.format, t, b, part + c);
        for (int r = 0; r < j.count; r++) {
            float *sum = sums + r * LOWBIT_TILE + (part + c) * 8;
            __m256 scale = _mm256_mul_ps(scales, _mm256_set1_ps(t->row_scales[at + r]));
            _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][c]), scale, _mm256_loadu_ps(sum)));
        }
    }
}

/* Adds the products of a tile and `count` <= PANEL rows to their sums. */
INLINE void panel(int format, int block, int count, const tile_view *t, int64_t from, int64_t to, int64_t ahead, int64_t first,
                  float *sums) {
    const int64_t step = block * (format == BITS2 ? 8 : 16);
    const int parts = count == 1 || (count == 2 && format != BITS2) ? PARTS : PARTS / 2;
    for (int64_t b = from; b < to; b++)
        for (int part = 0; part < PARTS; part += parts) {
            const uint8_t *data = t->data + b * step, *low = format == BITS8 ? t->low + b * step : data;
            int64_t next = ahead + part * (step / PARTS);
            job j = {data + part * 32, low + part * 32, data + next, low + next, NULL, format, block, count, parts};
            add_block(j, t, b, part, first, sums);
        }
}

/* One function per format, block and number of rows: the compiler then addresses all rows from one register and keeps
 * every sum in its own. */
typedef void panel_function(const tile_view *t, int64_t from, int64_t to, int64_t ahead, int64_t first, float *sums);

#define ONE(format, block, count)                                                                             \
    NOINLINE void panel_##format##_##block##_##count(const tile_view *t, int64_t from, int64_t to, int64_t ahead, int64_t first, \
                                                     float *sums) {                                            \
        panel(format, block, count, t, from, to, ahead, first, sums);                                                 \
    }
#define ALL_COUNTS(what, format, block) \
    what(format, block, 1) what(format, block, 2) what(format, block, 3) what(format, block, 4)
#define ALL_BLOCKS(format) \
    ALL_COUNTS(ONE, format, 32) ALL_COUNTS(ONE, format, 64) ALL_COUNTS(ONE, format, 128)
ALL_BLOCKS(BITS2)
ALL_BLOCKS(BITS4)
ALL_BLOCKS(BITS8)
ALL_BLOCKS(HIGH8)

#define NAME(format, block, count) panel_##format##_##block##_##count,
#define OF_FORMAT(format) {{ALL_COUNTS(NAME, format, 32)}, {ALL_COUNTS(NAME, format, 64)}, {ALL_COUNTS(NAME, format, 128)}}
static panel_function *const panel_functions[4][3][PANEL] = {
    [BITS2] = OF_FORMAT(BITS2), [BITS4] = OF_FORMAT(BITS4), [BITS8] = OF_FORMAT(BITS8), [HIGH8] = OF_FORMAT(HIGH8)};

static int format_of(const lowbit_matrix *w) {
    if (w->bits == 2) return BITS2;
    if (w->bits == 4) return BITS4;
    return lowbit_high_only(w) ? HIGH8 : BITS8;
}

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums) {
    int64_t blocks = lowbit_blocks(w->k, w->block), step = lowbit_step(w) * blocks;
    const tile_view t = {
        .data = w->data + tile * step,
        .low = w->low ? w->low + tile * step : NULL,
        .zeros = w->zeros ? w->zeros + tile * blocks * LOWBIT_TILE : NULL,
        .scales = w->scales + tile * blocks * LOWBIT_TILE,
        .values = rows->values,
        .row_scales = rows->scales,
        .row_sums = rows->sums,
        .m = rows->m,
        .blocks = blocks,
    };
    panel_function *const *functions = panel_functions[format_of(w)][w->block == 32 ? 0 : w->block == 64 ? 1 : 2];
    if (count <= PANEL) {
        functions[count - 1](&t, 0, blocks, AHEAD, first, sums);
        return;
    }
    const int64_t run = RUN / w->block;
    for (int64_t from = 0; from < blocks; from += run) {
        int64_t to = smaller(from + run, blocks);
        for (int64_t p = 0; p < count; p += PANEL)
            functions[smaller(count - p, PANEL) - 1](&t, from, to, p ? 0 : AHEAD, first + p, sums + p * LOWBIT_TILE);
    }
}
