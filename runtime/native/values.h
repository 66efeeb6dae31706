/* Single values of a matrix by the formulas of lowbit.h, slowly; knows nothing of products. */
#ifndef EDGEINFER_VALUES_H
#define EDGEINFER_VALUES_H

#include "arithmetic.inc.h"
#include "lowbit.h"

/* Twice the values of E2M1 by their codes, plus LOWBIT_E2M1_ZERO. */
enum { LOWBIT_E2M1_ZERO = 12 };
static const uint8_t lowbit_e2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* The codebook of vectors: magnitudes by the low half of a code, a row for each of the four values. They were found on
 * Gaussian numbers in blocks of 64 with a scale of their own (docs/LOG.md, 2026-11-26, "codebooks"). */
enum { LOWBIT_VECTOR_ZERO = 8 };
static const uint8_t lowbit_vectors[4][16] = {
    {1, 1, 4, 1, 2, 2, 2, 2, 2, 7, 2, 2, 5, 5, 5, 2},
    {1, 1, 1, 3, 1, 3, 2, 2, 7, 2, 2, 5, 2, 2, 5, 6},
    {1, 4, 1, 1, 2, 2, 2, 7, 2, 2, 5, 5, 2, 5, 2, 3},
    {1, 1, 1, 3, 3, 1, 7, 2, 2, 2, 5, 2, 5, 2, 2, 6}
};

static inline int lowbit_high_only(const lowbit_matrix *w) { return w->bits == 8 && !w->low; }

static inline float lowbit_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Scale and zero point of column `at` = (tile * blocks + b) * 32 + c, in the units `lowbit_values` is summed in:
 * doubled values, less 15 for the middle of the low plane, where only the high plane is read. */
static inline float lowbit_scale(const lowbit_matrix *w, int64_t at) {
    const uint16_t bits = w->scales[at / LOWBIT_TILE * lowbit_scale_step(w) + at % LOWBIT_TILE];
    return (w->float16 ? float_of(bits) : lowbit_bfloat16(bits)) * (lowbit_high_only(w) ? 0.5f : 1.0f);
}

static inline int32_t lowbit_zero(const lowbit_matrix *w, int64_t at) {
    int32_t middle = w->e2m1 ? LOWBIT_E2M1_ZERO : w->vectors ? LOWBIT_VECTOR_ZERO : 1 << (w->bits - 1), zero = w->zeros ? w->zeros[at] : middle;
    return lowbit_high_only(w) ? 2 * zero - 15 : zero;
}

/* Value s of a code of vectors. */
static inline int lowbit_vector(uint8_t code, int s) {
    const int magnitude = lowbit_vectors[s][code & 15];
    return LOWBIT_VECTOR_ZERO + (code >> (4 + s) & 1 ? -magnitude : magnitude);
}

/* The values of column c of a block of 3 bits, by ascending k. */
static inline void lowbit_values3(const uint8_t *data, int block, int c, uint8_t *out) {
    for (int j = 0; j < block; j++) {
        int i = j % LOWBIT_CHUNK, h = i / 16, s = i % 16 / 4;
        const uint8_t *bytes = data + j / LOWBIT_CHUNK * LOWBIT_CHUNK_BYTES + c * 4 + i % 4;
        int high = bytes[LOWBIT_CHUNK_HIGH] >> (s / 2 * 4 + 2 * h + s % 2) & 1;
        out[j] = (uint8_t)((bytes[h * LOWBIT_TILE * 4] >> 2 * s & 3) | high << 2);
    }
}

/* The values of column c of a tile's block, by ascending k; of 8-bit matrices without the low plane 16 * high. */
static inline void lowbit_values(const lowbit_matrix *w, int64_t tile, int64_t b, int c, uint8_t *out) {
    int bits = w->bits == 2 ? 2 : 4, span = w->block * bits / 8;
    int64_t blocks = lowbit_blocks(w->k, w->block);
    const int64_t number = tile * blocks + b;
    const uint8_t *data = w->data + number * lowbit_data_step(w);
    if (w->bits == 3) {
        lowbit_values3(data, w->block, c, out);
        return;
    }
    for (int j = 0; j < w->block; j++) {
        int r = j % span, shift = j / span * bits;
        int64_t byte = r / 4 * LOWBIT_TILE * 4 + c * 4 + r % 4;
        int value = data[byte] >> shift & ((1 << bits) - 1);
        if (w->vectors) value = lowbit_vector(data[byte], j / span);
        if (w->e2m1) value = lowbit_e2m1[value];
        if (w->bits == 8) value = value * 16 + (w->low ? w->low[number * lowbit_step(w) + byte] >> shift & 15 : 0);
        out[j] = (uint8_t)value;
    }
}

#endif
