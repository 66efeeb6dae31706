/* The operator LinearLowBit: rows times a matrix, with what stands before and after it; knows nothing of formats.
 *
 * inputs: X (..., K) float | data, low, scales, zeros: the matrix (lowbit.h) | bias (N) | norm (K): X is normalised by
 * its root mean square and this weight | residual, shaped as the output, is added last | planes: of an 8-bit matrix 1
 * reads the high plane alone, 2 both | layer_mask (parts of the model) bool: where the node's part is false, the output is
 * the residual, or zeros.
 * attributes: N, K, bits, block_size, vectors, paired, inline_scales (there is no input scales then), swiglu, norm_epsilon,
 * part; heads, above 1: the matrix is one of (N / heads, K) for each head, and X is (..., heads K). Output: (..., N),
 * with swiglu (..., N / 2).
 */
#include <stdlib.h>
#include <string.h>

#include "matrix.h"
#include "ort_support.h"
#include "scratch.h"

enum { X, BIAS = 5, NORM, RESIDUAL, PLANES, LAYER_MASK };
/* Values that a thread quantizes in about the time that it takes to read a job's share of a matrix. */
enum { VALUE_BYTES = 8 };
/* Rows that cost as much arithmetic as reading the matrix costs time. */
enum { FREE_ROWS = 8 };

typedef struct {
    ort_kernel base;
    lowbit_matrix matrix; /* without its bytes */
    int64_t heads;
    int32_t swiglu;
    float epsilon;
} linear;

/* One product, as its jobs see it. */
typedef struct {
    const lowbit_isa *isa;
    lowbit_matrix matrix;
    lowbit_input input;
    lowbit_rows rows;
    lowbit_output output;
    int64_t tiles, quantize_jobs, multiply_jobs;
    behind_spans behind;
    /* Of heads: how many, bytes of the rows of each, and room for a tile's products of each job. */
    int64_t heads;
    size_t rows_bytes;
    char *memory;
    float *tile;
} product;

