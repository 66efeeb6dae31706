/* The AVX-512 VNNI path: 16 columns to a register, up to 8 rows per reading of the weights; knows only its tiles.
 *
 * vpdpbusd adds four products of unsigned weights and signed activations per lane, exactly.
 */
#include "lowbit.h"
#include "tile.h"

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);
static void span_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);

#include "kernel.inc.h"

#if defined(__AVX512VNNI__) || (defined(_MSC_VER) && defined(__AVX512F__))
#include <immintrin.h>

/* Has a sum updated where that is written: GCC else keeps it in two registers, and spills some. */
#if defined(__GNUC__)
#define KEEP(sum) __asm__("" : "+v"(sum))
/* Keeps the compiler, not the processor, from loading early what there is no register for. */
#define FENCE() __asm__ volatile("" ::: "memory")
#define UNROLL _Pragma("GCC unroll 16")
#else
#define KEEP(sum) (void)0
#define FENCE() (void)0
#define UNROLL
#endif

/* Rows whose integer sums, two registers each, stay in registers beside the weights, and whose float sums do as well. */
enum { PANEL = 8, HELD = 6 };
/* Bytes that are asked for early, into the second-level cache, of whose requests more can wait than of the first's
 * (docs/LOG.md, 2026-11-26). */
enum { AHEAD = 6144 };
INLINE int slot_bits(int format) { return has_fours(format) ? 2 : 4; }

/* Rows whose sums fit the registers even once per slot of the weights' bytes. */
INLINE int few(int format) { return has_fours(format) ? 1 : 2; }

/* How far left of its place slot s is multiplied. A shift less per 64 bytes is time where few rows share it, and they
 * have registers to sum each slot apart; the sums are shifted back, exactly. */
INLINE int slot_shift(int format, int count, int s) {
    return count <= few(format) && format != BITS8 && format != E2M1 && format != VECTORS ? s * slot_bits(format) : 0;
}

INLINE __m512i values_of_e2m1(void) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)lowbit_e2m1));
}

/* The values that codes of vectors stand for: slot s of the s-th. */
INLINE void unpack_vectors(__m512i codes, __m512i *out) {
    const __m512i chosen = _mm512_and_si512(codes, _mm512_set1_epi8(15)), zero = _mm512_set1_epi8(LOWBIT_VECTOR_ZERO);
    for (int s = 0; s < 4; s++) {
        const __m512i magnitudes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)lowbit_vectors[s]));
        const __mmask64 below = _mm512_test_epi8_mask(codes, _mm512_set1_epi8((char)(16 << s)));
        out[s] = _mm512_shuffle_epi8(_mm512_add_epi8(zero, magnitudes), chosen);
        out[s] = _mm512_mask_shuffle_epi8(out[s], below, _mm512_sub_epi8(zero, magnitudes), chosen);
    }
}

/* Weights of 16 columns: slot s holds 4 consecutive k of the s-th part of the block. */
INLINE void unpack(int format, int count, const uint8_t *data, const uint8_t *low, __m512i *out) {
    __m512i v = _mm512_loadu_si512(data);
    if (format == VECTORS) {
        unpack_vectors(v, out);
        return;
    }
    if (format == BITS8) {
        /* 0xca picks the second operand's bits where the first is set, the third's elsewhere. */
        const __m512i mask = _mm512_set1_epi8(15);
        __m512i l = _mm512_loadu_si512(low);
        out[0] = _mm512_ternarylogic_epi32(mask, l, _mm512_slli_epi16(v, 4), 0xca);
        out[1] = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(l, 4), v, 0xca);
        return;
    }
    for (int s = 0; s < 8 / slot_bits(format); s++) {
        int left = slot_shift(format, count, s);
        const __m512i mask = _mm512_set1_epi8((char)(((1 << slot_bits(format)) - 1) << left));
        __m512i shifted = left == s * slot_bits(format) ? v : _mm512_srli_epi16(v, (unsigned)(s * slot_bits(format)));
        out[s] = _mm512_and_si512(shifted, mask);
        if (format == E2M1) out[s] = _mm512_shuffle_epi8(values_of_e2m1(), out[s]);
    }
}

