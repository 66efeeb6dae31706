/* The operator GatedDelta: the gated delta rule (Qwen3-Next, Qwen3.5) over each row's path; its states lie in slots.
 *
 * inputs: those of ort_recurrence.h, X (..., channels + heads v): queries, keys and values, which the convolution reads,
 * then the gate | gates (..., 2 heads): b, then a | dt_bias (heads) | a_log (heads) | norm (v).
 * attributes: heads, key_heads, key_size, value_size, channels, width, layer, part, norm_epsilon. Output: (..., heads v).
 *
 * After convolution and silu, queries and keys are divided by the root of the sum of their squares plus 1e-6, queries by
 * the root of their size too. decay = exp(-exp(a_log) softplus(a + dt_bias)), beta is the logistic function of b. What
 * heads give is normalised, times norm and silu of the gate.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ort_recurrence.h"

enum { GATES = RECURRENCE_OWN, DT_BIAS, A_LOG, NORM };
static const float EPSILON = 1e-6f; /* of queries and keys: transformers, models/qwen3_next, l2norm */

typedef struct {
    recurrence_node node;
    float norm_epsilon;
} delta_node;

/* One pass, as its jobs see it. */
typedef struct {
    recurrence_pass *pass;
    const delta_node *op;
    const float *gate, *gates, *dt_bias, *a_log, *norm;
    float *out;
    int64_t jobs;
} delta_pass;

static OrtStatus *open_sizes(delta_node *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->node.base;
    recurrence *r = &op->node.sizes;
    ORT_TRY(recurrence_open(&op->node, info));
    r->delta = 1, op->norm_epsilon = ort_float_or_zero(base, info, "norm_epsilon");
    if (r->channels != 2 * (int64_t)r->key_heads * r->key_size + (int64_t)r->heads * r->value_size)
        return ort_fail(base, "channels must be those of queries, keys and values");
    ORT_TRY(ort_expect(base, DT_BIAS, r->heads));
    ORT_TRY(ort_expect(base, A_LOG, r->heads));
    return ort_expect(base, NORM, r->value_size);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    delta_node *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "GatedDelta: out of memory");
    OrtStatus *status = ort_open(&made->node.base, op, api, info);
    if (!status) status = open_sizes(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

static void scaled(const float *x, int64_t n, float by, float *y) {
    const float factor = by / sqrtf(recurrence_product(x, x, n) + EPSILON);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor;
}

/* Queries, keys, values, decay and beta of the rows of a job. */
static void prepare_job(void *data, size_t index) {
    const delta_pass *d = data;
    const recurrence *a = &d->pass->all;
    const int64_t job = (int64_t)index, size = a->key_size, keys = a->key_heads * size, padded = recurrence_padded(a);
    for (int64_t i = a->count * job / d->jobs; i < a->count * (job + 1) / d->jobs; i++) {
        const float *mixed = a->mixed + i * a->channels, *gates = d->gates + i * 2 * a->heads;
        for (int64_t h = 0; h < a->key_heads; h++) {
            float *q = a->q + i * keys + h * size, *k = a->k + i * keys + h * size;
            scaled(mixed + h * size, size, 1.0f / sqrtf((float)size), q);
            scaled(mixed + keys + h * size, size, 1.0f, k);
            a->qk[i * a->key_heads + h] = recurrence_product(q, k, size);
        }
        for (int64_t h = 0; h < a->heads; h++) {
            float *v = a->u + (i * a->heads + h) * padded;
            memset(v + a->value_size, 0, (size_t)(padded - a->value_size) * sizeof(float));
            memcpy(v, mixed + 2 * keys + h * a->value_size, (size_t)a->value_size * sizeof(float));
            a->decay[i * a->heads + h] = expf(-expf(d->a_log[h]) * recurrence_softplus(gates[a->heads + h] + d->dt_bias[h]));
            a->beta[i * a->heads + h] = 1.0f / (1.0f + expf(-gates[h]));
        }
    }
}

static void gate_job(void *data, size_t index) {
    const delta_pass *d = data;
    const recurrence *a = &d->pass->all;
    const int64_t job = (int64_t)index;
    d->pass->path->gate_heads(a, d->norm, d->op->norm_epsilon, d->gate, a->x_stride, d->out, a->count * job / d->jobs,
                              a->count * (job + 1) / d->jobs);
}

static OrtStatus *run(const OrtKernelContext *context, delta_pass *d) {
    const ort_kernel *base = &d->op->node.base;
    ORT_TRY(recurrence_convolve(&d->op->node, context, d->pass));
    ORT_TRY(ort_parallel(base, context, prepare_job, d->jobs, d));
    ORT_TRY(recurrence_run(&d->op->node, context, d->pass));
    return ort_parallel(base, context, gate_job, d->jobs, d);
}

static OrtStatus *read_weights(const OrtKernelContext *context, delta_pass *d, int64_t rows) {
    const ort_kernel *base = &d->op->node.base;
    const recurrence *r = &d->op->node.sizes;
    const void *gates, *dt_bias, *a_log, *norm;
    ORT_TRY(ort_read(base, context, GATES, rows * 2 * r->heads, &gates));
    ORT_TRY(ort_read(base, context, DT_BIAS, r->heads, &dt_bias));
    ORT_TRY(ort_read(base, context, A_LOG, r->heads, &a_log));
    ORT_TRY(ort_read(base, context, NORM, r->value_size, &norm));
    d->gates = gates, d->dt_bias = dt_bias, d->a_log = a_log, d->norm = norm;
    return NULL;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const delta_node *op = kernel;
    const ort_kernel *base = &op->node.base;
    const recurrence *r = &op->node.sizes;
    const int64_t values = (int64_t)r->heads * r->value_size, width = r->channels + values;
    const void *x;
    ort_shape shape;
    int left_out;
    ORT_TRY(ort_read_shaped(base, context, RECURRENCE_X, &shape, &x));
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != width)
        return ort_fail(base, "the last dimension of X must be %lld", (long long)width);
    const int64_t rows = shape.elements / width;
    shape.sizes[shape.rank - 1] = values;
    ORT_TRY(ort_left_out(base, context, RECURRENCE_MASK, &left_out));
    if (left_out) return ort_pass_on(base, context, &shape, NULL);
    recurrence_pass pass;
    delta_pass d = {.pass = &pass, .op = op, .gate = (const float *)x + r->channels};
    ORT_TRY(read_weights(context, &d, rows));
    ORT_TRY(ort_write(base, context, &shape, &d.out));
    if (!rows) return NULL;
    OrtStatus *status = recurrence_begin(&op->node, context, &pass, x, width, rows);
    d.jobs = ort_jobs(rows, rows * width * (int64_t)sizeof(float));
    if (!status) status = run(context, &d);
    recurrence_end(&pass);
    return status;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_delta = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "GatedDelta",
    .input_count = RECURRENCE_OWN + 4,
    .inputs =
        {
            RECURRENCE_INPUTS,
            {"gates", ORT_FLOAT, ORT_REQUIRED},
            {"dt_bias", ORT_FLOAT, ORT_REQUIRED},
            {"a_log", ORT_FLOAT, ORT_REQUIRED},
            {"norm", ORT_FLOAT, ORT_REQUIRED},
        },
};
