/* What the operators of recurrences share: their first inputs, working memory, the pass itself. */
#ifndef EDGEINFER_ORT_RECURRENCE_H
#define EDGEINFER_ORT_RECURRENCE_H

#include "attention.h"
#include "ort_support.h"

/* The first inputs of every such operator: X (..., ...) float, whose rows begin with what the convolution reads or hold
 * it further on | rows (S, 4), extras (X): as Attention has them | state_pool (bytes) uint8 | state_layout (2 + L): bytes
 * of a slot, rows of a ring, where each layer begins in a slot | state_rows (N, 2): the slot of each sequence, and how
 * many of its tokens the stored state is to hold at most after the pass | layer_mask (optional): where it is false at
 * the node's part, nothing is read or written and the output is zeros | weights (channels, 1, width) and bias
 * (channels, optional) of the convolution. In a slot a layer has 64 bytes, which begin with how many tokens its state
 * holds, then the state and the ring of recurrence.h, float32, each row of the ring rounded up to 16. */
enum {
    RECURRENCE_X,
    RECURRENCE_ROWS,
    RECURRENCE_EXTRAS,
    RECURRENCE_POOL,
    RECURRENCE_LAYOUT,
    RECURRENCE_SEQUENCES,
    RECURRENCE_MASK,
    RECURRENCE_WEIGHTS,
    RECURRENCE_BIAS,
    RECURRENCE_OWN /* the first of an operator's own */
};

#define RECURRENCE_INPUTS                                                                                           \
    {"X", ORT_FLOAT, ORT_REQUIRED}, {"rows", ORT_INT32, ORT_REQUIRED}, {"extras", ORT_INT32, ORT_REQUIRED},           \
        {"state_pool", ORT_UINT8, ORT_REQUIRED}, {"state_layout", ORT_INT64, ORT_REQUIRED},                           \
        {"state_rows", ORT_INT64, ORT_REQUIRED}, {"layer_mask", ORT_BOOL, ORT_OPTIONAL},                              \
        {"weights", ORT_FLOAT, ORT_REQUIRED}, {                                                                       \
        "bias", ORT_FLOAT, ORT_OPTIONAL                                                                               \
    }

/* What the node of such an operator begins with. */
typedef struct {
    ort_kernel base;
    recurrence sizes; /* heads, key_heads, key_size, value_size, delta, channels, width */
    int64_t layer;
} recurrence_node;

/* One pass. An operator's own functions see each sequence as `recurrence` has it. */
typedef struct {
    const recurrence_path *path;
    recurrence all;         /* the rows of all sequences */
    recurrence *sequences;  /* each one's own */
    int64_t **positions;    /* of each one's slot */
    int64_t count;          /* sequences that have rows */
    int64_t jobs;
    float *states;          /* of each job, one tile */
    void *memory;
} recurrence_pass;

/* Reads the attributes heads, key_heads, key_size, value_size, channels, width, layer and checks them. */
OrtStatus *recurrence_open(recurrence_node *op, const OrtKernelInfo *info);
/* Reads and checks the common inputs and takes working memory: x is where the convolution's channels begin in each row of
 * X. Give the pass back with recurrence_end, whatever comes. */
OrtStatus *recurrence_begin(const recurrence_node *op, OrtKernelContext *context, recurrence_pass *p, const float *x,
                            int64_t x_stride, int64_t rows);
/* Convolves all rows into all.mixed. */
OrtStatus *recurrence_convolve(const recurrence_node *op, const OrtKernelContext *context, recurrence_pass *p);
/* Computes all rows from all.q, k, u, decay and beta into all.out, and keeps what later passes take them in by. */
OrtStatus *recurrence_run(const recurrence_node *op, const OrtKernelContext *context, recurrence_pass *p);
void recurrence_end(recurrence_pass *p);

/* The sum of products in 16 lanes, folded in halves. */
float recurrence_product(const float *x, const float *y, int64_t n);
/* log(1 + exp(x)) */
float recurrence_softplus(float x);

#endif
