/* The operator Mamba2: the recurrence of Mamba-2 over each row's path; its states lie in slots.
 *
 * inputs: those of ort_recurrence.h, X (..., heads v + channels + heads): the gate, what the convolution reads (x, B and
 * C), time steps | dt_bias (heads) | a_log (heads) | d (heads) | norm (heads v, optional).
 * attributes: heads, key_heads (the groups), key_size (of B and C), value_size (of x), channels, width, layer, part,
 * norm_epsilon, norm_first, least_step, most_step (0: none). Output: (..., heads v).
 *
 * After convolution and silu a head's state takes in k = B and u = dt x by decay = exp(-exp(a_log) dt), and is read by
 * q = C; dt is softplus(time step + dt_bias), not below least_step nor above most_step.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ort_recurrence.h"

enum { DT_BIAS = RECURRENCE_OWN, A_LOG, D, NORM };

typedef struct {
    recurrence_node node;
    float epsilon, least_step, most_step;
    int32_t norm_first;
} mamba_node;

/* One pass, as its jobs see it. */
typedef struct {
    recurrence_pass *pass;
    const mamba_node *op;
    const float *steps, *dt_bias, *a_log;
    recurrence_gate gate;
    int64_t jobs;
} mamba_pass;

static OrtStatus *open_sizes(mamba_node *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->node.base;
    const recurrence *r = &op->node.sizes;
    ORT_TRY(recurrence_open(&op->node, info));
    op->epsilon = ort_float_or_zero(base, info, "norm_epsilon");
    op->least_step = ort_float_or_zero(base, info, "least_step");
    op->most_step = ort_float_or_zero(base, info, "most_step");
    op->norm_first = ort_int_or_zero(base, info, "norm_first") != 0;
    if (r->channels != 2 * (int64_t)r->key_heads * r->key_size + (int64_t)r->heads * r->value_size)
        return ort_fail(base, "channels must be those of x, B and C");
    for (size_t input = DT_BIAS; input <= D; input++) ORT_TRY(ort_expect(base, input, r->heads));
    return ort_expect(base, NORM, (int64_t)r->heads * r->value_size);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    mamba_node *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "Mamba2: out of memory");
    OrtStatus *status = ort_open(&made->node.base, op, api, info);
    if (!status) status = open_sizes(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

/* The time step of a head of a row. */
static float step_of(const mamba_pass *m, int64_t row, int64_t head) {
    const mamba_node *op = m->op;
    const float step = recurrence_softplus(m->steps[row * m->gate.stride + head] + m->dt_bias[head]);
    if (op->most_step == 0.0f) return step;
    return step < op->least_step ? op->least_step : step > op->most_step ? op->most_step : step;
}

/* What the rows of a job are taken in and read by. */
static void prepare_job(void *data, size_t index) {
    const mamba_pass *m = data;
    const recurrence *a = &m->pass->all;
    const int64_t job = (int64_t)index, size = a->key_size, keys = a->key_heads * size, padded = recurrence_padded(a);
    const int64_t inner = (int64_t)a->heads * a->value_size;
    for (int64_t i = a->count * job / m->jobs; i < a->count * (job + 1) / m->jobs; i++) {
        const float *x = a->mixed + i * a->channels;
        float *k = a->k + i * keys, *q = a->q + i * keys;
        memcpy(k, x + inner, (size_t)keys * sizeof(float));
        memcpy(q, x + inner + keys, (size_t)keys * sizeof(float));
        for (int64_t g = 0; g < a->key_heads; g++)
            a->qk[i * a->key_heads + g] = recurrence_product(q + g * size, k + g * size, size);
        for (int64_t h = 0; h < a->heads; h++) {
            const float step = step_of(m, i, h), *read = x + h * a->value_size;
            float *u = a->u + (i * a->heads + h) * padded;
            for (int64_t c = 0; c < padded; c++) u[c] = c < a->value_size ? step * read[c] : 0.0f;
            a->decay[i * a->heads + h] = expf(-expf(m->a_log[h]) * step);
        }
    }
}

static void gate_job(void *data, size_t index) {
    const mamba_pass *m = data;
    const recurrence *a = &m->pass->all;
    const int64_t job = (int64_t)index;
    m->pass->path->gate_groups(a, &m->gate, a->count * job / m->jobs, a->count * (job + 1) / m->jobs);
}

static OrtStatus *run(const OrtKernelContext *context, mamba_pass *m) {
    const ort_kernel *base = &m->op->node.base;
    ORT_TRY(recurrence_convolve(&m->op->node, context, m->pass));
    ORT_TRY(ort_parallel(base, context, prepare_job, m->jobs, m));
    ORT_TRY(recurrence_run(&m->op->node, context, m->pass));
    return ort_parallel(base, context, gate_job, m->jobs, m);
}

static OrtStatus *read_weights(const OrtKernelContext *context, mamba_pass *m) {
    const ort_kernel *base = &m->op->node.base;
    const recurrence *r = &m->op->node.sizes;
    const void *vectors[D - DT_BIAS + 1], *norm;
    for (size_t input = DT_BIAS; input <= D; input++)
        ORT_TRY(ort_read(base, context, input, r->heads, &vectors[input - DT_BIAS]));
    ORT_TRY(ort_read(base, context, NORM, (int64_t)r->heads * r->value_size, &norm));
    m->dt_bias = vectors[0], m->a_log = vectors[1], m->gate.d = vectors[2], m->gate.norm = norm;
    return NULL;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const mamba_node *op = kernel;
    const ort_kernel *base = &op->node.base;
    const recurrence *r = &op->node.sizes;
    const int64_t inner = (int64_t)r->heads * r->value_size, width = inner + r->channels + r->heads;
    const void *given;
    ort_shape shape;
    int left_out;
    ORT_TRY(ort_read_shaped(base, context, RECURRENCE_X, &shape, &given));
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != width)
        return ort_fail(base, "the last dimension of X must be %lld", (long long)width);
    const int64_t rows = shape.elements / width;
    shape.sizes[shape.rank - 1] = inner;
    ORT_TRY(ort_left_out(base, context, RECURRENCE_MASK, &left_out));
    if (left_out) return ort_pass_on(base, context, &shape, NULL);
    const float *x = given;
    recurrence_pass pass;
    mamba_pass m = {.pass = &pass, .op = op, .steps = x + inner + r->channels};
    m.gate = (recurrence_gate){.z = x, .stride = width, .epsilon = op->epsilon, .norm_first = op->norm_first};
    ORT_TRY(read_weights(context, &m));
    ORT_TRY(ort_write(base, context, &shape, &m.gate.y));
    if (!rows) return NULL;
    OrtStatus *status = recurrence_begin(&op->node, context, &pass, x + inner, width, rows);
    m.jobs = ort_jobs(rows, rows * width * (int64_t)sizeof(float));
    if (!status) status = run(context, &m);
    recurrence_end(&pass);
    return status;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_mamba = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "Mamba2",
    .input_count = RECURRENCE_OWN + 4,
    .inputs =
        {
            RECURRENCE_INPUTS,
            {"dt_bias", ORT_FLOAT, ORT_REQUIRED},
            {"a_log", ORT_FLOAT, ORT_REQUIRED},
            {"d", ORT_FLOAT, ORT_REQUIRED},
            {"norm", ORT_FLOAT, ORT_OPTIONAL},
        },
};