/* Asks for the lines that come some time after this one. */
INLINE void fetch(const uint8_t *line) { _mm_prefetch((const char *)(line + AHEAD), _MM_HINT_T1); }

INLINE __m512i four(const int8_t *values) {
    int32_t word;
    memcpy(&word, values, sizeof word);
    return _mm512_set1_epi32(word);
}

/* Scales of a block's 32 columns, in the units of values.h. */
INLINE __m512 column_scales(int format, const tile_view *t, int64_t b, int g) {
    const uint16_t *scales = t->scales + b * t->scale_step + g * LOWBIT_GROUP;
    const __m256i bits = _mm256_loadu_si256((const __m256i *)scales);
    __m512 values = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    if (may_be_float16(format) && t->float16) values = _mm512_cvtph_ps(bits);
    return format == HIGH8 ? _mm512_mul_ps(values, _mm512_set1_ps(0.5f)) : values;
}

/* Minus zero point * sum of a block's columns and rows, which the products are added to. The zero points are looked at
 * once for all rows. */
INLINE void less_zeros(int format, int count, const tile_view *t, int64_t b, const int32_t *sums, __m512i dots[PANEL][2]) {
    if (!t->zeros) {
        UNROLL for (int r = 0; r < count; r++) dots[r][0] = dots[r][1] = _mm512_set1_epi32(-middle_of(format) * sums[r]);
        return;
    }
    UNROLL for (int g = 0; g < 2; g++) {
        const uint8_t *bytes = t->zeros + b * LOWBIT_TILE + g * LOWBIT_GROUP;
        __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
        if (format == HIGH8) zeros = _mm512_sub_epi32(_mm512_slli_epi32(zeros, 1), _mm512_set1_epi32(15));
        UNROLL for (int r = 0; r < count; r++) dots[r][g] = _mm512_mullo_epi32(zeros, _mm512_set1_epi32(-sums[r]));
    }
}

/* Adds the integer products of one block and `count` rows. */
INLINE void dot_block(int format, int count, const uint8_t *data, const uint8_t *low, const int8_t *values,
                      int block, __m512i dots[PANEL][2]) {
    const int slots = 8 / slot_bits(format), span = block / slots;
    /* Few rows have few chains of additions: each slot then has its own. */
    const int chains = count <= few(format) ? slots : 1;
    __m512i sums[PANEL][2][4];
    for (int r = 0; r < count; r++)
        for (int g = 0; g < 2; g++)
            for (int s = 0; s < chains; s++)
                sums[r][g][s] = s == 0 && format != HIGH8 ? dots[r][g] : _mm512_setzero_si512();
    for (int v = 0; v < span; v += 4) {
        __m512i weights[2][4];
        for (int g = 0; g < 2; g++) {
            int at = v * LOWBIT_TILE + g * 64;
            unpack(format, count, data + at, low + (format == BITS8 ? at : 0), weights[g]);
            fetch(data + at);
            if (format == BITS8) fetch(low + at);
        }
        for (int s = 0; s < slots; s++)
            for (int r = 0; r < count; r++) {
                __m512i a = four(values + r * block + s * span + v);
                for (int g = 0; g < 2; g++) {
                    __m512i *sum = &sums[r][g][s % chains];
                    *sum = _mm512_dpbusd_epi32(*sum, weights[g][s], a);
                    KEEP(*sum);
                }
            }
    }
    for (int r = 0; r < count; r++)
        for (int g = 0; g < 2; g++) {
            __m512i sum = sums[r][g][0];
            for (int s = 1; s < chains; s++)
                sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums[r][g][s], (unsigned)slot_shift(format, count, s)));
            /* By the high plane alone: 16 * high, doubled. */
            dots[r][g] = format == HIGH8 ? _mm512_add_epi32(dots[r][g], _mm512_slli_epi32(sum, 5)) : sum;
        }
}

