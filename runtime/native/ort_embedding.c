/* The operator EmbeddingLowBit: rows of a matrix, dequantized; knows nothing of formats.
 *
 * inputs: ids (any shape) int64 | data, low, scales, zeros: the matrix (lowbit.h), for instance that of the LM head.
 * attributes: N, K, bits, block_size, vectors, paired, inline_scales, or kind (ort_support.h); factor of the rows, if any.
 * Output: (ids..., K).
 */
#include <stdlib.h>

#include "gguf.h"
#include "ort_support.h"
#include "values.h"

enum { IDS, DATA };
/* Values that a thread dequantizes in about the time that it takes to read a job's share of a matrix. */
enum { VALUE_BYTES = 64 };

typedef struct {
    ort_kernel base;
    ort_matrix matrix; /* without its bytes */
    float factor;      /* of rows; 0 for none */
    int64_t floats;    /* GGUF's type of rows of 16 bits, else 0 */
} embedding;

typedef struct {
    lowbit_matrix matrix;
    const uint8_t *halves; /* rows of 16 bits, NULL of others */
    int64_t floats;
    const int64_t *ids;
    float *y, factor;
    int64_t count, jobs;
    behind_spans behind;
} lookup;

static OrtStatus *open_embedding(embedding *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    const int64_t kind = ort_int_or_zero(base, info, "kind");
    if (kind != GGUF_F16 && kind != GGUF_BF16) return ort_open_matrix(base, info, &op->matrix);
    op->floats = kind, op->matrix.count = 1;
    ORT_TRY(ort_int(base, info, "N", &op->matrix.n));
    ORT_TRY(ort_int(base, info, "K", &op->matrix.k));
    if (op->matrix.n < 1 || op->matrix.n > MATRIX_MOST || op->matrix.k < 1 || op->matrix.k > MATRIX_MOST)
        return ort_fail(base, "N and K must be between 1 and 2^28");
    return ort_expect(base, DATA, gguf_float_bytes(op->matrix.n, op->matrix.k));
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    embedding *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "EmbeddingLowBit: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_embedding(made, info);
    if (!status && made->matrix.count > 1) status = ort_fail(&made->base, "rows of several types are not looked up");
    if (status) return free(made), status;
    made->factor = ort_float_or_zero(&made->base, info, "factor");
    *kernel = made;
    return NULL;
}

static int64_t tile_of(const lowbit_matrix *w, int64_t row) {
    return w->paired ? row % (w->n / 2) / LOWBIT_GROUP : row / LOWBIT_TILE;
}

static void look_up(const lookup *l, int64_t id, float *y) {
    if (!l->halves) {
        lowbit_row(&l->matrix, id, y);
        return;
    }
    const uint8_t *row = l->halves + id * l->matrix.k * (int64_t)sizeof(uint16_t);
    for (int64_t k = 0; k < l->matrix.k; k++) {
        const uint16_t half = (uint16_t)(row[2 * k] | row[2 * k + 1] << 8);
        y[k] = l->floats == GGUF_F16 ? float_of(half) : lowbit_bfloat16(half);
    }
}

static void lookup_job(void *data, size_t index) {
    const lookup *l = data;
    int64_t job = (int64_t)index;
    for (int64_t i = l->count * job / l->jobs; i < l->count * (job + 1) / l->jobs; i++) {
        const int64_t tile = tile_of(&l->matrix, l->ids[i]);
        float *y = l->y + i * l->matrix.k;
        look_up(l, l->ids[i], y);
        for (int64_t k = 0; l->factor && k < l->matrix.k; k++) y[k] *= l->factor;
        if (!l->halves) ort_drop_tiles(&l->behind, &l->matrix, tile, tile + 1, 0);
    }
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const embedding *op = kernel;
    const ort_kernel *base = &op->base;
    lookup l = {.factor = op->factor, .behind = behind_of_thread()};
    ort_matrix matrix = op->matrix;
    const void *ids;
    ort_shape shape;
    ORT_TRY(ort_read_shaped(base, context, IDS, &shape, &ids));
    if (shape.rank == ORT_MOST_SIZES) return ort_fail(base, "ids has %zu dimensions", shape.rank);
    l.ids = ids, l.count = shape.elements;
    for (int64_t i = 0; i < l.count; i++)
        if (l.ids[i] < 0 || l.ids[i] >= matrix.n)
            return ort_fail(base, "id %lld is outside a matrix of %lld rows", (long long)l.ids[i], (long long)matrix.n);
    if (op->floats) {
        const void *halves;
        ORT_TRY(ort_read(base, context, DATA, gguf_float_bytes(matrix.n, matrix.k), &halves));
        l.halves = halves, l.floats = op->floats, l.matrix.k = matrix.k;
    } else {
        ORT_TRY(ort_read_matrix(base, context, &matrix));
        l.matrix = matrix.of[0];
    }
    shape.sizes[shape.rank++] = l.matrix.k;
    ORT_TRY(ort_write(base, context, &shape, &l.y));
    l.jobs = ort_jobs(l.count, l.count * l.matrix.k * VALUE_BYTES);
    return ort_parallel(base, context, lookup_job, l.jobs, &l);
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_embedding = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "EmbeddingLowBit",
    .input_count = 5,
    .inputs =
        {
            {"ids", ORT_INT64, ORT_REQUIRED},
            {"data", ORT_UINT8, ORT_REQUIRED},
            {"low", ORT_UINT8, ORT_OPTIONAL},
            {"scales", ORT_UINT16, ORT_OPTIONAL},
            {"zeros", ORT_UINT8, ORT_OPTIONAL},
        },
};
