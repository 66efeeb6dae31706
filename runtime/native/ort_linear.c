/* The operator LinearLowBit: rows times a matrix, with what stands before and after it; knows nothing of formats.
 *
 * inputs: X (..., K) float | data, low, scales, zeros: the matrix (lowbit.h) | bias (N) | norm (K): X is normalised by
 * its root mean square and this weight | residual, shaped as the output, is added last | planes: of an 8-bit matrix 1
 * reads the high plane alone, 2 both | layer_mask (parts of the model) bool: where the node's part is false, the output is
 * the residual, or zeros.
 * attributes: N, K, bits, block_size, vectors, paired, inline_scales (there is no input scales then), or kinds and rows of
 * segments (ort_support.h); swiglu, norm_epsilon, part; factor: multiplies the product before all else; heads, above 1: the matrix is one of (N / heads, K) for each head, and X is (..., heads K). Output: (..., N),
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
    ort_matrix matrix; /* without its bytes */
    int64_t heads;
    int32_t swiglu, planes; /* whether a part has two */
    float epsilon, factor;
} linear;

/* One product, as its jobs see it. */
typedef struct {
    const lowbit_isa *isa;
    ort_matrix matrix;
    lowbit_input input;
    lowbit_rows rows[ORT_MOST_SEGMENTS]; /* one for each size of block, and which of them a segment reads */
    int32_t row_sets, set_of[ORT_MOST_SEGMENTS];
    lowbit_output output;
    int64_t m, tiles, quantize_jobs, multiply_jobs;
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
    const int32_t paired = op->matrix.of[0].paired;
    if (op->swiglu && !paired) return ort_fail(base, "swiglu needs a paired matrix");
    ORT_TRY(ort_heads(base, info, op->matrix.n, &op->heads));
    op->factor = ort_float_or_zero(base, info, "factor");
    if (op->factor && (op->swiglu || op->heads > 1)) return ort_fail(base, "factor is of a plain product");
    if (op->heads > 1 && op->matrix.count > 1) return ort_fail(base, "a product of heads has rows of one type");
    for (int32_t i = 0; i < op->matrix.count; i++) op->planes |= op->matrix.of[i].bits == 8;
    if (op->heads > 1 && (paired || base->inputs[BIAS].given || base->inputs[NORM].given ||
                          base->inputs[RESIDUAL].given))
        return ort_fail(base, "a product of heads is of no pair and has no bias, norm or residual");
    if (base->inputs[PLANES].given && !op->planes) return ort_fail(base, "planes needs a matrix of 8 bits");
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
    int64_t job = (int64_t)index, first = p->m * job / p->quantize_jobs, last = p->m * (job + 1) / p->quantize_jobs;
    for (int32_t i = 0; i < p->row_sets; i++) p->isa->quantize(&p->input, &p->rows[i], first, last);
}

static void multiply_job(void *data, size_t index) {
    const product *p = data;
    int64_t job = (int64_t)index;
    int64_t first = p->tiles * job / p->multiply_jobs, last = p->tiles * (job + 1) / p->multiply_jobs, start = 0, row = 0;
    for (int32_t i = 0; i < p->matrix.count; i++) {
        const lowbit_matrix *w = &p->matrix.of[i];
        const int64_t tiles = lowbit_tiles(w);
        const int64_t from = first > start ? first - start : 0, to = last - start < tiles ? last - start : tiles;
        lowbit_output out = p->output;
        out.y += row;
        if (out.bias) out.bias += row;
        if (out.residual) out.residual += row;
        if (from < to) {
            p->isa->multiply(w, &p->rows[p->set_of[i]], &out, from, to);
            ort_drop_tiles(&p->behind, w, from, to, to < tiles);
        }
        start += tiles, row += w->n;
    }
}

static lowbit_rows rows_of(const product *p, int64_t head) {
    return scratch_rows(p->memory + (size_t)head * p->rows_bytes, p->m, p->matrix.k, p->matrix.of[0].block);
}

static void quantize_heads_job(void *data, size_t index) {
    const product *p = data;
    const int64_t job = (int64_t)index, m = p->m;
    for (int64_t head = 0; head < p->heads; head++) {
        const lowbit_rows rows = rows_of(p, head);
        for (int64_t row = m * job / p->quantize_jobs; row < m * (job + 1) / p->quantize_jobs; row++) {
            lowbit_input in = p->input;
            in.x += (row * (p->heads - 1) + head) * p->matrix.k; /* the kernel counts in rows of k */
            p->isa->quantize(&in, &rows, row, row + 1);
        }
    }
}

/* The columns of a tile that are of a head. */
static void multiply_head(const product *p, int64_t tile, int64_t head, float *made) {
    const lowbit_matrix *w = &p->matrix.of[0];
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
    float *made = p->tile + job * p->m * LOWBIT_TILE;
    for (int64_t tile = p->tiles * job / p->multiply_jobs; tile < p->tiles * (job + 1) / p->multiply_jobs; tile++)
        for (int64_t head = tile * LOWBIT_TILE / n; head < p->heads && head * n < (tile + 1) * LOWBIT_TILE; head++)
            multiply_head(p, tile, head, made);
}

