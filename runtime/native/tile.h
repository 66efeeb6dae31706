/* What the vector paths call a tile and its formats; knows nothing of registers. */
#ifndef EDGEINFER_TILE_H
#define EDGEINFER_TILE_H

#include "lowbit.h"
#include "values.h"

#if defined(_MSC_VER) && !defined(__clang__)
#define INLINE static __forceinline
#define NOINLINE static __declspec(noinline)
#else
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#endif

/* Formats, by how bytes become weights. */
enum { BITS2, BITS4, BITS8, HIGH8, E2M1, BITS3, VECTORS, FORMATS };

/* One tile of a matrix and all rows. */
typedef struct {
    const uint8_t *data, *low, *zeros;
    const uint16_t *scales;
    const int8_t *values;
    const float *row_scales;
    const int32_t *row_sums;
    int64_t m, blocks; /* m of all rows: the stride between blocks */
    int64_t data_step, scale_step; /* bytes and scales from block to block */
    int32_t block, float16;
} tile_view;

/* Whether a byte holds four values. */
INLINE int has_fours(int format) { return format == BITS2 || format == VECTORS; }

/* Formats whose scales are float16 where the matrix says so. */
INLINE int may_be_float16(int format) { return format == BITS2 || format == BITS8 || format == HIGH8; }

INLINE int format_of(const lowbit_matrix *w) {
    if (w->bits == 2) return w->vectors ? VECTORS : BITS2;
    if (w->bits == 3) return BITS3;
    if (w->bits == 4) return w->e2m1 ? E2M1 : BITS4;
    return lowbit_high_only(w) ? HIGH8 : BITS8;
}

INLINE tile_view view_of(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows) {
    const int64_t blocks = lowbit_blocks(w->k, w->block);
    const int64_t data_step = lowbit_data_step(w), scale_step = lowbit_scale_step(w);
    const tile_view t = {
        .data = w->data + tile * blocks * data_step,
        .low = w->low ? w->low + tile * blocks * lowbit_step(w) : NULL,
        .zeros = w->zeros ? w->zeros + tile * blocks * LOWBIT_TILE : NULL,
        .scales = w->scales + tile * blocks * scale_step,
        .values = rows->values,
        .row_scales = rows->scales,
        .row_sums = rows->sums,
        .m = rows->m,
        .blocks = blocks,
        .data_step = data_step,
        .scale_step = scale_step,
        .block = w->block,
        .float16 = w->float16,
    };
    return t;
}

/* The zero point where none are stored, in the units of values.h. */
INLINE int32_t middle_of(int format) {
    if (format == E2M1) return LOWBIT_E2M1_ZERO;
    if (format == BITS3) return 4;
    if (format == VECTORS) return LOWBIT_VECTOR_ZERO;
    return format == BITS2 ? 2 : format == BITS4 ? 8 : format == BITS8 ? 128 : 2 * 128 - 15;
}

#endif
