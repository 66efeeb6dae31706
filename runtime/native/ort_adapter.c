/* The operator Adapter: adds the low-rank products of adapters (LoRA) to a linear layer's, row by row.
 *
 * inputs: X (..., K) float, what entered the layer: m rows | product (..., N), what it gave | rows (m) int32: the adapter
 * of each row, -1: none | weights (W) float | table (sites, adapters, parts, 5) int64: of a layer's part that an adapter
 * changes, where A (rank, K) and B (rank, outputs) begin in the weights, rank, first output and outputs; rank 0: nothing |
 * norm (K): X is normalised by its root mean square and this weight | layer_mask (parts of the model) bool: where the
 * node's part is false, the output is the product.
 * attributes: N, K, site: of the table, norm_epsilon, part. Output: (..., N), product + (X A^T) B. A row's bits depend on
 * the row alone.
 */
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "matrix.h"
#include "ort_support.h"
#include "scratch.h"

enum { X, PRODUCT, ROWS, WEIGHTS, TABLE, NORM, LAYER_MASK };
enum { A, B, RANK, FIRST, OUTPUTS, ENTRY };
/* Pieces of a row that threads take, and what a row costs at least, in bytes read. */
enum { PIECES = 8, ROW_BYTES = 64 };

typedef struct {
    ort_kernel base;
    int64_t n, k, site;
    float epsilon;
} adapter;

/* One pass, as its jobs see it. */
typedef struct {
    const attention_path *path;
    lowbit_input input;
    const float *product, *weights;
    const int32_t *rows;
    const int64_t *table; /* of the node's site: (adapters, parts, ENTRY) */
    int64_t m, n, k, parts, rank; /* rank: of all parts of an adapter together, at most */
    float *normed, *inner, *y;    /* (m, K) where there is a norm; (m, rank); (m, N) */
    int64_t inner_jobs, jobs;
} pass;

