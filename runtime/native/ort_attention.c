/* The operator Attention: rows join the pages of their sequences and attend to their paths; knows nothing of how.
 *
 * inputs: qkv (..., heads h + kv_heads h + kv_heads v) float, of latent (..., heads v + heads h + v + h): S rows | pool (bytes) uint8, updated in place: all rows are
 * written before any attends | layout (3 + L) int64: key type, value type, page_bytes, offset of each layer | pages
 * (B, P) int32: page of each 64 slots of each sequence, -1: none | rows (S, 4) int32: sequence, prefix n, first extra,
 * number of extras. A row sees the slots 0 to n - 1 and its extras, the last of which is its own; of -1 extras it
 * sees the first n alone, and first extra is its own slot, any that has a page | extras (X) int32:
 * slots, ascending within a row | position_ids (S) int64: for the rotation | cos, sin (P', rotary_dim / 2), both or
 * none | q_norm, k_norm: (h), or (heads h) and (kv_heads h): root-mean-square norms before the rotation; of latent there
 * is k_norm alone, (v), which is of the values | sinks (heads) |
 * layer_mask (parts of the model) bool: where the node's part is false, nothing is written and the output is zeros |
 * qkv_bias (heads h + kv_heads h + kv_heads v): what qkv had added; that of the keys is taken off keys of few bits again
 * where it hardly turns. Not with norms of keys, sinks, softcap, latent or shared.
 * attributes: num_heads, kv_num_heads, key_size, value_size, layer, rotary_dim, interleaved, window, scale, softcap,
 * norm_epsilon, norm_after (norms of queries and keys come after the rotation), value_norm (values have a norm without a
 * weight), latent (values are part of the keys), shared (an earlier node wrote the layer's keys and values: qkv is
 * (..., heads h)), part, still (of the rotated pairs, the first that hardly turns); all but the first five may be absent, which is 0: nothing, and for scale 1 / sqrt(h).
 * Output: (..., heads v).
 */
#include <math.h>
#include <stdlib.h>

#include "attention_check.h"
#include "ort_support.h"
#include "scratch.h"

enum { QKV, POOL, LAYOUT, PAGES, ROWS, EXTRAS, POSITIONS, COS, SIN, Q_NORM, K_NORM, SINKS, LAYER_MASK, QKV_BIAS };
/* Work in units of bytes read: values that are normed, rotated and stored; what balances no better if cut further. */
enum { VALUE_BYTES = 16, MOST_JOBS = 64 };

typedef struct {
    ort_kernel base;
    attention sizes; /* without what a pass brings */
    int64_t layer;
} node;

/* One pass, as its jobs see it. */
typedef struct {
    attention a;
    attention_plan plan;
    attention_bounds bounds;
    const attention_path *path;
    int64_t write_jobs;
} pass;

/* -1, which is nowhere right, for what 32 bits do not hold. */
static int32_t narrow(int64_t value) { return value == (int32_t)value ? (int32_t)value : -1; }

static OrtStatus *open_sizes(node *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    attention *a = &op->sizes;
    int64_t heads, kv_heads, key, value;
    ORT_TRY(ort_int(base, info, "num_heads", &heads));
    ORT_TRY(ort_int(base, info, "kv_num_heads", &kv_heads));
    ORT_TRY(ort_int(base, info, "key_size", &key));
    ORT_TRY(ort_int(base, info, "value_size", &value));
    ORT_TRY(ort_int(base, info, "layer", &op->layer));
    ORT_TRY(ort_flag(base, info, "interleaved", &a->interleaved));
    ORT_TRY(ort_flag(base, info, "norm_after", &a->norm_after));
    ORT_TRY(ort_flag(base, info, "value_norm", &a->value_norm));
    ORT_TRY(ort_flag(base, info, "shared", &a->shared));
    ORT_TRY(ort_flag(base, info, "latent", &a->latent));
    a->heads = narrow(heads), a->kv_heads = narrow(kv_heads), a->key_size = narrow(key), a->value_size = narrow(value);
    a->rotary = narrow(ort_int_or_zero(base, info, "rotary_dim"));
    a->still = narrow(ort_int_or_zero(base, info, "still"));
    a->window = ort_int_or_zero(base, info, "window");
    a->scale = ort_float_or_zero(base, info, "scale");
    a->softcap = ort_float_or_zero(base, info, "softcap");
    a->norm_epsilon = ort_float_or_zero(base, info, "norm_epsilon");
    const char *fault = attention_sizes_fault(a);
    if (fault) return ort_fail(base, "%s", fault);
    if (a->scale == 0) a->scale = 1.0f / sqrtf((float)a->key_size);
    return NULL;
}

