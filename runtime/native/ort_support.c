/* Talking to ONNX Runtime for all operators: inputs, shapes, errors, jobs; knows nothing of products. */
#include "ort_support.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "exports.h"
#include "gguf.h"
#include "matrix.h"

OrtStatus *ort_fail(const ort_kernel *kernel, const char *format, ...) {
    char message[256];
    int start = snprintf(message, sizeof message, "%s: ", kernel->op->name);
    va_list values;
    va_start(values, format);
    vsnprintf(message + start, sizeof message - (size_t)start, format, values);
    va_end(values);
    return kernel->api->CreateStatus(ORT_INVALID_ARGUMENT, message);
}

static OrtStatus *count_elements(const OrtApi *api, const OrtValue *value, int64_t *out) {
    OrtTensorTypeAndShapeInfo *info;
    ORT_TRY(api->GetTensorTypeAndShape(value, &info));
    size_t count;
    OrtStatus *status = api->GetTensorShapeElementCount(info, &count);
    api->ReleaseTensorTypeAndShapeInfo(info);
    *out = (int64_t)count;
    return status;
}

/* The interface has one function for reading and writing; what we read stays as it is. */
static OrtStatus *data_of(const OrtApi *api, const OrtValue *value, const void **out) {
    void *data;
    ORT_TRY(api->GetTensorMutableData((OrtValue *)(uintptr_t)value, &data));
    *out = data;
    return NULL;
}

static OrtStatus *open_input(ort_kernel *kernel, const OrtKernelInfo *info, size_t index) {
    const OrtApi *api = kernel->api;
    ort_input *input = &kernel->inputs[index];
    size_t letters = 0;
    /* An absent input before a given one has the empty name, of which only the final zero is copied. */
    ORT_TRY(api->KernelInfo_GetInputName(info, index, NULL, &letters));
    input->given = letters > 1;
    if (!input->given) return NULL;
    int constant = 0;
    const OrtValue *value = NULL;
    ORT_TRY(api->KernelInfoGetConstantInput_tensor(info, index, &constant, &value));
    if (!constant || !value) return NULL;
    ORT_TRY(count_elements(api, value, &input->elements));
    return data_of(api, value, &input->data);
}

OrtStatus *ort_open(ort_kernel *kernel, const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info) {
    *kernel = (ort_kernel){api, (const ort_operator *)op, lowbit_selected(), 0, {{0, 0, NULL}}};
    kernel->part = ort_int_or_zero(kernel, info, "part");
    size_t count;
    ORT_TRY(api->KernelInfo_GetInputCount(info, &count));
    for (size_t i = 0; i < count && i < kernel->op->input_count; i++) ORT_TRY(open_input(kernel, info, i));
    return NULL;
}

OrtStatus *ort_int(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name, int64_t *out) {
    OrtStatus *status = kernel->api->KernelInfoGetAttribute_int64(info, name, out);
    if (!status) return NULL;
    kernel->api->ReleaseStatus(status);
    return ort_fail(kernel, "the attribute %s is missing", name);
}

int64_t ort_int_or_zero(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name) {
    int64_t value = 0;
    OrtStatus *status = kernel->api->KernelInfoGetAttribute_int64(info, name, &value);
    if (status) kernel->api->ReleaseStatus(status);
    return status ? 0 : value;
}

float ort_float_or_zero(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name) {
    float value = 0;
    OrtStatus *status = kernel->api->KernelInfoGetAttribute_float(info, name, &value);
    if (status) kernel->api->ReleaseStatus(status);
    return status ? 0 : value;
}

OrtStatus *ort_flag(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name, int32_t *out) {
    int64_t value = ort_int_or_zero(kernel, info, name);
    *out = value != 0;
    return value == 0 || value == 1 ? NULL : ort_fail(kernel, "%s must be 0 or 1", name);
}

OrtStatus *ort_heads(const ort_kernel *kernel, const OrtKernelInfo *info, int64_t n, int64_t *out) {
    const int64_t heads = ort_int_or_zero(kernel, info, "heads");
    *out = heads ? heads : 1;
    return *out > 0 && n % *out == 0 ? NULL : ort_fail(kernel, "heads must divide N");
}