/* A product whose heads have rows and columns of their own. */
static OrtStatus *run_heads(const linear *op, const OrtKernelContext *context, product *p) {
    const lowbit_matrix *w = &p->matrix.of[0];
    const int64_t m = p->m;
    p->heads = op->heads, p->tiles = lowbit_tiles(w), p->rows_bytes = scratch_rows_bytes(m, w->k, w->block);
    p->quantize_jobs = ort_jobs(m, m * w->k * p->heads * VALUE_BYTES);
    p->multiply_jobs = ort_jobs(p->tiles, p->tiles * matrix_tile_bytes(w) * (1 + m / FREE_ROWS));
    const size_t rows = p->rows_bytes * (size_t)p->heads, tile = (size_t)(m * LOWBIT_TILE) * sizeof(float);
    p->memory = scratch_take(rows + tile * (size_t)p->multiply_jobs);
    if (!p->memory) return ort_fail(&op->base, "out of memory for %lld rows", (long long)m);
    p->tile = (float *)(void *)(p->memory + rows);
    OrtStatus *status = ort_parallel(&op->base, context, quantize_heads_job, p->quantize_jobs, p);
    if (!status) status = ort_parallel(&op->base, context, multiply_heads_job, p->multiply_jobs, p);
    scratch_give(p->memory);
    return status;
}

/* Lays out rows for each size of block from `memory` on; returns their size. Without memory only the size is meant. */
static size_t place_rows(product *p, char *memory) {
    size_t used = 0;
    p->row_sets = 0;
    for (int32_t i = 0; i < p->matrix.count; i++) {
        const int32_t block = p->matrix.of[i].block;
        int32_t set = 0;
        while (set < p->row_sets && p->rows[set].block != block) set++;
        p->set_of[i] = set;
        if (set < p->row_sets) continue;
        p->rows[p->row_sets++] = memory ? scratch_rows(memory + used, p->m, p->matrix.k, block) : (lowbit_rows){.block = block};
        used += scratch_rows_bytes(p->m, p->matrix.k, block);
    }
    return used;
}

static OrtStatus *run(const linear *op, const OrtKernelContext *context, product *p) {
    if (op->heads > 1) return run_heads(op, context, p);
    const int64_t m = p->m;
    void *memory = scratch_take(place_rows(p, NULL));
    if (!memory) return ort_fail(&op->base, "out of memory for %lld rows", (long long)m);
    place_rows(p, memory);
    int64_t bytes = 0;
    for (int32_t i = 0; i < p->matrix.count; i++) {
        const int64_t tiles = lowbit_tiles(&p->matrix.of[i]);
        p->tiles += tiles, bytes += tiles * matrix_tile_bytes(&p->matrix.of[i]);
    }
    p->quantize_jobs = ort_jobs(m, m * p->matrix.k * VALUE_BYTES);
    p->multiply_jobs = ort_jobs(p->tiles, bytes * (1 + m / FREE_ROWS));
    OrtStatus *status = ort_parallel(&op->base, context, quantize_job, p->quantize_jobs, p);
    if (!status) status = ort_parallel(&op->base, context, multiply_job, p->multiply_jobs, p);
    scratch_give(memory);
    return status;
}

static OrtStatus *read_planes(const linear *op, const OrtKernelContext *context, ort_matrix *matrix) {
    const void *planes;
    ORT_TRY(ort_read(&op->base, context, PLANES, 1, &planes));
    int32_t count = planes ? *(const int32_t *)planes : 2;
    if (count != 1 && count != 2) return ort_fail(&op->base, "planes must be 1 or 2, not %d", (int)count);
    for (int32_t i = 0; count == 1 && i < matrix->count; i++) matrix->of[i].low = NULL;
    return NULL;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const linear *op = kernel;
    const ort_kernel *base = &op->base;
    product p = {.isa = base->isa, .matrix = op->matrix, .input.epsilon = op->epsilon, .output.swiglu = op->swiglu,
                 .output.factor = op->factor};
    p.behind = behind_of_thread();
    const void *x, *norm, *bias, *residual;
    ort_shape shape;
    ORT_TRY(ort_read_shaped(base, context, X, &shape, &x));
    const int64_t read = p.matrix.k * op->heads;
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != read)
        return ort_fail(base, "the last dimension of X must be K = %lld", (long long)read);
    int64_t m = p.m = shape.elements / read, width = op->swiglu ? p.matrix.n / 2 : p.matrix.n;
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
    if (p.matrix.count > 1) p.output.stride = width;
    p.input.x = x, p.input.weight = norm, p.output.bias = bias, p.output.residual = residual;
    return m ? run(op, context, &p) : NULL;
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