static OrtStatus *open_inputs(node *op) {
    const ort_kernel *base = &op->base;
    const ort_input *in = base->inputs;
    if (in[COS].given != in[SIN].given || in[COS].given != (op->sizes.rotary > 0))
        return ort_fail(base, "cos, sin and rotary_dim belong together");
    if ((in[Q_NORM].given || in[K_NORM].given) && !(op->sizes.norm_epsilon > 0))
        return ort_fail(base, "a norm needs the attribute norm_epsilon");
    const attention *a = &op->sizes;
    if (in[QKV_BIAS].given && (in[K_NORM].given || in[SINKS].given || a->softcap > 0 || a->latent || a->shared))
        return ort_fail(base, "qkv_bias is not for attention with norms of keys, sinks, softcap, latent or shared");
    ORT_TRY(ort_expect(base, QKV_BIAS, attention_row_width(a)));
    return ort_expect(base, SINKS, op->sizes.heads);
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    node *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "Attention: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_sizes(made, info);
    if (!status) status = open_inputs(made);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

/* Queries, keys and values; fills in the shape of the output. */
static OrtStatus *read_rows(const node *op, const OrtKernelContext *context, pass *p, ort_shape *out) {
    const ort_kernel *base = &op->base;
    attention *a = &p->a;
    int64_t width = attention_row_width(a);
    const void *qkv, *rows, *positions;
    ORT_TRY(ort_read_shaped(base, context, QKV, out, &qkv));
    if (out->rank < 1 || out->sizes[out->rank - 1] != width)
        return ort_fail(base, "the last dimension of qkv must be %lld", (long long)width);
    a->count = out->elements / width;
    out->sizes[out->rank - 1] = (int64_t)a->heads * a->value_size;
    ORT_TRY(ort_read(base, context, ROWS, a->count * ATTENTION_ROW, &rows));
    ORT_TRY(ort_read(base, context, POSITIONS, a->count, &positions));
    a->qkv = qkv, a->rows = rows, a->positions = positions;
    return NULL;
}

/* The pool and its tables. */
static OrtStatus *read_cache(const node *op, const OrtKernelContext *context, pass *p) {
    const ort_kernel *base = &op->base;
    attention *a = &p->a;
    ort_shape pool, layout, pages, extras;
    const void *memory, *numbers, *table, *slots;
    ORT_TRY(ort_read_shaped(base, context, POOL, &pool, &memory));
    ORT_TRY(ort_read_shaped(base, context, LAYOUT, &layout, &numbers));
    ORT_TRY(ort_read_shaped(base, context, PAGES, &pages, &table));
    ORT_TRY(ort_read_shaped(base, context, EXTRAS, &extras, &slots));
    if (pages.rank != 2) return ort_fail(base, "pages must have 2 dimensions, not %zu", pages.rank);
    a->pool = (uint8_t *)(uintptr_t)memory; /* the one input that an operator of ours writes */
    a->pages = table, a->columns = pages.sizes[1], a->extras = slots;
    p->bounds.pool = pool.elements, p->bounds.sequences = pages.sizes[0], p->bounds.extras = extras.elements;
    const char *fault = attention_set_layout(a, numbers, layout.elements, op->layer, &p->bounds);
    return fault ? ort_fail(base, "%s", fault) : NULL;
}

static OrtStatus *read_rotation(const node *op, const OrtKernelContext *context, pass *p) {
    const ort_kernel *base = &op->base;
    if (!base->inputs[COS].given) return NULL;
    ort_shape cos, sin;
    const void *cosines, *sines;
    ORT_TRY(ort_read_shaped(base, context, COS, &cos, &cosines));
    ORT_TRY(ort_read_shaped(base, context, SIN, &sin, &sines));
    int64_t half = p->a.rotary / 2;
    if (cos.elements % half || cos.elements != sin.elements || cos.sizes[cos.rank ? cos.rank - 1 : 0] != half)
        return ort_fail(base, "cos and sin must have rows of %lld", (long long)half);
    p->a.cosines = cosines, p->a.sines = sines, p->bounds.positions = cos.elements / half;
    return NULL;
}

/* Elements of an optional input, 0 where it is absent. */
static OrtStatus *read_optional(const node *op, const OrtKernelContext *context, size_t index, int64_t *elements,
                                const float **out) {
    const void *data = NULL;
    ort_shape shape = {0};
    if (op->base.inputs[index].given) ORT_TRY(ort_read_shaped(&op->base, context, index, &shape, &data));
    *elements = shape.elements, *out = data;
    return NULL;
}

static OrtStatus *read_norms(const node *op, const OrtKernelContext *context, pass *p) {
    attention *a = &p->a;
    int64_t q, k, size = a->key_size;
    ORT_TRY(read_optional(op, context, Q_NORM, &q, &a->q_norm));
    ORT_TRY(read_optional(op, context, K_NORM, &k, &a->k_norm));
    if (a->latent && (q || (k && k != a->value_size)))
        return ort_fail(&op->base, "of latent attention there is k_norm alone, of %lld elements", (long long)a->value_size);
    if (a->latent) size = a->value_size;
    int heads_fit = (!q || q == size) && (!k || k == size);
    int whole_fit = (!q || q == a->heads * size) && (!k || k == a->kv_heads * size);
    if (!heads_fit && !whole_fit)
        return ort_fail(&op->base, "q_norm and k_norm must have %lld elements, or %lld and %lld", (long long)size,
                        (long long)(a->heads * size), (long long)(a->kv_heads * size));
    a->norm_whole = !heads_fit;
    if (a->norm_whole && a->norm_after) return ort_fail(&op->base, "norms after the rotation must be of each head");
    const void *sinks;
    ORT_TRY(ort_read(&op->base, context, SINKS, a->heads, &sinks));
    a->sinks = sinks;
    const void *bias;
    ORT_TRY(ort_read(&op->base, context, QKV_BIAS, attention_row_width(a), &bias));
    a->qkv_bias = bias;
    return NULL;
}

static void write_job(void *data, size_t index) {
    const pass *p = data;
    int64_t job = (int64_t)index, rows = p->a.count;
    p->path->write(&p->a, &p->plan, rows * job / p->write_jobs, rows * (job + 1) / p->write_jobs);
}

static void attend_job(void *data, size_t index) {
    const pass *p = data;
    p->path->attend(&p->a, &p->plan, (int64_t)index);
}

static void merge_job(void *data, size_t index) {
    const pass *p = data;
    p->path->merge(&p->a, &p->plan, (int64_t)index);
}

/* Refuses tables that are not right before anything is written. */
static OrtStatus *check(const node *op, const pass *p) {
    char message[ATTENTION_MESSAGE];
    void *memory = scratch_take(attention_check_bytes(&p->a, &p->bounds));
    if (!memory) return ort_fail(&op->base, "out of memory");
    int right = attention_check(&p->a, &p->bounds, memory, message);
    scratch_give(memory);
    return right ? NULL : ort_fail(&op->base, "%s", message);
}

static OrtStatus *run(const node *op, const OrtKernelContext *context, pass *p) {
    const ort_kernel *base = &op->base;
    const attention *a = &p->a;
    p->plan = attention_plan_of(a, ort_jobs(MOST_JOBS, attention_cost(a)));
    void *memory = scratch_take(p->plan.bytes);
    if (!memory) return ort_fail(base, "out of memory for %lld rows", (long long)a->count);
    attention_start(a, &p->plan, memory);
    int64_t width = attention_row_width(a);
    p->path = attention_path_of(base->isa);
    p->write_jobs = ort_jobs(a->count, a->count * width * VALUE_BYTES);
    OrtStatus *status = ort_parallel(base, context, write_job, p->write_jobs, p);
    if (!status) status = ort_parallel(base, context, attend_job, p->plan.jobs, p);
    if (!status && p->plan.merges) status = ort_parallel(base, context, merge_job, p->plan.merges, p);
    scratch_give(memory);
    return status;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const node *op = kernel;
    pass p = {.a = op->sizes};
    ort_shape shape;
    int left_out;
    ORT_TRY(read_rows(op, context, &p, &shape));
    ORT_TRY(ort_left_out(&op->base, context, LAYER_MASK, &left_out));
    if (left_out) return ort_pass_on(&op->base, context, &shape, NULL);
    ORT_TRY(read_cache(op, context, &p));
    ORT_TRY(read_rotation(op, context, &p));
    ORT_TRY(read_norms(op, context, &p));
    ORT_TRY(check(op, &p));
    ORT_TRY(ort_write(&op->base, context, &shape, &p.a.out));
    return p.a.count ? run(op, context, &p) : NULL;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_attention = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "Attention",
    .input_count = 14,
    .inputs =
        {
            {"qkv", ORT_FLOAT, ORT_REQUIRED},
            {"pool", ORT_UINT8, ORT_REQUIRED},
            {"layout", ORT_INT64, ORT_REQUIRED},
            {"pages", ORT_INT32, ORT_REQUIRED},
            {"rows", ORT_INT32, ORT_REQUIRED},
            {"extras", ORT_INT32, ORT_REQUIRED},
            {"position_ids", ORT_INT64, ORT_REQUIRED},
            {"cos", ORT_FLOAT, ORT_OPTIONAL},
            {"sin", ORT_FLOAT, ORT_OPTIONAL},
            {"q_norm", ORT_FLOAT, ORT_OPTIONAL},
            {"k_norm", ORT_FLOAT, ORT_OPTIONAL},
            {"sinks", ORT_FLOAT, ORT_OPTIONAL},
            {"layer_mask", ORT_BOOL, ORT_OPTIONAL},
            {"qkv_bias", ORT_FLOAT, ORT_OPTIONAL},
        },
};
