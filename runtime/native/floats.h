/* Float matrices times float rows: the contract between the kernels of every instruction set and their callers.
 *
 * Knows nothing of ONNX Runtime, threads or files. For matrices that were too small, or matter too much, to be quantized:
 * a bundle whose matrices are all float is left to ONNX Runtime, which blocks for the caches of large ones.
 *
 * Arithmetic, the same in every path to the last bit: of a matrix stored by inputs (K, N) a product is a chain of fmaf
 * over k ascending, from 0. Of one stored by outputs (N, K) it is 16 such chains, k % 16 in each, whose upper half is added
 * to the lower until one is left. So a row's result does not depend on other rows or the split over threads.
 */
#ifndef EDGEINFER_FLOATS_H
#define EDGEINFER_FLOATS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Columns of the product that are computed together, and counted in by callers. */
enum { FLOATS_TILE = 64 };
/* How the numbers of a matrix are stored; those of 16 bits by outputs, each as the float that it is. */
enum { FLOATS_FLOAT32, FLOATS_FLOAT16, FLOATS_BFLOAT16 };

typedef struct {
    int64_t n, k;      /* outputs, inputs */
    int32_t by_output; /* stored (N, K), otherwise (K, N) */
    int64_t heads;     /* above 1: each N / heads outputs have inputs of their own, (heads, m, k) */
    int32_t form;
    const void *data;
} float_matrix;

/* What is multiplied, and what is done with the product. */
typedef struct {
    int64_t m;
    const float *x;        /* (m, k), or of each head */
    float *y;              /* (m, n) */
    const float *bias;     /* (n) or NULL */
    const float *residual; /* (m, n) or NULL: added last; may be y itself */
    float factor;          /* multiplies the product before all else; 0 for none */
} float_rows;

static inline int64_t floats_tiles(const float_matrix *w) { return (w->n + FLOATS_TILE - 1) / FLOATS_TILE; }

#ifdef __cplusplus
}
#endif
#endif
