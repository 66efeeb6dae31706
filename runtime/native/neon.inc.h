/* What the two NEON paths share: unpacking, scales, panels of rows; knows nothing of how products are summed.
 *
 * A path defines, includes this file, and then defines the four functions declared below:
 *     PAIRS        whether two rows are multiplied by one instruction
 *     BIAS8        what arrange takes off 8-bit weights
 *     activations  8 consecutive values of a row, or of two
 */
#include <arm_neon.h>

#include "lowbit.h"
#include "tile.h"

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);
static void span_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);

#include "kernel.inc.h"

#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#define UNROLL
#define FENCE() _ReadWriteBarrier()
#else
/* Keeps the compiler, not the processor, from loading early what there is no register for. */
#define FENCE() __asm__ volatile("" ::: "memory")
/* Sums stay in registers only where every index of theirs is a constant. */
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* Rows multiplied together: with 16 columns, or two of them with 32, their integer sums fill 16 of 32 registers. Up to
 * this many rows run over the packed weights as they stream in; more find each block unpacked in the cache. */
enum { PANEL = 4 };
/* Registers of 4 columns in a tile. */
enum { QUADS = LOWBIT_TILE / 4 };
/* Scales, zero points and the power of two that products are multiplied by, of one block, in the units of values.h. */
typedef struct {
    float32x4_t scales[QUADS];
    int32x4_t zeros[QUADS];
    int shift;
} block_view;

/* One row's values, or with `pairs` those of the row after it, too. */
INLINE activations fetch(int pairs, const int8_t *row, const int8_t *next);
/* Makes of 4 columns by 4 consecutive k and the same columns by the next 4 what accumulate takes. */
INLINE void arrange(int format, int pairs, uint8x16_t *weights);
/* Adds the products to the sums of a row, or with `pairs` to those of two. */
INLINE void accumulate(int pairs, const uint8x16_t *weights, activations a, int32x4_t *even, int32x4_t *odd);
/* Makes of the sums of two rows one register of 4 columns for each. */
INLINE void collect(int32x4_t *even, int32x4_t *odd);

/* Arrays of consecutive k whose values share bytes. */
INLINE int slots(int format) { return has_fours(format) || format == BITS3 ? 4 : 2; }

/* How a block of a format, in `parts` slots, is walked: values of all slots from one step to the next, and from one slot to
 * the next within a step. Those of 3 bits lie together 32 by 32. */
INLINE int walk_step(int format, int parts) { return format == BITS3 && parts > 1 ? LOWBIT_CHUNK : 8; }
INLINE int slot_apart(int format, int parts, int block) { return format == BITS3 && parts > 1 ? 8 : block / parts; }
INLINE int walk_end(int format, int parts, int block) { return format == BITS3 && parts > 1 ? block : block / parts; }

/* The values that codes of vectors stand for: slot s of the s-th. */
INLINE void unpack_vectors(uint8x16_t codes, uint8x16_t *out) {
    const uint8x16_t chosen = vandq_u8(codes, vdupq_n_u8(15)), zero = vdupq_n_u8(LOWBIT_VECTOR_ZERO);
    UNROLL for (int s = 0; s < 4; s++) {
        const uint8x16_t magnitudes = vqtbl1q_u8(vld1q_u8(lowbit_vectors[s]), chosen);
        const uint8x16_t below = vtstq_u8(codes, vdupq_n_u8((uint8_t)(16 << s)));
        out[s] = vbslq_u8(below, vsubq_u8(zero, magnitudes), vaddq_u8(zero, magnitudes));
    }
}

INLINE void unpack(int format, uint8x16_t data, uint8x16_t low, uint8x16_t *out) {
    if (format == VECTORS) {
        unpack_vectors(data, out);
    } else if (format == BITS2) {
        const uint8x16_t mask = vdupq_n_u8(3);
        out[0] = vandq_u8(data, mask);
        out[1] = vandq_u8(vshrq_n_u8(data, 2), mask);
        out[2] = vandq_u8(vshrq_n_u8(data, 4), mask);
        out[3] = vshrq_n_u8(data, 6);
    } else if (format == BITS8) {
        out[0] = vsliq_n_u8(low, data, 4);
        out[1] = vsriq_n_u8(data, low, 4);
    } else {
        out[0] = vandq_u8(data, vdupq_n_u8(15));
        out[1] = vshrq_n_u8(data, 4);
        UNROLL for (int s = 0; s < 2 && format == E2M1; s++) out[s] = vqtbl1q_u8(vld1q_u8(lowbit_e2m1), out[s]);
    }
}

