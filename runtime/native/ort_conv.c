/* The operator ShortConv: a gated convolution over the last tokens of each row's path; what it reads of a token lies in
 * the pages of its sequence.
 *
 * inputs: X (..., 3 D) float: B, C and x of S rows | pool, layout, pages, rows, extras: as Attention has them; a slot of
 * the layer is D float32, rounded up to 16, whatever the layout's types are | weights (D, 1, width): of the last tokens,
 * the row's own last | bias (D) | layer_mask: where it is false at the node's part, nothing is written and the output is
 * zeros.
 * attributes: channels (D), width, layer, part. Output: (..., D).
 *
 * Arithmetic, the same for every path to the last bit: B * x is stored; then bias or 0, plus weight times what is stored
 * of each token, the oldest first, each product and each sum rounded, times C. Tokens before the first are left out.
 */
#include <stdlib.h>

#include "attention_check.h"
#include "ort_support.h"
#include "scratch.h"

enum { X, POOL, LAYOUT, PAGES, ROWS, EXTRAS, WEIGHTS, BIAS, LAYER_MASK };
enum { MOST_WIDTH = 64 };

typedef struct {
    ort_kernel base;
    int64_t channels, width, layer;
} node;

/* One pass, as its jobs see it. */
typedef struct {
    attention a; /* of one head without keys */
    int64_t channels, width, jobs;
    const float *x, *weights, *bias;
    float *out;
} pass;