/* Weights of 16 columns at 3 bits: of the values s and s + 2 of half `h` of a chunk, s being `odd`, in halves of bytes. */
INLINE __m512i nibbles3(__m512i low, __m512i high, int h, int odd) {
    __m512i l = odd ? _mm512_srli_epi16(low, 2) : low, up = high;
    if (2 * h + odd == 3) up = _mm512_srli_epi16(high, 1);
    if (2 * h + odd < 2) up = _mm512_slli_epi16(high, (unsigned)(2 - odd));
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x33), l, up, 0xca);
}

/* Adds the integer products of one block of 3 bits and `count` rows. */
INLINE void dot_block3(int count, const uint8_t *data, const int8_t *values, int block, __m512i dots[PANEL][2]) {
    /* Few rows sum the upper values of a byte where they are, 16 times as large, and have registers for more chains. */
    const int apart = count <= few(BITS3), chains = apart ? 4 : 1;
    const __m512i lower = _mm512_set1_epi8(0x07), upper = _mm512_set1_epi8(0x70);
    __m512i sums[PANEL][2][4];
    for (int r = 0; r < count; r++)
        for (int g = 0; g < 2; g++)
            for (int s = 0; s < chains; s++) sums[r][g][s] = s == 0 ? dots[r][g] : _mm512_setzero_si512();
    for (int k = 0; k < block; k += LOWBIT_CHUNK, data += LOWBIT_CHUNK_BYTES)
        for (int h = 0; h < 2; h++) {
            __m512i weights[2][4];
            for (int g = 0; g < 2; g++) {
                __m512i low = _mm512_loadu_si512(data + (2 * h + g) * 64);
                __m512i high = _mm512_loadu_si512(data + LOWBIT_CHUNK_HIGH + g * 64);
                fetch(data + (3 * h + g) * 64);
                for (int odd = 0; odd < 2; odd++) {
                    __m512i both = nibbles3(low, high, h, odd);
                    weights[g][odd] = _mm512_and_si512(both, lower);
                    weights[g][2 + odd] = apart ? _mm512_and_si512(both, upper)
                                                : _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
                }
            }
            fetch(data + (3 * h + 2) * 64);
            for (int s = 0; s < 4; s++)
                for (int r = 0; r < count; r++) {
                    __m512i a = four(values + r * block + k + h * 16 + s * 4);
                    for (int g = 0; g < 2; g++) {
                        __m512i *sum = &sums[r][g][s % chains];
                        *sum = _mm512_dpbusd_epi32(*sum, weights[g][s], a);
                        KEEP(*sum);
                    }
                }
        }
    for (int r = 0; r < count; r++)
        for (int g = 0; g < 2; g++) {
            __m512i *sum = sums[r][g];
            dots[r][g] = sum[0];
            if (apart)
                dots[r][g] = _mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]),
                                              _mm512_srai_epi32(_mm512_add_epi32(sum[2], sum[3]), 4));
        }
}

/* Adds the products of blocks begin..end-1 of a tile and `count` <= PANEL rows to their sums, which stay in registers of
 * their own where there are enough. */
INLINE void panel(int format, int block, int count, const tile_view *view, int64_t begin, int64_t end, int64_t first,
                  float *sums) {
    const tile_view t = *view;
    const int64_t step = block * LOWBIT_GROUP; /* of a low plane */
    const int held = count <= HELD;
    __m512 totals[PANEL][2];
    UNROLL for (int r = 0; r < count && held; r++)
        UNROLL for (int g = 0; g < 2; g++) totals[r][g] = _mm512_loadu_ps(sums + r * LOWBIT_TILE + g * LOWBIT_GROUP);
    for (int64_t b = begin; b < end; b++) {
        int64_t at = b * t.m + first;
        __m512i dots[PANEL][2];
        less_zeros(format, count, &t, b, t.row_sums + at, dots);
        /* The line of inline scales, which lies between those of the values. */
        if (t.scale_step != LOWBIT_TILE) fetch((const uint8_t *)(t.scales + b * t.scale_step));
        if (format == BITS3)
            dot_block3(count, t.data + b * t.data_step, t.values + at * block, block, dots);
        else
            dot_block(format, count, t.data + b * t.data_step, format == BITS8 ? t.low + b * step : NULL,
                      t.values + at * block, block, dots);
        if (!held) FENCE();
        UNROLL for (int g = 0; g < 2; g++) {
            const __m512 scales = column_scales(format, &t, b, g);
            UNROLL for (int r = 0; r < count; r++) {
                float *sum = sums + r * LOWBIT_TILE + g * LOWBIT_GROUP;
                __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(t.row_scales[at + r]));
                __m512 before = held ? totals[r][g] : _mm512_loadu_ps(sum);
                totals[r][g] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][g]), scale, before);
                if (!held) _mm512_storeu_ps(sum, totals[r][g]);
            }
        }
    }
    UNROLL for (int r = 0; r < count && held; r++)
        UNROLL for (int g = 0; g < 2; g++) _mm512_storeu_ps(sums + r * LOWBIT_TILE + g * LOWBIT_GROUP, totals[r][g]);
}