/* Weights of 4 columns of a chunk of 3 bits, 8 consecutive k to a slot. */
INLINE void chunk_weights(const uint8_t *chunk, uint8x16_t weights[4][2]) {
    const uint8x16_t mask = vdupq_n_u8(7), high = vld1q_u8(chunk + LOWBIT_CHUNK_HIGH);
    UNROLL for (int h = 0; h < 2; h++) {
        uint8x16_t low = vld1q_u8(chunk + h * LOWBIT_TILE * 4);
        uint8x16_t even = vbslq_u8(vdupq_n_u8(0x33), low, h ? high : vshlq_n_u8(high, 2));
        uint8x16_t odd = vbslq_u8(vdupq_n_u8(0x33), vshrq_n_u8(low, 2), h ? vshrq_n_u8(high, 1) : vshlq_n_u8(high, 1));
        weights[2 * h][0] = vandq_u8(even, mask);
        weights[2 * h][1] = vandq_u8(odd, mask);
        weights[2 * h + 1][0] = vandq_u8(vshrq_n_u8(even, 4), mask);
        weights[2 * h + 1][1] = vandq_u8(vshrq_n_u8(odd, 4), mask);
    }
}

/* Packed weights of 4 columns by 8 consecutive k from `k` on, of each slot. */
INLINE void packed_weights(int format, int pairs, const uint8_t *data, const uint8_t *low, int k, int quad,
                           uint8x16_t weights[4][2]) {
    if (format == BITS3) chunk_weights(data + k / LOWBIT_CHUNK * LOWBIT_CHUNK_BYTES + quad * 16, weights);
    UNROLL for (int half = 0; half < 2 && format != BITS3; half++) {
        int at = (k + 4 * half) * LOWBIT_TILE + quad * 16;
        uint8x16_t bytes = vld1q_u8(data + at), out[4];
        unpack(format, bytes, format == BITS8 ? vld1q_u8(low + at) : bytes, out);
        UNROLL for (int s = 0; s < slots(format); s++) weights[s][half] = out[s];
    }
    UNROLL for (int s = 0; s < slots(format); s++) arrange(format, pairs, weights[s]);
}

/* Where the arranged weights of a quad of an unpacked block are: 8 k by 8 k, then quad by quad. */
INLINE int unpacked_at(int k, int quad) { return k * LOWBIT_TILE + quad * 32; }

/* Products of one block, `count` rows and `quads` quads. With `parts` of 1 data is an unpacked block, else a packed
 * one in as many slots. */
INLINE void dot_block(int format, int parts, int pairs, int count, int quads, const uint8_t *data, const uint8_t *low,
                      const int8_t *values, int32_t block, int quad, int32x4_t dots[PANEL][QUADS]) {
    const int step = pairs ? 2 : 1, apart = slot_apart(format, parts, block);
    UNROLL for (int r = 0; r < PANEL; r++)
        UNROLL for (int q = 0; q < quads; q++) dots[r][q] = vdupq_n_s32(0);
    for (int k = 0; k < walk_end(format, parts, block); k += walk_step(format, parts)) {
        activations a[PANEL][4];
        UNROLL for (int r = 0; r < count; r += step)
            UNROLL for (int s = 0; s < parts; s++) {
                const int8_t *row = values + r * block + s * apart + k;
                a[r][s] = fetch(pairs, row, r + 1 < count ? row + block : row);
            }
        UNROLL for (int q = 0; q < quads; q++) {
            uint8x16_t weights[4][2];
            if (parts == 1) {
                weights[0][0] = vld1q_u8(data + unpacked_at(k, quad + q));
                weights[0][1] = vld1q_u8(data + unpacked_at(k, quad + q) + 16);
            } else {
                packed_weights(format, pairs, data, low, k, quad + q, weights);
            }
            UNROLL for (int s = 0; s < parts; s++)
                UNROLL for (int r = 0; r < count; r += step)
                    accumulate(pairs, weights[s], a[r][s], &dots[r][q], &dots[r + step - 1][q]);
            FENCE();
        }
    }
    if (!pairs) return;
    UNROLL for (int r = 0; r < count; r += 2)
        UNROLL for (int q = 0; q < quads; q++) collect(&dots[r][q], &dots[r + 1][q]);
}