static OrtStatus *open_sizes(node *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    ORT_TRY(ort_int(base, info, "channels", &op->channels));
    ORT_TRY(ort_int(base, info, "width", &op->width));
    ORT_TRY(ort_int(base, info, "layer", &op->layer));
    if (op->channels < 1 || op->channels > 1 << 20) return ort_fail(base, "channels must be between 1 and 2^20");
    if (op->width < 1 || op->width > MOST_WIDTH) return ort_fail(base, "width must be between 1 and 64");
    ORT_TRY(ort_expect(base, WEIGHTS, op->channels * op->width));
    return ort_expect(base, BIAS, op->channels);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    node *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "ShortConv: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_sizes(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

/* The pool and its tables, which are checked before anything is written. */
static OrtStatus *read_cache(const node *op, const OrtKernelContext *context, pass *p) {
    const ort_kernel *base = &op->base;
    attention *a = &p->a;
    ort_shape pool, layout, pages, extras;
    const void *memory, *numbers, *table, *rows, *slots;
    ORT_TRY(ort_read_shaped(base, context, POOL, &pool, &memory));
    ORT_TRY(ort_read_shaped(base, context, LAYOUT, &layout, &numbers));
    ORT_TRY(ort_read_shaped(base, context, PAGES, &pages, &table));
    ORT_TRY(ort_read(base, context, ROWS, a->count * ATTENTION_ROW, &rows));
    ORT_TRY(ort_read_shaped(base, context, EXTRAS, &extras, &slots));
    if (pages.rank != 2) return ort_fail(base, "pages must have 2 dimensions, not %zu", pages.rank);
    if (op->layer < 0 || op->layer >= layout.elements - 3) return ort_fail(base, "layout does not have the layer");
    const int64_t *given = numbers;
    const int64_t floats[] = {ATTENTION_FLOAT32, ATTENTION_FLOAT32, given[2], given[3 + op->layer]};
    const attention_bounds bounds = {.pool = pool.elements, .sequences = pages.sizes[0], .extras = extras.elements};
    a->heads = a->kv_heads = 1, a->value_size = (int32_t)op->channels;
    a->pool = (uint8_t *)(uintptr_t)memory; /* which this operator writes, as Attention does */
    a->pages = table, a->columns = pages.sizes[1], a->rows = rows, a->extras = slots;
    const char *fault = attention_set_layout(a, floats, 4, 0, &bounds);
    if (fault) return ort_fail(base, "%s", fault);
    for (int64_t r = 0; r < a->count; r++)
        if (a->rows[r * ATTENTION_ROW + ATTENTION_EXTRAS] < 0) return ort_fail(base, "row %lld names its slot", (long long)r);
    char message[ATTENTION_MESSAGE];
    void *states = scratch_take(attention_check_bytes(a, &bounds));
    if (!states) return ort_fail(base, "out of memory");
    int right = attention_check(a, &bounds, states, message);
    scratch_give(states);
    return right ? NULL : ort_fail(base, "%s", message);
}

/* What is kept of the token at a place of a row's path. */
static float *kept(const pass *p, const int32_t *row, int64_t place) {
    const attention *a = &p->a;
    int64_t prefix = row[ATTENTION_PREFIX];
    int64_t slot = place < prefix ? place : a->extras[row[ATTENTION_FIRST_EXTRA] + place - prefix];
    int64_t page = a->pages[row[ATTENTION_SEQUENCE] * a->columns + slot / ATTENTION_PAGE];
    float *values = (float *)(void *)(a->pool + page * a->page_bytes + a->offset);
    return values + slot % ATTENTION_PAGE * ((p->channels + ATTENTION_TILE - 1) / ATTENTION_TILE * ATTENTION_TILE);
}

static int64_t length_of(const int32_t *row) { return (int64_t)row[ATTENTION_PREFIX] + row[ATTENTION_EXTRAS]; }

static void write_job(void *data, size_t index) {
    const pass *p = data;
    const int64_t job = (int64_t)index, d = p->channels, rows = p->a.count;
    for (int64_t r = rows * job / p->jobs; r < rows * (job + 1) / p->jobs; r++) {
        const int32_t *row = p->a.rows + r * ATTENTION_ROW;
        const float *before = p->x + r * 3 * d, *value = before + 2 * d;
        float *own = kept(p, row, length_of(row) - 1);
        for (int64_t c = 0; c < d; c++) own[c] = before[c] * value[c];
    }
}

static void mix_job(void *data, size_t index) {
    const pass *p = data;
    const int64_t job = (int64_t)index, d = p->channels, rows = p->a.count;
    for (int64_t r = rows * job / p->jobs; r < rows * (job + 1) / p->jobs; r++) {
        const int32_t *row = p->a.rows + r * ATTENTION_ROW;
        const float *after = p->x + r * 3 * d + d;
        float *out = p->out + r * d;
        int64_t length = length_of(row), seen = length < p->width ? length : p->width;
        for (int64_t c = 0; c < d; c++) out[c] = p->bias ? p->bias[c] : 0.0f;
        for (int64_t t = seen; t > 0; t--) {
            const float *token = kept(p, row, length - t), *weight = p->weights + p->width - t;
            for (int64_t c = 0; c < d; c++) out[c] += weight[c * p->width] * token[c];
        }
        for (int64_t c = 0; c < d; c++) out[c] *= after[c];
    }
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const node *op = kernel;
    const ort_kernel *base = &op->base;
    pass p = {.channels = op->channels, .width = op->width};
    const void *x, *weights, *bias;
    ort_shape shape;
    int left_out;
    ORT_TRY(ort_read_shaped(base, context, X, &shape, &x));
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != 3 * op->channels)
        return ort_fail(base, "the last dimension of X must be %lld", (long long)(3 * op->channels));
    p.a.count = shape.elements / (3 * op->channels);
    shape.sizes[shape.rank - 1] = op->channels;
    ORT_TRY(ort_left_out(base, context, LAYER_MASK, &left_out));
    if (left_out) return ort_pass_on(base, context, &shape, NULL);
    ORT_TRY(ort_read(base, context, WEIGHTS, op->channels * op->width, &weights));
    ORT_TRY(ort_read(base, context, BIAS, op->channels, &bias));
    ORT_TRY(read_cache(op, context, &p));
    ORT_TRY(ort_write(base, context, &shape, &p.out));
    if (!p.a.count) return NULL;
    p.x = x, p.weights = weights, p.bias = bias;
    p.jobs = ort_jobs(p.a.count, p.a.count * p.channels * (p.width + 4) * (int64_t)sizeof(float));
    ORT_TRY(ort_parallel(base, context, write_job, p.jobs, &p));
    return ort_parallel(base, context, mix_job, p.jobs, &p);
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_conv = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "ShortConv",
    .input_count = 9,
    .inputs =
        {
            {"X", ORT_FLOAT, ORT_REQUIRED},
            {"pool", ORT_UINT8, ORT_REQUIRED},
            {"layout", ORT_INT64, ORT_REQUIRED},
            {"pages", ORT_INT32, ORT_REQUIRED},
            {"rows", ORT_INT32, ORT_REQUIRED},
            {"extras", ORT_INT32, ORT_REQUIRED},
            {"weights", ORT_FLOAT, ORT_REQUIRED},
            {"bias", ORT_FLOAT, ORT_OPTIONAL},
            {"layer_mask", ORT_BOOL, ORT_OPTIONAL},
        },
};
