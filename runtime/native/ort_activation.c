/* The operator Activation: an activation function of rows, and what its results multiply; knows nothing of how.
 *
 * inputs: X (..., F) float | times (..., F r): each result multiplies r of these, one after the other | constants (2): of
 * xielu.
 * attributes: kind: see activation.h; paired: X (..., 2 F) holds F values that go through the function and then F that
 * these multiply; cap: of softcap; cut: of a row's F values only what is above their mean plus `deviations` of their
 * standard deviations goes through the function, and 0 for the rest (Gemma 3n). Output: (..., F), or as times.
 */
#include <math.h>
#include <stdlib.h>

#include "attention.h"
#include "ort_support.h"
#include "scratch.h"

enum { X, TIMES, CONSTANTS };
/* A value takes the time of reading some ten bytes. */
enum { VALUE_BYTES = 10 };
/* Sums of a row that are made side by side. */
enum { SUMS = 8 };

typedef struct {
    ort_kernel base;
    int64_t kind;
    int32_t paired, cut;
    float cap, deviations;
} node;

/* One pass, as its jobs see it. */
typedef struct {
    const attention_path *path;
    activation a;
    int64_t pieces, jobs;
    float deviations, *cutoffs;
} pass;

static OrtStatus *open_node(node *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    ORT_TRY(ort_int(base, info, "kind", &op->kind));
    ORT_TRY(ort_flag(base, info, "paired", &op->paired));
    op->cap = ort_float_or_zero(base, info, "cap");
    ORT_TRY(ort_flag(base, info, "cut", &op->cut));
    op->deviations = ort_float_or_zero(base, info, "deviations");
    if (op->kind < 0 || op->kind >= ACTIVATION_KINDS) return ort_fail(base, "there is no kind %lld", (long long)op->kind);
    if (op->paired && base->inputs[TIMES].given) return ort_fail(base, "paired values come with what they multiply");
    if (op->kind == ACTIVATION_SWIGLU && !op->paired) return ort_fail(base, "swiglu needs paired values");
    if (op->kind == ACTIVATION_SOFTCAP && !(op->cap > 0)) return ort_fail(base, "softcap needs a positive cap");
    if (op->kind == ACTIVATION_XIELU && !base->inputs[CONSTANTS].given) return ort_fail(base, "xielu needs constants");
    return ort_expect(base, CONSTANTS, 2);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    node *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "Activation: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_node(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

static void activate_job(void *data, size_t index) {
    const pass *p = data;
    int64_t job = (int64_t)index;
    p->path->activate(&p->a, p->pieces * job / p->jobs, p->pieces * (job + 1) / p->jobs);
}

/* The mean of a row plus some of its standard deviations, the same on every path. */
static void cutoff_job(void *data, size_t row) {
    const pass *p = data;
    const activation *a = &p->a;
    const float *x = a->x + (int64_t)row * a->stride;
    double sums[SUMS] = {0}, squares[SUMS] = {0}, sum = 0, square = 0;
    const int64_t whole = a->width / SUMS * SUMS;
    for (int64_t at = 0; at < whole; at += SUMS)
        for (int i = 0; i < SUMS; i++) {
            double value = x[at + i];
            sums[i] += value, squares[i] += value * value;
        }
    for (int64_t at = whole; at < a->width; at++) sums[0] += x[at], squares[0] += (double)x[at] * x[at];
    for (int i = 0; i < SUMS; i++) sum += sums[i], square += squares[i];
    const double mean = sum / (double)a->width;
    const double variance = square / (double)a->width - mean * mean;
    p->cutoffs[row] = (float)(mean + p->deviations * sqrt(variance > 0 ? variance : 0));
}

/* What the results multiply, and how many of them each; `shape` becomes that of the output. */
static OrtStatus *read_times(const node *op, const OrtKernelContext *context, activation *a, ort_shape *shape) {
    const ort_kernel *base = &op->base;
    a->repeat = 1;
    if (op->paired) {
        a->times = a->x + a->width, a->times_stride = a->stride;
        shape->sizes[shape->rank - 1] = a->width;
        return NULL;
    }
    if (!base->inputs[TIMES].given) return NULL;
    const void *times;
    ORT_TRY(ort_read_shaped(base, context, TIMES, shape, &times));
    int64_t wide = shape->rank ? shape->sizes[shape->rank - 1] : 0;
    if (!wide || !a->width || wide % a->width || shape->elements != a->rows * wide)
        return ort_fail(base, "times must have a multiple of %lld values for each of %lld rows", (long long)a->width,
                        (long long)a->rows);
    a->times = times, a->times_stride = wide, a->repeat = wide / a->width;
    return NULL;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const node *op = kernel;
    const ort_kernel *base = &op->base;
    pass p = {.path = attention_path_of(base->isa), .a.kind = (int32_t)op->kind, .a.first = op->cap};
    activation *a = &p.a;
    const void *x, *constants;
    ort_shape shape;
    ORT_TRY(ort_read_shaped(base, context, X, &shape, &x));
    a->x = x, a->stride = shape.rank ? shape.sizes[shape.rank - 1] : 0;
    if (a->stride < 1 || (op->paired && a->stride % 2)) return ort_fail(base, "X has rows of no width, or of half ones");
    a->rows = shape.elements / a->stride, a->width = op->paired ? a->stride / 2 : a->stride;
    ORT_TRY(ort_read(base, context, CONSTANTS, 2, &constants));
    if (constants) a->first = ((const float *)constants)[0], a->second = ((const float *)constants)[1];
    ORT_TRY(read_times(op, context, a, &shape));
    ORT_TRY(ort_write(base, context, &shape, &a->y));
    p.pieces = activation_pieces(a);
    p.jobs = ort_jobs(p.pieces, a->rows * a->width * VALUE_BYTES);
    if (!p.pieces) return NULL;
    OrtStatus *status = NULL;
    if (op->cut) {
        p.deviations = op->deviations, p.cutoffs = scratch_take((size_t)a->rows * sizeof(float));
        if (!p.cutoffs) return ort_fail(base, "out of memory for %lld rows", (long long)a->rows);
        status = ort_parallel(base, context, cutoff_job, a->rows, &p);
        a->cutoffs = p.cutoffs;
    }
    if (!status) status = ort_parallel(base, context, activate_job, p.jobs, &p);
    scratch_give(p.cutoffs);
    return status;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_activation = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "Activation",
    .input_count = 3,
    .inputs =
        {
            {"X", ORT_FLOAT, ORT_REQUIRED},
            {"times", ORT_FLOAT, ORT_OPTIONAL},
            {"constants", ORT_FLOAT, ORT_OPTIONAL},
        },
};
