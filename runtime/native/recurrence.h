/* Recurrences over a matrix for each head: the contract between the kernels of every instruction set and their callers.
 *
 * Knows nothing of ONNX Runtime, threads or files; a caller checks before it calls. A head's state S, (key size, value
 * size), takes a row in by
 *     S = decay S + k u,  o = q S,  u = beta (v - decay (k S)) by the delta rule, or v as it is (Mamba-2)
 * so that of a row that was computed once, k, u and decay suffice to take it in again, and nothing of it need be undone.
 *
 * What is stored of a layer and a sequence: the state after its first `position` slots, and a ring of what the latest
 * slots, of any branch, are taken in by: what the convolution reads, k, u, decay. A pass takes the stored state on to
 * `committed`, and computes each row from there along the row's path.
 *
 * Arithmetic, the same in every path to the last bit: k S and q S are 4 chains of fmaf over the channels i, i % 4 in
 * each, summed (0 + 1) + (2 + 3), of the state before the row; u = beta (v - decay (k S)), o = fmaf(q k, u, decay (q S)),
 * S = fmaf(k, u, decay S). So a row's result depends on its path alone.
 */
#ifndef EDGEINFER_RECURRENCE_H
#define EDGEINFER_RECURRENCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Channels of values that are computed together; those of a head are padded to a multiple of it. */
enum { RECURRENCE_TILE = 16 };
/* Tokens that a convolution reaches over at most. */
enum { RECURRENCE_WIDTH = 16 };

/* The rows of one sequence in one pass of a layer. */
typedef struct {
    int32_t heads, key_heads, key_size, value_size; /* heads is a multiple of key_heads */
    int32_t delta;                                  /* by the delta rule */
    int64_t channels, width;                        /* of the convolution */

    int64_t position, committed;
    float *state;                   /* (heads, tiles, key_size, 16); of position 0 it is zeros, whatever lies there */
    float *ring;                    /* (ring_rows, ring_stride): slot s in row s % ring_rows */
    int64_t ring_rows, ring_stride; /* a row: channels, (key_heads, key_size) k, (heads, padded) u, (heads) decay */

    int64_t first, count;  /* slots first..first+count-1 are the rows of the pass */
    const int32_t *rows;   /* (count, 4): as attention has them */
    const int32_t *extras;
    int64_t *parents;      /* (count): slot before each row's own on its path, -1 before the first */

    const float *x;             /* (count, ...), rows `x_stride` apart: what the convolution reads */
    int64_t x_stride;
    const float *weights, *bias; /* (channels, width), the row's own token last; (channels) or NULL */
    float *mixed;               /* (count, channels): after convolution and silu */
    float *q, *k;               /* (count, key_heads, key_size) */
    float *qk;                  /* (count, key_heads): their products */
    float *u;                   /* (count, heads, padded): v, and u after it was computed */
    float *decay, *beta;        /* (count, heads) */
    float *out;                 /* (count, heads, padded) */
} recurrence;

static inline int64_t recurrence_padded(const recurrence *r) {
    return ((int64_t)r->value_size + RECURRENCE_TILE - 1) / RECURRENCE_TILE * RECURRENCE_TILE;
}
static inline int64_t recurrence_tiles(const recurrence *r) {
    return r->heads * (recurrence_padded(r) / RECURRENCE_TILE);
}

/* The slot at a place of a row's path. */
static inline int64_t recurrence_slot(const recurrence *r, const int32_t *row, int64_t place) {
    return place < row[1] ? place : r->extras[row[2] + place - row[1]];
}
static inline float *recurrence_ring(const recurrence *r, int64_t slot) {
    return r->ring + slot % r->ring_rows * r->ring_stride;
}

/* What is done with what heads give, and d times what they read, the first channels of the convolution (Mamba-2): silu
 * of z as a factor, and a norm of the channels of each key head, or none. */
typedef struct {
    const float *z; /* (count, heads, value_size), rows `stride` apart */
    int64_t stride;
    const float *d, *norm; /* (heads); (heads, value_size) or NULL */
    float epsilon;
    int32_t norm_first; /* the norm comes before the factor */
    float *y; /* (count, heads, value_size) */
} recurrence_gate;

/* The functions of an instruction set; the .inc.h says what each does. */
typedef struct {
    void (*convolve)(const recurrence *r, int64_t first, int64_t last);
    void (*recur)(const recurrence *r, int64_t first, int64_t last, float *state);
    void (*gate_heads)(const recurrence *r, const float *weight, float epsilon, const float *gate, int64_t stride,
                       float *y, int64_t first, int64_t last);
    void (*gate_groups)(const recurrence *r, const recurrence_gate *g, int64_t first, int64_t last);
} recurrence_path;

#ifdef __cplusplus
}
#endif
#endif