static OrtStatus *check_elements(const ort_kernel *kernel, size_t index, int64_t elements, int64_t wanted) {
    if (elements == wanted) return NULL;
    return ort_fail(kernel, "%s has %lld elements instead of %lld", kernel->op->inputs[index].name,
                    (long long)elements, (long long)wanted);
}

OrtStatus *ort_expect(const ort_kernel *kernel, size_t index, int64_t elements) {
    const ort_input *input = &kernel->inputs[index];
    return input->data ? check_elements(kernel, index, input->elements, elements) : NULL;
}

OrtStatus *ort_read(const ort_kernel *kernel, const OrtKernelContext *context, size_t index, int64_t elements,
                    const void **out) {
    const ort_input *input = &kernel->inputs[index];
    *out = input->data;
    if (!input->given || input->data) return NULL;
    const OrtValue *value;
    ORT_TRY(kernel->api->KernelContext_GetInput(context, index, &value));
    if (!value) return ort_fail(kernel, "%s has no value", kernel->op->inputs[index].name);
    int64_t count;
    ORT_TRY(count_elements(kernel->api, value, &count));
    ORT_TRY(check_elements(kernel, index, count, elements));
    return data_of(kernel->api, value, out);
}

static OrtStatus *read_sizes(const ort_kernel *kernel, const OrtTensorTypeAndShapeInfo *info, ort_shape *shape) {
    ORT_TRY(kernel->api->GetDimensionsCount(info, &shape->rank));
    if (shape->rank > ORT_MOST_SIZES) return ort_fail(kernel, "an input has %zu dimensions", shape->rank);
    ORT_TRY(kernel->api->GetDimensions(info, shape->sizes, shape->rank));
    shape->elements = 1;
    for (size_t i = 0; i < shape->rank; i++) shape->elements *= shape->sizes[i];
    return NULL;
}

OrtStatus *ort_read_shaped(const ort_kernel *kernel, const OrtKernelContext *context, size_t index, ort_shape *shape,
                           const void **out) {
    const OrtApi *api = kernel->api;
    const OrtValue *value;
    ORT_TRY(api->KernelContext_GetInput(context, index, &value));
    if (!value) return ort_fail(kernel, "%s has no value", kernel->op->inputs[index].name);
    OrtTensorTypeAndShapeInfo *info;
    ORT_TRY(api->GetTensorTypeAndShape(value, &info));
    OrtStatus *status = read_sizes(kernel, info, shape);
    api->ReleaseTensorTypeAndShapeInfo(info);
    return status ? status : data_of(api, value, out);
}

OrtStatus *ort_write(const ort_kernel *kernel, OrtKernelContext *context, const ort_shape *shape, float **out) {
    OrtValue *value;
    ORT_TRY(kernel->api->KernelContext_GetOutput(context, 0, shape->sizes, shape->rank, &value));
    void *data;
    ORT_TRY(kernel->api->GetTensorMutableData(value, &data));
    *out = data;
    return NULL;
}

OrtStatus *ort_left_out(const ort_kernel *kernel, const OrtKernelContext *context, size_t index, int *out) {
    *out = 0;
    if (!kernel->inputs[index].given) return NULL;
    ort_shape shape;
    const void *mask = NULL;
    ORT_TRY(ort_read_shaped(kernel, context, index, &shape, &mask));
    if (kernel->part < 0 || kernel->part >= shape.elements)
        return ort_fail(kernel, "layer_mask has no part %lld", (long long)kernel->part);
    *out = !((const uint8_t *)mask)[kernel->part];
    return NULL;
}

OrtStatus *ort_pass_on(const ort_kernel *kernel, OrtKernelContext *context, const ort_shape *shape,
                       const float *residual) {
    size_t elements = 1;
    for (size_t i = 0; i < shape->rank; i++) elements *= (size_t)shape->sizes[i];
    float *y;
    ORT_TRY(ort_write(kernel, context, shape, &y));
    if (residual)
        memcpy(y, residual, elements * sizeof *y);
    else
        memset(y, 0, elements * sizeof *y);
    return NULL;
}

enum { DATA = 1, LOW, SCALES, ZEROS };

static int64_t segments_bytes(const ort_matrix *m) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < m->count; i++) bytes += gguf_bytes(&m->of[i]);
    return bytes;
}

