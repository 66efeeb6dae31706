/* The operator LinearFloat: rows times a float matrix, with what stands before and after it; knows nothing of how.
 *
 * inputs: X (..., K) float | weight, as many floats as N K | bias (N) | norm (K): X is normalised by its root mean square
 * and this weight | residual, shaped as the output, is added last | layer_mask, as LinearLowBit has it.
 * Instead of the weight halves may be given: the bytes of numbers of 16 bits, by outputs, in whole tiles of 32 rows.
 * attributes: N, K, by_output: the weight is (N, K), otherwise (K, N); kind of halves: GGUF's type, F16 or BF16;
 * norm_epsilon, part; factor and heads, as LinearLowBit has them.
 * Output: (..., N).
 */
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "gguf.h"
#include "ort_support.h"
#include "scratch.h"

enum { X, WEIGHT, BIAS, NORM, RESIDUAL, LAYER_MASK, HALVES };
/* Rows that cost as much arithmetic as reading the matrix costs time. */
enum { FREE_ROWS = 4 };

typedef struct {
    ort_kernel base;
    float_matrix matrix; /* without its values */
    float epsilon, factor;
} linear;

/* One product, as its jobs see it. */
typedef struct {
    const attention_path *path;
    float_matrix matrix;
    lowbit_input input;
    float_rows rows;
    float *made; /* rows that were normed, or put together by heads */
    int64_t tiles, made_jobs, jobs;
} product;