/* Adds one block's products, less zero * sum, scaled, to the sums of `count` rows. */
INLINE void add_block(int count, int quads, const tile_view *t, const block_view *view, int64_t at, int quad,
                      int32x4_t dots[PANEL][QUADS], float *sums) {
    const int32x4_t shift = vdupq_n_s32(view->shift);
    UNROLL for (int r = 0; r < count; r++) {
        float scale = t->row_scales[at + r];
        int32_t sum = t->row_sums[at + r];
        UNROLL for (int q = 0; q < quads; q++) {
            float *total = sums + r * LOWBIT_TILE + (quad + q) * 4;
            int32x4_t whole = vmlsq_n_s32(vshlq_s32(dots[r][q], shift), view->zeros[quad + q], sum);
            float32x4_t scales = vmulq_n_f32(view->scales[quad + q], scale);
            vst1q_f32(total, vfmaq_f32(vld1q_f32(total), vcvtq_f32_s32(whole), scales));
        }
    }
}

/* All 32 columns of a block for `count` <= PANEL rows. */
INLINE void panel(int format, int parts, int pairs, int count, const tile_view *t, const block_view *view, int64_t b,
                  const uint8_t *data, const uint8_t *low, int64_t first, float *sums) {
    const int quads = count > 2 ? QUADS / 2 : QUADS;
    int64_t at = b * t->m + first;
    const int8_t *values = t->values + at * t->block;
    for (int quad = 0; quad < QUADS; quad += quads) {
        int32x4_t dots[PANEL][QUADS];
        dot_block(format, parts, pairs, count, quads, data, low, values, t->block, quad, dots);
        add_block(count, quads, t, view, at, quad, dots, sums);
    }
}

INLINE void view_block(int format, const tile_view *t, int64_t b, block_view *out) {
    const int32_t taken = format == BITS8 ? BIAS8 : format == HIGH8 ? 15 : 0;
    const int32_t middle = format == HIGH8 ? 2 * 128 : middle_of(format);
    out->shift = format == HIGH8 ? 5 : 0;
    for (int q = 0; q < QUADS; q++) {
        const uint16x4_t bits = vld1_u16(t->scales + b * t->scale_step + q * 4);
        float32x4_t scales = vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
        if (may_be_float16(format) && t->float16) scales = vcvt_f32_f16(vreinterpret_f16_u16(bits));
        out->scales[q] = format == HIGH8 ? vmulq_n_f32(scales, 0.5f) : scales;
        out->zeros[q] = vdupq_n_s32(middle - taken);
    }
    for (int q = 0; q < QUADS && t->zeros; q += 2) {
        uint16x8_t zeros = vmovl_u8(vld1_u8(t->zeros + b * LOWBIT_TILE + q * 4));
        if (format == HIGH8) zeros = vshlq_n_u16(zeros, 1);
        int32x4_t low = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(zeros)));
        int32x4_t high = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(zeros)));
        out->zeros[q] = vsubq_s32(low, vdupq_n_s32(taken));
        out->zeros[q + 1] = vsubq_s32(high, vdupq_n_s32(taken));
    }
}

/* Few rows: straight from the packed weights. */
INLINE void stream(int format, int count, const tile_view *t, int64_t first, float *sums) {
    const int64_t step = (int64_t)t->block / slots(format) * LOWBIT_TILE;
    for (int64_t b = 0; b < t->blocks; b++) {
        block_view view;
        view_block(format, t, b, &view);
        panel(format, slots(format), PAIRS && count > 1, count, t, &view, b, t->data + b * t->data_step,
              format == BITS8 ? t->low + b * step : NULL, first, sums);
    }
}