/* The rows of GGUF types that the attributes name. */
static OrtStatus *open_segments(const ort_kernel *kernel, const OrtKernelInfo *info, int32_t paired, ort_matrix *m) {
    static const char *const names[ORT_MOST_SEGMENTS][2] = {{"kind", "rows"}, {"kind_1", "rows_1"}, {"kind_2", "rows_2"}};
    if (m->n < 1 || m->n > MATRIX_MOST) return ort_fail(kernel, "N and K must be between 1 and 2^28");
    int64_t left = m->n;
    for (m->count = 0; left && m->count < ORT_MOST_SEGMENTS; m->count++) {
        const int64_t number = ort_int_or_zero(kernel, info, names[m->count][0]);
        const int64_t rows = ort_int_or_zero(kernel, info, names[m->count][1]), n = rows ? rows : left;
        const gguf_type *type = gguf_find(number);
        if (!type) return ort_fail(kernel, "the GGUF type %lld is not known", (long long)number);
        if (n < 1 || n > left) return ort_fail(kernel, "rows must be from 1 to those that are left of N");
        m->of[m->count] = gguf_matrix(type, n, m->k, paired);
        const char *fault = matrix_fault(&m->of[m->count]);
        if (fault) return ort_fail(kernel, "%s", fault);
        left -= n;
    }
    if (left) return ort_fail(kernel, "%lld rows are of no type", (long long)left);
    if (paired && m->count > 1) return ort_fail(kernel, "a paired matrix has rows of one type");
    if (kernel->inputs[LOW].given || kernel->inputs[SCALES].given || kernel->inputs[ZEROS].given)
        return ort_fail(kernel, "a matrix of GGUF types has no input but data");
    return ort_expect(kernel, DATA, segments_bytes(m));
}

OrtStatus *ort_open_matrix(const ort_kernel *kernel, const OrtKernelInfo *info, ort_matrix *whole) {
    int64_t bits, block;
    lowbit_matrix *matrix = &whole->of[0];
    *whole = (ort_matrix){.count = 1};
    ORT_TRY(ort_int(kernel, info, "N", &whole->n));
    ORT_TRY(ort_int(kernel, info, "K", &whole->k));
    if (ort_int_or_zero(kernel, info, "kind")) {
        ORT_TRY(ort_flag(kernel, info, "paired", &matrix->paired));
        return open_segments(kernel, info, matrix->paired, whole);
    }
    matrix->n = whole->n, matrix->k = whole->k;
    ORT_TRY(ort_int(kernel, info, "bits", &bits));
    ORT_TRY(ort_int(kernel, info, "block_size", &block));
    ORT_TRY(ort_flag(kernel, info, "paired", &matrix->paired));
    ORT_TRY(ort_flag(kernel, info, "inline_scales", &matrix->inline_scales));
    ORT_TRY(ort_flag(kernel, info, "vectors", &matrix->vectors));
    matrix->bits = (int32_t)(bits == (int32_t)bits ? bits : 0);
    matrix->block = (int32_t)(block == (int32_t)block ? block : 0);
    const char *fault = matrix_fault(matrix);
    if (fault) return ort_fail(kernel, "%s", fault);
    if (kernel->inputs[LOW].given != (matrix->bits == 8))
        return ort_fail(kernel, "matrices of 8 bits have a low plane, no others");
    if (matrix->vectors && kernel->inputs[ZEROS].given) return ort_fail(kernel, "vectors have no zero points");
    if (kernel->inputs[SCALES].given == matrix->inline_scales)
        return ort_fail(kernel, "a matrix has either inline scales or the input scales");
    ORT_TRY(ort_expect(kernel, DATA, matrix_data(matrix)));
    ORT_TRY(ort_expect(kernel, LOW, matrix_plane(matrix)));
    ORT_TRY(ort_expect(kernel, SCALES, matrix_scales(matrix)));
    return ort_expect(kernel, ZEROS, matrix_scales(matrix));
}

/* Whether the rows are of GGUF types. */
static int has_segments(const ort_matrix *m) { return m->of[0].kind || m->of[0].float16; }

