/* Sizes of a matrix's parts and whether they make sense; knows nothing of where the bytes come from. */
#ifndef EDGEINFER_MATRIX_H
#define EDGEINFER_MATRIX_H

#include "lowbit.h"

/* Beyond any model, and small enough that no product of two sizes overflows. */
#define MATRIX_MOST ((int64_t)1 << 28)

static inline const char *matrix_kind_fault(const lowbit_matrix *w) {
    if (w->kind < 0 || w->kind >= KINDS) return "no such kind";
    if (w->block != SPAN_BLOCK || w->bits != kinds[w->kind].bits) return "a kind has blocks of 32 and its own bits";
    if (w->k % kinds[w->kind].whole) return "K is no multiple of the kind's groups";
    if (w->e2m1 || w->vectors || w->inline_scales || w->float16) return "a kind has scales and codes of its own";
    if (w->paired && w->n % 2) return "a paired matrix needs an even N";
    return NULL;
}

/* What is wrong with the sizes of a matrix, for people; NULL if nothing. */
static inline const char *matrix_fault(const lowbit_matrix *w) {
    if (w->n < 1 || w->n > MATRIX_MOST || w->k < 1 || w->k > MATRIX_MOST) return "N and K must be between 1 and 2^28";
    if (w->kind) return matrix_kind_fault(w);
    if ((w->bits < 2 || w->bits > 4) && w->bits != 8) return "bits must be 2, 3, 4 or 8";
    if (w->block != 32 && w->block != 64 && w->block != 128) return "block_size must be 32, 64 or 128";
    if (w->e2m1 && (w->bits != 4 || w->block != 32)) return "E2M1 needs 4 bits and blocks of 32";
    if (w->e2m1 && w->inline_scales) return "E2M1 has no inline scales";
    if (w->vectors && (w->bits != 2 || w->k % w->block)) return "vectors need 2 bits and a K of whole blocks";
    if (w->float16 && !(w->bits == 8 && w->block == 32) && !(w->bits == 2 && !w->vectors && w->block > 32))
        return "scales of float16 need 8 bits in blocks of 32, or 2 bits in larger ones";
    if (w->float16 && w->inline_scales) return "inline scales are bfloat16";
    if (w->paired && w->n % 2) return "a paired matrix needs an even N";
    return NULL;
}

/* Scales, and zero points where there are any: one of each block of each column, padding included. */
static inline int64_t matrix_scales(const lowbit_matrix *w) {
    return lowbit_tiles(w) * lowbit_blocks(w->k, w->block) * LOWBIT_TILE;
}

/* Bytes of the values, with inline scales and heads where there are any; of 8-bit matrices those of the high plane. */
static inline int64_t matrix_data(const lowbit_matrix *w) { return lowbit_tiles(w) * lowbit_tile_bytes(w); }

/* Bytes of the values; of 8-bit matrices those of one plane. */
static inline int64_t matrix_plane(const lowbit_matrix *w) {
    return lowbit_tiles(w) * lowbit_blocks(w->k, w->block) * lowbit_step(w);
}

/* One tile of a matrix that is not paired, as a matrix of its own. */
static inline lowbit_matrix matrix_tile(const lowbit_matrix *w, int64_t tile) {
    const int64_t blocks = lowbit_blocks(w->k, w->block), left = w->n - tile * LOWBIT_TILE;
    lowbit_matrix one = *w;
    one.n = left < LOWBIT_TILE ? left : LOWBIT_TILE;
    one.data += tile * lowbit_tile_bytes(w);
    if (one.low) one.low += tile * blocks * lowbit_step(w);
    if (!w->kind) one.scales += tile * blocks * lowbit_scale_step(w);
    if (one.zeros) one.zeros += tile * blocks * LOWBIT_TILE;
    return one;
}

/* Bytes that a product reads of one tile: values and scales. */
static inline int64_t matrix_tile_bytes(const lowbit_matrix *w) {
    int64_t blocks = lowbit_blocks(w->k, w->block);
    if (w->kind) return lowbit_tile_bytes(w);
    return blocks * (lowbit_step(w) * (w->low ? 2 : 1) + LOWBIT_TILE * (w->zeros ? 3 : 2));
}

#endif
