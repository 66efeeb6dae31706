/* Activation functions of rows: the contract between the kernels of every instruction set and their callers.
 *
 * Knows nothing of ONNX Runtime, threads or files. A value's result depends on that value and its row's
 * cutoff alone, the same in every path to the last bit.
 */
#ifndef EDGEINFER_ACTIVATION_H
#define EDGEINFER_ACTIVATION_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* silu: x / (1 + exp(-x)); gelu by the error function, or by tanh; relu2: the square of what is positive; xielu of first
 * and second (Apertus); swiglu: gpt-oss's, of both factors; logistic: 1 / (1 + exp(-x)); softcap: first * tanh(x / first) */
enum {
    ACTIVATION_SILU,
    ACTIVATION_GELU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_RELU2,
    ACTIVATION_XIELU,
    ACTIVATION_SWIGLU,
    ACTIVATION_LOGISTIC,
    ACTIVATION_SOFTCAP,
    ACTIVATION_KINDS
};
/* Columns that are computed together, and counted in by callers. */
enum { ACTIVATION_PIECE = 1024 };

typedef struct {
    int32_t kind;
    float first, second;
    int64_t rows, width;  /* of what goes through the function */
    const float *x;       /* (rows, width), rows `stride` floats apart */
    int64_t stride;
    const float *times;   /* (rows, width repeat) or NULL: each result multiplies `repeat` of these */
    int64_t repeat, times_stride;
    const float *cutoffs; /* (rows) or NULL: what a row has above its own goes through, and 0 for the rest */
    float *y;             /* (rows, width repeat), without gaps */
} activation;

static inline int64_t activation_pieces(const activation *a) {
    return a->rows * ((a->width + ACTIVATION_PIECE - 1) / ACTIVATION_PIECE);
}

#ifdef __cplusplus
}
#endif
#endif