static OrtStatus *open_adapter(adapter *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    ORT_TRY(ort_int(base, info, "N", &op->n));
    ORT_TRY(ort_int(base, info, "K", &op->k));
    ORT_TRY(ort_int(base, info, "site", &op->site));
    if (op->n < 1 || op->n > MATRIX_MOST || op->k < 1 || op->k > MATRIX_MOST || op->site < 0)
        return ort_fail(base, "N and K must be between 1 and 2^28, and site not negative");
    if (base->inputs[NORM].given) {
        OrtStatus *status = base->api->KernelInfoGetAttribute_float(info, "norm_epsilon", &op->epsilon);
        if (status) return base->api->ReleaseStatus(status), ort_fail(base, "norm needs the attribute norm_epsilon");
    }
    return ort_expect(base, NORM, op->k);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    adapter *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "Adapter: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_adapter(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

static const int64_t *entries_of(const pass *p, int64_t row) { return p->table + p->rows[row] * p->parts * ENTRY; }

/* A row's product, and what the As make of what entered. */
static void inner_job(void *data, size_t index) {
    const pass *p = data;
    const int64_t job = (int64_t)index;
    for (int64_t row = p->m * job / p->inner_jobs; row < p->m * (job + 1) / p->inner_jobs; row++) {
        memcpy(p->y + row * p->n, p->product + row * p->n, (size_t)p->n * sizeof(float));
        if (p->rows[row] < 0) continue;
        const float *x = p->input.x + row * p->k;
        if (p->input.weight) {
            p->path->normalise_floats(&p->input, p->k, p->normed, row, row + 1);
            x = p->normed + row * p->k;
        }
        float *inner = p->inner + row * p->rank;
        const int64_t *entry = entries_of(p, row);
        for (int64_t part = 0; part < p->parts; part++, entry += ENTRY) {
            if (!entry[RANK]) continue;
            const float_matrix a = {.n = entry[RANK], .k = p->k, .by_output = 1, .data = p->weights + entry[A]};
            const float_rows one = {.m = 1, .x = x, .y = inner};
            p->path->multiply_floats(&a, &one, 0, floats_tiles(&a));
            inner += entry[RANK];
        }
    }
}

/* What the Bs make of that, added to pieces of rows. */
static void outer_job(void *data, size_t index) {
    const pass *p = data;
    const int64_t job = (int64_t)index, pieces = p->m * PIECES;
    for (int64_t piece = pieces * job / p->jobs; piece < pieces * (job + 1) / p->jobs; piece++) {
        const int64_t row = piece / PIECES, place = piece % PIECES;
        if (p->rows[row] < 0) continue;
        const float *inner = p->inner + row * p->rank;
        const int64_t *entry = entries_of(p, row);
        for (int64_t part = 0; part < p->parts; part++, entry += ENTRY) {
            if (!entry[RANK]) continue;
            const float_matrix b = {.n = entry[OUTPUTS], .k = entry[RANK], .data = p->weights + entry[B]};
            float *y = p->y + row * p->n + entry[FIRST];
            const float_rows one = {.m = 1, .x = inner, .y = y, .residual = y};
            const int64_t tiles = floats_tiles(&b);
            p->path->multiply_floats(&b, &one, tiles * place / PIECES, tiles * (place + 1) / PIECES);
            inner += entry[RANK];
        }
    }
}

/* Whether the part that an entry describes lies in the weights and in a row. */
static int entry_fits(const adapter *op, const int64_t *entry, int64_t weights) {
    const int64_t rank = entry[RANK], outputs = entry[OUTPUTS];
    if (rank < 0 || rank > weights || entry[A] < 0 || entry[B] < 0 || entry[FIRST] < 0 || outputs < 0) return 0;
    if (entry[FIRST] > op->n || outputs > op->n - entry[FIRST] || entry[A] > weights || entry[B] > weights) return 0;
    return !rank || (outputs && op->k <= (weights - entry[A]) / rank && outputs <= (weights - entry[B]) / rank);
}

static OrtStatus *read_table(const adapter *op, const OrtKernelContext *context, pass *p) {
    const ort_kernel *base = &op->base;
    ort_shape weights, table;
    const void *rows, *values, *numbers;
    ORT_TRY(ort_read(base, context, ROWS, p->m, &rows));
    ORT_TRY(ort_read_shaped(base, context, WEIGHTS, &weights, &values));
    ORT_TRY(ort_read_shaped(base, context, TABLE, &table, &numbers));
    if (table.rank != 4 || table.sizes[0] <= op->site || table.sizes[3] != ENTRY)
        return ort_fail(base, "table must be (sites, adapters, parts, %d) with this node's site", ENTRY);
    const int64_t adapters = table.sizes[1];
    p->parts = table.sizes[2], p->rows = rows, p->weights = values;
    p->table = (const int64_t *)numbers + op->site * adapters * p->parts * ENTRY;
    for (int64_t row = 0; row < p->m; row++)
        if (p->rows[row] < -1 || p->rows[row] >= adapters)
            return ort_fail(base, "row %lld has adapter %d of %lld", (long long)row, (int)p->rows[row], (long long)adapters);
    for (int64_t one = 0; one < adapters; one++) {
        int64_t rank = 0;
        for (int64_t part = 0; part < p->parts; part++) {
            const int64_t *entry = p->table + (one * p->parts + part) * ENTRY;
            if (!entry_fits(op, entry, weights.elements)) return ort_fail(base, "adapter %lld reaches past its weights", (long long)one);
            rank += entry[RANK];
        }
        if (rank > p->rank) p->rank = rank;
    }
    return NULL;
}

static OrtStatus *run(const adapter *op, const OrtKernelContext *context, pass *p) {
    const int64_t normed = p->input.weight ? p->k : 0, line = LOWBIT_GROUP;
    p->normed = scratch_take((size_t)(p->m * (normed + p->rank) + line) * sizeof(float));
    if (!p->normed) return ort_fail(&op->base, "out of memory for %lld rows", (long long)p->m);
    p->inner = p->normed + p->m * normed;
    const int64_t bytes = (int64_t)sizeof(float) * p->rank;
    p->inner_jobs = ort_jobs(p->m, p->m * (p->n * (int64_t)sizeof(float) + p->k * bytes + ROW_BYTES));
    p->jobs = ort_jobs(p->m * PIECES, p->m * (p->n * bytes + ROW_BYTES));
    OrtStatus *status = ort_parallel(&op->base, context, inner_job, p->inner_jobs, p);
    if (!status && p->rank) status = ort_parallel(&op->base, context, outer_job, p->jobs, p);
    scratch_give(p->normed);
    return status;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const adapter *op = kernel;
    const ort_kernel *base = &op->base;
    pass p = {.path = attention_path_of(base->isa), .n = op->n, .k = op->k, .input.epsilon = op->epsilon};
    const void *x, *product, *norm;
    ort_shape shape;
    int left_out;
    ORT_TRY(ort_read_shaped(base, context, X, &shape, &x));
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != op->k)
        return ort_fail(base, "the last dimension of X must be K = %lld", (long long)op->k);
    p.m = shape.elements / op->k;
    shape.sizes[shape.rank - 1] = op->n;
    ORT_TRY(ort_read(base, context, PRODUCT, p.m * op->n, &product));
    ORT_TRY(ort_left_out(base, context, LAYER_MASK, &left_out));
    if (left_out) return ort_pass_on(base, context, &shape, product);
    ORT_TRY(ort_read(base, context, NORM, op->k, &norm));
    ORT_TRY(read_table(op, context, &p));
    ORT_TRY(ort_write(base, context, &shape, &p.y));
    p.input.x = x, p.input.weight = norm, p.product = product;
    return p.m ? run(op, context, &p) : NULL;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_adapter = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "Adapter",
    .input_count = 7,
    .inputs =
        {
            {"X", ORT_FLOAT, ORT_REQUIRED},
            {"product", ORT_FLOAT, ORT_REQUIRED},
            {"rows", ORT_INT32, ORT_REQUIRED},
            {"weights", ORT_FLOAT, ORT_REQUIRED},
            {"table", ORT_INT64, ORT_REQUIRED},
            {"norm", ORT_FLOAT, ORT_OPTIONAL},
            {"layer_mask", ORT_BOOL, ORT_OPTIONAL},
        },
};