static OrtStatus *open_linear(linear *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    ORT_TRY(ort_open_matrix(base, info, &op->matrix));
    ORT_TRY(ort_flag(base, info, "swiglu", &op->swiglu));
    if (op->swiglu && !op->matrix.paired) return ort_fail(base, "swiglu needs a paired matrix");
    ORT_TRY(ort_heads(base, info, op->matrix.n, &op->heads));
    if (op->heads > 1 && (op->matrix.paired || base->inputs[BIAS].given || base->inputs[NORM].given ||
                          base->inputs[RESIDUAL].given))
        return ort_fail(base, "a product of heads is of no pair and has no bias, norm or residual");
    if (base->inputs[PLANES].given && op->matrix.bits != 8) return ort_fail(base, "planes needs a matrix of 8 bits");
    if (base->inputs[NORM].given) {
        OrtStatus *status = base->api->KernelInfoGetAttribute_float(info, "norm_epsilon", &op->epsilon);
        if (status) return base->api->ReleaseStatus(status), ort_fail(base, "norm needs the attribute norm_epsilon");
    }
    ORT_TRY(ort_expect(base, BIAS, op->matrix.n));
    ORT_TRY(ort_expect(base, NORM, op->matrix.k));
    return ort_expect(base, PLANES, 1);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    linear *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "LinearLowBit: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_linear(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

static void quantize_job(void *data, size_t index) {
    const product *p = data;
    int64_t job = (int64_t)index, m = p->rows.m;
    p->isa->quantize(&p->input, &p->rows, m * job / p->quantize_jobs, m * (job + 1) / p->quantize_jobs);
}

static void multiply_job(void *data, size_t index) {
    const product *p = data;
    int64_t job = (int64_t)index;
    int64_t first = p->tiles * job / p->multiply_jobs, last = p->tiles * (job + 1) / p->multiply_jobs;
    p->isa->multiply(&p->matrix, &p->rows, &p->output, first, last);
    ort_drop_tiles(&p->behind, &p->matrix, first, last, last < p->tiles);
}

static lowbit_rows rows_of(const product *p, int64_t head) {
    return scratch_rows(p->memory + (size_t)head * p->rows_bytes, p->rows.m, p->rows.k, p->rows.block);
}

static void quantize_heads_job(void *data, size_t index) {
    const product *p = data;
    const int64_t job = (int64_t)index, m = p->rows.m;
    for (int64_t head = 0; head < p->heads; head++) {
        const lowbit_rows rows = rows_of(p, head);
        for (int64_t row = m * job / p->quantize_jobs; row < m * (job + 1) / p->quantize_jobs; row++) {
            lowbit_input in = p->input;
            in.x += (row * (p->heads - 1) + head) * p->rows.k; /* the kernel counts in rows of k */
            p->isa->quantize(&in, &rows, row, row + 1);
        }
    }
}

/* The columns of a tile that are of a head. */
static void multiply_head(const product *p, int64_t tile, int64_t head, float *made) {
    const lowbit_matrix *w = &p->matrix;
    const int64_t n = w->n / p->heads, start = tile * LOWBIT_TILE;
    const lowbit_rows rows = rows_of(p, head);
    const int64_t from = head * n > start ? head * n : start;
    const lowbit_matrix one = matrix_tile(w, tile);
    const int64_t to = (head + 1) * n < start + one.n ? (head + 1) * n : start + one.n;
    if (to - from == one.n) {
        p->isa->multiply(w, &rows, &p->output, tile, tile + 1);
        return;
    }
    const lowbit_output out = {.y = made};
    p->isa->multiply(&one, &rows, &out, 0, 1);
    for (int64_t row = 0; row < rows.m; row++)
        memcpy(p->output.y + row * w->n + from, made + row * one.n + from - start, (size_t)(to - from) * sizeof(float));
}

static void multiply_heads_job(void *data, size_t index) {
    const product *p = data;
    const int64_t job = (int64_t)index, n = p->matrix.n / p->heads;
    float *made = p->tile + job * p->rows.m * LOWBIT_TILE;
    for (int64_t tile = p->tiles * job / p->multiply_jobs; tile < p->tiles * (job + 1) / p->multiply_jobs; tile++)
        for (int64_t head = tile * LOWBIT_TILE / n; head < p->heads && head * n < (tile + 1) * LOWBIT_TILE; head++)
            multiply_head(p, tile, head, made);
}

/* A product whose heads have rows and columns of their own. */
static OrtStatus *run_heads(const linear *op, const OrtKernelContext *context, product *p, int64_t m) {
    const lowbit_matrix *w = &p->matrix;
    p->heads = op->heads, p->tiles = lowbit_tiles(w), p->rows_bytes = scratch_rows_bytes(m, w->k, w->block);
    p->quantize_jobs = ort_jobs(m, m * w->k * p->heads * VALUE_BYTES);
    p->multiply_jobs = ort_jobs(p->tiles, p->tiles * matrix_tile_bytes(w) * (1 + m / FREE_ROWS));
    const size_t rows = p->rows_bytes * (size_t)p->heads, tile = (size_t)(m * LOWBIT_TILE) * sizeof(float);
    p->memory = scratch_take(rows + tile * (size_t)p->multiply_jobs);
    if (!p->memory) return ort_fail(&op->base, "out of memory for %lld rows", (long long)m);
    p->rows = (lowbit_rows){.m = m, .k = w->k, .block = w->block};
    p->tile = (float *)(void *)(p->memory + rows);
    OrtStatus *status = ort_parallel(&op->base, context, quantize_heads_job, p->quantize_jobs, p);
    if (!status) status = ort_parallel(&op->base, context, multiply_heads_job, p->multiply_jobs, p);
    scratch_give(p->memory);
    return status;
}

static OrtStatus *run(const linear *op, const OrtKernelContext *context, product *p, int64_t m) {
    if (op->heads > 1) return run_heads(op, context, p, m);
    const lowbit_matrix *w = &p->matrix;
    void *memory = scratch_take(scratch_rows_bytes(m, w->k, w->block));
    if (!memory) return ort_fail(&op->base, "out of memory for %lld rows", (long long)m);
    p->rows = scratch_rows(memory, m, w->k, w->block);
    p->tiles = lowbit_tiles(w);
    p->quantize_jobs = ort_jobs(m, m * w->k * VALUE_BYTES);
    p->multiply_jobs = ort_jobs(p->tiles, p->tiles * matrix_tile_bytes(w) * (1 + m / FREE_ROWS));
    OrtStatus *status = ort_parallel(&op->base, context, quantize_job, p->quantize_jobs, p);
    if (!status) status = ort_parallel(&op->base, context, multiply_job, p->multiply_jobs, p);
    scratch_give(memory);
    return status;
}

static OrtStatus *read_planes(const linear *op, const OrtKernelContext *context, lowbit_matrix *matrix) {
    const void *planes;
    ORT_TRY(ort_read(&op->base, context, PLANES, 1, &planes));
    int32_t count = planes ? *(const int32_t *)planes : 2;
    if (count != 1 && count != 2) return ort_fail(&op->base, "planes must be 1 or 2, not %d", (int)count);
    if (count == 1) matrix->low = NULL;
    return NULL;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const linear *op = kernel;
    const ort_kernel *base = &op->base;
    product p = {.isa = base->isa, .matrix = op->matrix, .input.epsilon = op->epsilon, .output.swiglu = op->swiglu};
    p.behind = behind_of_thread();
    const void *x, *norm, *bias, *residual;
    ort_shape shape;
    ORT_TRY(ort_read_shaped(base, context, X, &shape, &x));
    const int64_t read = p.matrix.k * op->heads;
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != read)
        return ort_fail(base, "the last dimension of X must be K = %lld", (long long)read);
    int64_t m = shape.elements / read, width = op->swiglu ? p.matrix.n / 2 : p.matrix.n;
    int left_out;
    shape.sizes[shape.rank - 1] = width;
    ORT_TRY(ort_read(base, context, RESIDUAL, m * width, &residual));
    ORT_TRY(ort_left_out(base, context, LAYER_MASK, &left_out));
    if (left_out) return ort_pass_on(base, context, &shape, residual);
    ORT_TRY(ort_read_matrix(base, context, &p.matrix));
    ORT_TRY(read_planes(op, context, &p.matrix));
    ORT_TRY(ort_read(base, context, NORM, p.matrix.k, &norm));
    ORT_TRY(ort_read(base, context, BIAS, p.matrix.n, &bias));
    ORT_TRY(ort_write(base, context, &shape, &p.output.y));
    p.input.x = x, p.input.weight = norm, p.output.bias = bias, p.output.residual = residual;
    return m ? run(op, context, &p, m) : NULL;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_linear = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "LinearLowBit",
    .input_count = 10,
    .inputs =
        {
            {"X", ORT_FLOAT, ORT_REQUIRED},
            {"data", ORT_UINT8, ORT_REQUIRED},
            {"low", ORT_UINT8, ORT_OPTIONAL},
            {"scales", ORT_UINT16, ORT_OPTIONAL},
            {"zeros", ORT_UINT8, ORT_OPTIONAL},
            {"bias", ORT_FLOAT, ORT_OPTIONAL},
            {"norm", ORT_FLOAT, ORT_OPTIONAL},
            {"residual", ORT_FLOAT, ORT_OPTIONAL},
            {"planes", ORT_INT32, ORT_OPTIONAL},
            {"layer_mask", ORT_BOOL, ORT_OPTIONAL},
        },
};
