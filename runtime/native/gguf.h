/* GGUF's types: which matrix of ours holds the numbers of each, and where its parts lie in one run of bytes.
 *
 * A matrix of a kind is one run. One with scales of float16 is its values, the low plane of 8 bits, then its scales.
 * Types whose number counts from q - 1 are stored as 3 - q with the scale's sign turned, so that each q has a code.
 */
#ifndef EDGEINFER_GGUF_H
#define EDGEINFER_GGUF_H

#include "matrix.h"

/* By their numbers in files. The first two are floats, rows one after the other in whole tiles of rows (floats.h). */
enum {
    GGUF_F16 = 1,
    GGUF_BF16 = 30,
    GGUF_Q4_0 = 2,
    GGUF_Q4_1 = 3,
    GGUF_Q5_0 = 6,
    GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8,
    GGUF_Q2_K = 10,
    GGUF_Q3_K = 11,
    GGUF_Q4_K = 12,
    GGUF_Q5_K = 13,
    GGUF_Q6_K = 14,
    GGUF_IQ4_NL = 20,
    GGUF_IQ4_XS = 23,
    GGUF_TQ1_0 = 34,
    GGUF_TQ2_0 = 35,
    GGUF_MXFP4 = 39,
    GGUF_NVFP4 = 40,
    GGUF_Q1_0 = 41,
    GGUF_Q2_0 = 42
};

typedef struct {
    int32_t number;
    int32_t values, bytes; /* of a block of a file */
    int32_t kind;          /* of spans.h; 0 of those with scales of float16 */
    int32_t bits, block;
} gguf_type;

/* NULL where no matrix of ours holds the type. */
const gguf_type *gguf_find(int64_t number);

/* Sizes of a matrix (n, k) of a type; matrix_fault tells whether they make sense. */
static inline lowbit_matrix gguf_matrix(const gguf_type *type, int64_t n, int64_t k, int32_t paired) {
    const lowbit_matrix w = {.n = n, .k = k, .bits = type->bits, .block = type->block, .paired = paired, .float16 = !type->kind,
                             .kind = type->kind};
    return w;
}

/* Bytes of all parts. */
static inline int64_t gguf_bytes(const lowbit_matrix *w) {
    if (w->kind) return matrix_data(w);
    return matrix_data(w) * (w->bits == 8 ? 2 : 1) + matrix_scales(w) * (int64_t)sizeof(uint16_t);
}

/* Bytes of a matrix of floats of 16 bits. */
static inline int64_t gguf_float_bytes(int64_t n, int64_t k) {
    return (n + LOWBIT_TILE - 1) / LOWBIT_TILE * LOWBIT_TILE * k * (int64_t)sizeof(uint16_t);
}

/* The same matrix with its bytes, which are on an even address. */
static inline lowbit_matrix gguf_place(lowbit_matrix w, const uint8_t *bytes) {
    w.data = bytes;
    if (w.kind) return w;
    if (w.bits == 8) w.low = bytes + matrix_data(&w);
    w.scales = (const uint16_t *)(const void *)(bytes + gguf_bytes(&w) - matrix_scales(&w) * (int64_t)sizeof(uint16_t));
    return w;
}

#endif