static OrtStatus *open_linear(linear *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    float_matrix *w = &op->matrix;
    ORT_TRY(ort_int(base, info, "N", &w->n));
    ORT_TRY(ort_int(base, info, "K", &w->k));
    ORT_TRY(ort_flag(base, info, "by_output", &w->by_output));
    if (w->n < 1 || w->n > MATRIX_MOST || w->k < 1 || w->k > MATRIX_MOST)
        return ort_fail(base, "N and K must be between 1 and 2^28");
    ORT_TRY(ort_heads(base, info, w->n, &w->heads));
    if (base->inputs[NORM].given) {
        OrtStatus *status = base->api->KernelInfoGetAttribute_float(info, "norm_epsilon", &op->epsilon);
        if (status) return base->api->ReleaseStatus(status), ort_fail(base, "norm needs the attribute norm_epsilon");
    }
    const int64_t kind = ort_int_or_zero(base, info, "kind");
    w->form = kind == GGUF_F16 ? FLOATS_FLOAT16 : kind == GGUF_BF16 ? FLOATS_BFLOAT16 : FLOATS_FLOAT32;
    if ((w->form != FLOATS_FLOAT32) != base->inputs[HALVES].given || base->inputs[HALVES].given == base->inputs[WEIGHT].given)
        return ort_fail(base, "a matrix is either the input weight, or halves of the attribute kind");
    if (w->form) w->by_output = 1;
    op->factor = ort_float_or_zero(base, info, "factor");
    ORT_TRY(ort_expect(base, WEIGHT, w->n * w->k));
    ORT_TRY(ort_expect(base, HALVES, gguf_float_bytes(w->n, w->k)));
    ORT_TRY(ort_expect(base, BIAS, w->n));
    if (w->heads > 1 && (base->inputs[BIAS].given || base->inputs[NORM].given))
        return ort_fail(base, "a product of heads has no bias and no norm");
    return ort_expect(base, NORM, w->k);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    linear *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "LinearFloat: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_linear(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

static void norm_job(void *data, size_t index) {
    const product *p = data;
    int64_t job = (int64_t)index, m = p->rows.m;
    p->path->normalise_floats(&p->input, p->matrix.k, p->made, m * job / p->made_jobs,
                              m * (job + 1) / p->made_jobs);
}

/* (m, heads, k) to (heads, m, k). */
static void gather_job(void *data, size_t index) {
    const product *p = data;
    const int64_t job = (int64_t)index, m = p->rows.m, heads = p->matrix.heads, k = p->matrix.k;
    for (int64_t row = m * job / p->made_jobs; row < m * (job + 1) / p->made_jobs; row++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(p->made + (head * m + row) * k, p->input.x + (row * heads + head) * k, (size_t)k * sizeof(float));
}

static void multiply_job(void *data, size_t index) {
    const product *p = data;
    int64_t job = (int64_t)index;
    p->path->multiply_floats(&p->matrix, &p->rows, p->tiles * job / p->jobs, p->tiles * (job + 1) / p->jobs);
}

static OrtStatus *run(const linear *op, const OrtKernelContext *context, product *p) {
    const float_matrix *w = &p->matrix;
    int64_t m = p->rows.m, width = w->k * w->heads;
    p->tiles = floats_tiles(w);
    p->made_jobs = ort_jobs(m, m * width * (int64_t)sizeof(float));
    p->jobs = ort_jobs(p->tiles, w->n * w->k * (int64_t)(w->form ? sizeof(uint16_t) : sizeof(float)) * (1 + m / FREE_ROWS));
    const int apart = w->heads > 1 && m > 1;
    if (!p->input.weight && !apart) return ort_parallel(&op->base, context, multiply_job, p->jobs, p);
    p->rows.x = p->made = scratch_take((size_t)(m * width) * sizeof(float));
    if (!p->made) return ort_fail(&op->base, "out of memory for %lld rows", (long long)m);
    OrtStatus *status = ort_parallel(&op->base, context, apart ? gather_job : norm_job, p->made_jobs, p);
    if (!status) status = ort_parallel(&op->base, context, multiply_job, p->jobs, p);
    scratch_give(p->made);
    return status;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const linear *op = kernel;
    const ort_kernel *base = &op->base;
    product p = {.path = attention_path_of(base->isa), .matrix = op->matrix, .input.epsilon = op->epsilon};
    const float_matrix *w = &op->matrix;
    const void *x, *weight, *halves, *bias, *norm, *residual;
    ort_shape shape;
    ORT_TRY(ort_read_shaped(base, context, X, &shape, &x));
    const int64_t read = w->k * w->heads;
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != read)
        return ort_fail(base, "the last dimension of X must be K = %lld", (long long)read);
    p.rows.m = shape.elements / read;
    int left_out;
    shape.sizes[shape.rank - 1] = w->n;
    ORT_TRY(ort_read(base, context, RESIDUAL, p.rows.m * w->n, &residual));
    ORT_TRY(ort_left_out(base, context, LAYER_MASK, &left_out));
    if (left_out) return ort_pass_on(base, context, &shape, residual);
    ORT_TRY(ort_read(base, context, WEIGHT, w->n * w->k, &weight));
    ORT_TRY(ort_read(base, context, HALVES, gguf_float_bytes(w->n, w->k), &halves));
    ORT_TRY(ort_read(base, context, BIAS, w->n, &bias));
    ORT_TRY(ort_read(base, context, NORM, w->k, &norm));
    ORT_TRY(ort_write(base, context, &shape, &p.rows.y));
    p.matrix.data = weight ? weight : halves, p.rows.factor = op->factor, p.input.x = x, p.input.weight = norm;
    p.rows.x = x, p.rows.bias = bias, p.rows.residual = residual;
    return p.rows.m ? run(op, context, &p) : NULL;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_floats = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "LinearFloat",
    .input_count = 7,
    .inputs =
        {
            {"X", ORT_FLOAT, ORT_REQUIRED},
            {"weight", ORT_FLOAT, ORT_OPTIONAL},
            {"bias", ORT_FLOAT, ORT_OPTIONAL},
            {"norm", ORT_FLOAT, ORT_OPTIONAL},
            {"residual", ORT_FLOAT, ORT_OPTIONAL},
            {"layer_mask", ORT_BOOL, ORT_OPTIONAL},
            {"halves", ORT_UINT8, ORT_OPTIONAL},
        },
};