OrtStatus *ort_read_matrix(const ort_kernel *kernel, const OrtKernelContext *context, ort_matrix *whole) {
    const void *data, *low, *scales, *zeros;
    lowbit_matrix *matrix = &whole->of[0];
    if (has_segments(whole)) {
        ORT_TRY(ort_read(kernel, context, DATA, segments_bytes(whole), &data));
        const uint8_t *bytes = data;
        for (int32_t i = 0; i < whole->count; i++) {
            whole->of[i] = gguf_place(whole->of[i], bytes);
            bytes += gguf_bytes(&whole->of[i]);
        }
        return NULL;
    }
    ORT_TRY(ort_read(kernel, context, DATA, matrix_data(matrix), &data));
    ORT_TRY(ort_read(kernel, context, LOW, matrix_plane(matrix), &low));
    ORT_TRY(ort_read(kernel, context, SCALES, matrix_scales(matrix), &scales));
    ORT_TRY(ort_read(kernel, context, ZEROS, matrix_scales(matrix), &zeros));
    matrix->data = data, matrix->low = low, matrix->scales = scales, matrix->zeros = zeros;
    if (matrix->inline_scales) {
        matrix->scales = data;
        matrix->data += LOWBIT_TILE * sizeof(uint16_t);
    }
    return NULL;
}

void ort_drop_tiles(const behind_spans *behind, const lowbit_matrix *w, int64_t first, int64_t last, int goes_on) {
    if (!behind->count) return;
    const int64_t blocks = lowbit_blocks(w->k, w->block), start = first * blocks, count = (last - first) * blocks;
    behind_drop(behind, w->data + first * lowbit_tile_bytes(w), (last - first) * lowbit_tile_bytes(w), goes_on);
    if (w->low) behind_drop(behind, w->low + start * lowbit_step(w), count * lowbit_step(w), goes_on);
    const int64_t tile_scales = LOWBIT_TILE * (int64_t)sizeof *w->scales;
    if (!w->kind && !w->inline_scales) behind_drop(behind, w->scales + start * LOWBIT_TILE, count * tile_scales, goes_on);
    if (w->zeros) behind_drop(behind, w->zeros + start * LOWBIT_TILE, count * LOWBIT_TILE, goes_on);
}

/* A job must outweigh being handed to a thread, about a microsecond; more jobs than MOST balance nothing better. */
enum { JOB_BYTES = 32 * 1024, INLINE_BYTES = 2 * JOB_BYTES, MOST_JOBS = 64 };

int64_t ort_jobs(int64_t pieces, int64_t bytes) {
    if (bytes < INLINE_BYTES) return 1;
    int64_t jobs = bytes / JOB_BYTES;
    jobs = jobs < MOST_JOBS ? jobs : MOST_JOBS;
    return jobs < pieces ? jobs : pieces;
}

OrtStatus *ort_parallel(const ort_kernel *kernel, const OrtKernelContext *context, ort_job job, int64_t count,
                        void *data) {
    if (count > 1) return kernel->api->KernelContext_ParallelFor(context, job, (size_t)count, 0, data);
    job(data, 0);
    return NULL;
}

const char *ORT_CALL ort_op_name(const OrtCustomOp *op) { return ((const ort_operator *)op)->name; }

/* None: the CPU's. */
const char *ORT_CALL ort_op_provider(const OrtCustomOp *op) {
    (void)op;
    return NULL;
}

int ORT_CALL ort_op_input_type(const OrtCustomOp *op, size_t index) {
    return ((const ort_operator *)op)->inputs[index].type;
}

size_t ORT_CALL ort_op_input_count(const OrtCustomOp *op) { return ((const ort_operator *)op)->input_count; }

int ORT_CALL ort_op_input_characteristic(const OrtCustomOp *op, size_t index) {
    return ((const ort_operator *)op)->inputs[index].characteristic;
}

int ORT_CALL ort_op_output_type(const OrtCustomOp *op, size_t index) {
    (void)op, (void)index;
    return ORT_FLOAT;
}

size_t ORT_CALL ort_op_output_count(const OrtCustomOp *op) {
    (void)op;
    return 1;
}

int ORT_CALL ort_op_zero_at(const OrtCustomOp *op, size_t index) {
    (void)op, (void)index;
    return 0;
}

int ORT_CALL ort_op_one(const OrtCustomOp *op) {
    (void)op;
    return 1;
}