/* One function per format, block and number of rows: the compiler then addresses all rows from one register and keeps
 * every sum in its own. */
typedef void panel_function(const tile_view *t, int64_t begin, int64_t end, int64_t first, float *sums);

#define ONE(format, block, count)                                                                             \
    NOINLINE void panel_##format##_##block##_##count(const tile_view *t, int64_t begin, int64_t end,           \
                                                     int64_t first, float *sums) {                             \
        panel(format, block, count, t, begin, end, first, sums);                                               \
    }
#define ALL_COUNTS(what, format, block)                                                                       \
    what(format, block, 1) what(format, block, 2) what(format, block, 3) what(format, block, 4)                \
    what(format, block, 5) what(format, block, 6) what(format, block, 7) what(format, block, 8)
#define ALL_BLOCKS(what, format)                                                                              \
    ALL_COUNTS(what, format, 32) ALL_COUNTS(what, format, 64) ALL_COUNTS(what, format, 128)
ALL_BLOCKS(ONE, BITS2)
ALL_BLOCKS(ONE, VECTORS)
ALL_BLOCKS(ONE, BITS3)
ALL_BLOCKS(ONE, BITS4)
ALL_BLOCKS(ONE, BITS8)
ALL_BLOCKS(ONE, HIGH8)
ALL_COUNTS(ONE, E2M1, 32)

#define NAME(format, block, count) panel_##format##_##block##_##count,
#define OF_FORMAT(format)                                                                                     \
    {{ALL_COUNTS(NAME, format, 32)}, {ALL_COUNTS(NAME, format, 64)}, {ALL_COUNTS(NAME, format, 128)}}
static panel_function *const panel_functions[FORMATS][3][PANEL] = {
    [BITS2] = OF_FORMAT(BITS2), [BITS4] = OF_FORMAT(BITS4), [BITS8] = OF_FORMAT(BITS8), [HIGH8] = OF_FORMAT(HIGH8),
    [BITS3] = OF_FORMAT(BITS3), [VECTORS] = OF_FORMAT(VECTORS),
    [E2M1] = {{ALL_COUNTS(NAME, E2M1, 32)}}};

/* Panels take turns every 128 k: the first streams them from memory, the others find them in the cache. If each went
 * through the whole tile, memory would idle while all but the first do. */
static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums) {
    const tile_view t = view_of(w, tile, rows);
    panel_function *const *functions = panel_functions[format_of(w)][w->block / 64];
    int64_t turn = count <= PANEL ? t.blocks : 128 / w->block;
    for (int64_t b = 0; b < t.blocks; b += turn)
        for (int64_t r = 0; r < count; r += PANEL)
            functions[smaller(count - r, PANEL) - 1](&t, b, smaller(b + turn, t.blocks), first + r,
                                                     sums + r * LOWBIT_TILE);
}

#include "span_avx512.inc.h"

const lowbit_isa lowbit_avx512vnni = {"avx512vnni", quantize, multiply};
#else
const lowbit_isa lowbit_avx512vnni = {"avx512vnni", NULL, NULL};
#endif