/* One unpacked block for any number of rows. */
static void unpacked_rows(const tile_view *t, const block_view *view, int64_t b, const uint8_t *weights,
                          int64_t first, int64_t count, float *sums) {
#define ROWS(n) panel(BITS4, 1, PAIRS, n, t, view, b, weights, NULL, first, sums)
    for (; count >= PANEL; count -= PANEL, first += PANEL, sums += PANEL * LOWBIT_TILE) ROWS(PANEL);
    if (count == 1) ROWS(1);
    if (count == 2) ROWS(2);
    if (count == 3) ROWS(3);
#undef ROWS
}

/* More rows: each block unpacked once. */
INLINE void resident(int format, const tile_view *t, int64_t first, int64_t count, float *sums) {
    const int parts = slots(format), apart = slot_apart(format, parts, t->block);
    _Alignas(64) uint8_t unpacked[128 * LOWBIT_TILE];
    for (int64_t b = 0; b < t->blocks; b++) {
        const uint8_t *data = t->data + b * t->data_step;
        const uint8_t *low = format == BITS8 ? t->low + b * apart * LOWBIT_TILE : NULL;
        for (int k = 0; k < walk_end(format, parts, t->block); k += walk_step(format, parts))
            for (int q = 0; q < QUADS; q++) {
                uint8x16_t weights[4][2];
                packed_weights(format, PAIRS, data, low, k, q, weights);
                UNROLL for (int s = 0; s < parts; s++) {
                    vst1q_u8(unpacked + unpacked_at(s * apart + k, q), weights[s][0]);
                    vst1q_u8(unpacked + unpacked_at(s * apart + k, q) + 16, weights[s][1]);
                }
            }
        block_view view;
        view_block(format, t, b, &view);
        unpacked_rows(t, &view, b, unpacked, first, count, sums);
    }
}

INLINE void any_rows(int format, const tile_view *t, int64_t first, int64_t count, float *sums) {
    if (count == 1) stream(format, 1, t, first, sums);
    if (count == 2) stream(format, 2, t, first, sums);
    if (count == 3) stream(format, 3, t, first, sums);
    if (count == 4) stream(format, 4, t, first, sums);
    if (count > PANEL) resident(format, t, first, count, sums);
}

static void rows_bits2(const tile_view *t, int64_t first, int64_t count, float *sums) {
    any_rows(BITS2, t, first, count, sums);
}

static void rows_vectors(const tile_view *t, int64_t first, int64_t count, float *sums) {
    any_rows(VECTORS, t, first, count, sums);
}

static void rows_bits3(const tile_view *t, int64_t first, int64_t count, float *sums) {
    any_rows(BITS3, t, first, count, sums);
}

static void rows_bits4(const tile_view *t, int64_t first, int64_t count, float *sums) {
    any_rows(BITS4, t, first, count, sums);
}

static void rows_e2m1(const tile_view *t, int64_t first, int64_t count, float *sums) {
    any_rows(E2M1, t, first, count, sums);
}

static void rows_bits8(const tile_view *t, int64_t first, int64_t count, float *sums) {
    any_rows(BITS8, t, first, count, sums);
}

static void rows_high8(const tile_view *t, int64_t first, int64_t count, float *sums) {
    any_rows(HIGH8, t, first, count, sums);
}

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums) {
    const tile_view t = view_of(w, tile, rows);
    if (w->vectors)
        rows_vectors(&t, first, count, sums);
    else if (w->bits == 2)
        rows_bits2(&t, first, count, sums);
    else if (w->bits == 3)
        rows_bits3(&t, first, count, sums);
    else if (w->e2m1)
        rows_e2m1(&t, first, count, sums);
    else if (w->bits == 4)
        rows_bits4(&t, first, count, sums);
    else if (lowbit_high_only(w))
        rows_high8(&t, first, count, sums);
    else
        rows_bits8(&t, first, count, sums);
}

#include "span_neon.inc.h"
