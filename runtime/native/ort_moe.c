/* The operator MoELowBit: a mixture of experts whose router has chosen; knows nothing of formats or routing.
 *
 * inputs: X (..., D) float | expert_ids (..., k) int64 | expert_weights (..., k) float | experts: the bytes of all
 * experts | directory (E, 13) int64 | residual, shaped as X, is added last | planes: of experts of 8 bits 1 reads the
 * high plane alone, 2 both | biases of gate_up (E, 2 F), or of up (E, F), and of down (E, D). attributes: D, ungated,
 * clamped, squared, gelu. Output: as X.
 * A row of the directory: F | bits (-4 for codes of E2M1, -2 for vectors, -100 - t for GGUF's type t), block, data, low, scales, zeros of gate_up, paired (2 F, D),
 * or of up (F, D) where experts are not gated | the same of down (D, F). data to zeros are offsets into the bytes, even
 * for scales; -1 where a matrix has no low plane or zero points.
 * An expert is down(silu(gate(x)) * up(x)), or down(silu(up(x))), or with gpt-oss's clamped SwiGLU, or with squared ReLU
 * in the place of silu where it is not gated, or with GELU by tanh where it is. A token's results are added in the order of its k
 * slots, each times its weight, so a row does not depend on the others. A slot whose weight is zero is skipped, whatever
 * its id. Bytes of experts that nobody chose are not touched.
 */
#include <stdlib.h>
#include <string.h>

#include "gguf.h"
#include "ort_support.h"
#include "scratch.h"

enum { X, EXPERT_IDS, EXPERT_WEIGHTS, EXPERTS, DIRECTORY, RESIDUAL, PLANES, UP_BIAS, DOWN_BIAS };
enum { COLUMNS = 13, GATE_UP = 1, DOWN = 7 };
/* Bits of a GGUF type, less its number. */
enum { KIND_BITS = -100 };
/* Work in units of bytes read, as in ort_linear.c. */
enum { VALUE_BYTES = 8, FREE_ROWS = 8 };

typedef struct {
    ort_kernel base;
    int64_t width; /* D */
    int32_t ungated, clamped, squared, gelu;
} moe;

/* The pairs of a token and a slot that chose the same expert: rows first..first+m-1 of all rows in that order. */
typedef struct {
    int64_t first, m;
    lowbit_matrix gate_up, down;
    lowbit_rows in, mid;
    const float *up_bias, *down_bias; /* or NULL */
    float *hidden;                    /* (m, F) */
} group;

typedef struct {
    const lowbit_isa *isa;
    const float *x, *weights, *residual;
    const int64_t *ids;
    float *y;
    int64_t tokens, slots, pairs, rows, width; /* rows: pairs that are computed */
    int64_t *pair_of, *row_of, *group_of;      /* pair of a row, row of a pair or -1, group of a row */
    group *groups;
    int64_t group_count;
    int32_t swiglu; /* of lowbit_output */
    float *results; /* (rows, D) */
    int64_t jobs;   /* of the step that runs */
} mixture;

static OrtStatus *read_part(const ort_kernel *base, const int64_t *offset, int64_t bytes, int64_t size, int64_t expert) {
    if (*offset >= 0 && bytes <= size && *offset <= size - bytes) return NULL;
    return ort_fail(base, "a matrix of expert %lld lies outside the %lld bytes of all experts", (long long)expert,
                    (long long)size);
}

/* The matrix of a GGUF type, whose parts lie together. */
static OrtStatus *read_blocks(const ort_kernel *base, const int64_t *row, int64_t expert, const uint8_t *bytes,
                              int64_t size, lowbit_matrix *w) {
    const gguf_type *type = gguf_find(KIND_BITS - row[0]);
    if (!type) return ort_fail(base, "expert %lld is of an unknown type", (long long)expert);
    *w = gguf_matrix(type, w->n, w->k, w->paired);
    const char *fault = matrix_fault(w);
    if (fault) return ort_fail(base, "expert %lld: %s", (long long)expert, fault);
    if (row[2] % 2) return ort_fail(base, "expert %lld has parts that do not fit its bits", (long long)expert);
    ORT_TRY(read_part(base, &row[2], gguf_bytes(w), size, expert));
    *w = gguf_place(*w, bytes + row[2]);
    return NULL;
}

/* The matrix that six columns of the directory describe. */
static OrtStatus *read_matrix(const ort_kernel *base, const int64_t *row, int64_t expert, const uint8_t *bytes,
                              int64_t size, lowbit_matrix *w) {
    int64_t data = row[2], low = row[3], scales = row[4], zeros = row[5];
    if (row[0] < KIND_BITS) return read_blocks(base, row, expert, bytes, size, w);
    w->e2m1 = row[0] == -4, w->vectors = row[0] == -2;
    w->bits = w->e2m1 ? 4 : w->vectors ? 2 : (int32_t)(row[0] == (int32_t)row[0] ? row[0] : 0);
    w->block = (int32_t)(row[1] == (int32_t)row[1] ? row[1] : 0);
    const char *fault = matrix_fault(w);
    if (fault) return ort_fail(base, "expert %lld: %s", (long long)expert, fault);
    if ((low >= 0) != (w->bits == 8) || scales % 2 != 0 || (w->vectors && zeros >= 0))
        return ort_fail(base, "expert %lld has parts that do not fit its bits", (long long)expert);
    ORT_TRY(read_part(base, &data, matrix_plane(w), size, expert));
    ORT_TRY(read_part(base, &scales, matrix_scales(w) * 2, size, expert));
    if (low >= 0) ORT_TRY(read_part(base, &low, matrix_plane(w), size, expert));
    if (zeros >= 0) ORT_TRY(read_part(base, &zeros, matrix_scales(w), size, expert));
    w->data = bytes + data;
    w->low = low >= 0 ? bytes + low : NULL;
    w->scales = (const uint16_t *)(const void *)(bytes + scales);
    w->zeros = zeros >= 0 ? bytes + zeros : NULL;
    return NULL;
}

static OrtStatus *read_expert(const moe *op, const int64_t *directory, int64_t expert, const uint8_t *bytes,
                              int64_t size, lowbit_matrix *gate_up, lowbit_matrix *down) {
    const int64_t *row = directory + expert * COLUMNS;
    int64_t inner = row[0];
    if (inner < 1 || inner > MATRIX_MOST / 2)
        return ort_fail(&op->base, "expert %lld has a width of %lld", (long long)expert, (long long)inner);
    *gate_up = (lowbit_matrix){.n = op->ungated ? inner : 2 * inner, .k = op->width, .paired = !op->ungated};
    *down = (lowbit_matrix){.n = op->width, .k = inner};
    ORT_TRY(read_matrix(&op->base, row + GATE_UP, expert, bytes, size, gate_up));
    return read_matrix(&op->base, row + DOWN, expert, bytes, size, down);
}

static OrtStatus *open_moe(moe *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    const ort_input *experts = &base->inputs[EXPERTS], *directory = &base->inputs[DIRECTORY];
    ORT_TRY(ort_int(base, info, "D", &op->width));
    ORT_TRY(ort_flag(base, info, "ungated", &op->ungated));
    ORT_TRY(ort_flag(base, info, "clamped", &op->clamped));
    ORT_TRY(ort_flag(base, info, "squared", &op->squared));
    ORT_TRY(ort_flag(base, info, "gelu", &op->gelu));
    if (op->gelu && (op->ungated || op->clamped)) return ort_fail(base, "experts with gelu are gated, and not clamped");
    if (op->clamped && op->ungated) return ort_fail(base, "clamped experts are gated");
    if (op->squared && !op->ungated) return ort_fail(base, "squared experts are not gated");
    ORT_TRY(ort_expect(base, PLANES, 1));
    if (op->width < 1 || op->width > MATRIX_MOST) return ort_fail(base, "D must be between 1 and 2^28");
    if (!experts->data || !directory->data) return NULL;
    if (directory->elements % COLUMNS) return ort_fail(base, "directory must have %d columns", COLUMNS);
    lowbit_matrix gate_up, down;
    for (int64_t e = 0; e < directory->elements / COLUMNS; e++)
        ORT_TRY(read_expert(op, directory->data, e, experts->data, experts->elements, &gate_up, &down));
    return NULL;
}

static OrtStatus *ORT_CALL create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    moe *made = calloc(1, sizeof *made);
    if (!made) return api->CreateStatus(ORT_FAIL, "MoELowBit: out of memory");
    OrtStatus *status = ort_open(&made->base, op, api, info);
    if (!status) status = open_moe(made, info);
    if (status) return free(made), status;
    *kernel = made;
    return NULL;
}

static void quantize_row(const lowbit_isa *isa, const float *x, const lowbit_rows *rows, int64_t row) {
    lowbit_rows one = *rows;
    one.values += row * one.block, one.scales += row, one.sums += row;
    if (one.halves) one.halves += row;
    isa->quantize(&(lowbit_input){x, NULL, 0}, &one, 0, 1);
}

static void quantize_in_job(void *data, size_t index) {
    const mixture *m = data;
    int64_t job = (int64_t)index;
    for (int64_t row = m->rows * job / m->jobs; row < m->rows * (job + 1) / m->jobs; row++) {
        const group *g = &m->groups[m->group_of[row]];
        quantize_row(m->isa, m->x + m->pair_of[row] / m->slots * m->width, &g->in, row - g->first);
    }
}

static void quantize_mid_job(void *data, size_t index) {
    const mixture *m = data;
    int64_t job = (int64_t)index;
    for (int64_t row = m->rows * job / m->jobs; row < m->rows * (job + 1) / m->jobs; row++) {
        const group *g = &m->groups[m->group_of[row]];
        quantize_row(m->isa, g->hidden + (row - g->first) * g->down.k, &g->mid, row - g->first);
    }
}

/* One job's share of the tiles of all groups' gate_up or down. */
static void multiply_share(const mixture *m, int64_t job, int down) {
    int64_t total = 0, start = 0;
    for (int64_t i = 0; i < m->group_count; i++) {
        total += lowbit_tiles(down ? &m->groups[i].down : &m->groups[i].gate_up);
    }
    int64_t first = total * job / m->jobs, last = total * (job + 1) / m->jobs;
    for (int64_t i = 0; i < m->group_count && start < last; i++) {
        const group *g = &m->groups[i];
        const lowbit_matrix *w = down ? &g->down : &g->gate_up;
        int64_t tiles = lowbit_tiles(w);
        int64_t from = first > start ? first - start : 0, to = last - start < tiles ? last - start : tiles;
        lowbit_output out = {.y = down ? m->results + g->first * m->width : g->hidden,
                             .bias = down ? g->down_bias : g->up_bias,
                             .swiglu = down ? 0 : m->swiglu};
        if (from < to) m->isa->multiply(w, down ? &g->mid : &g->in, &out, from, to);
        start += tiles;
    }
}

static void gate_up_job(void *data, size_t index) { multiply_share(data, (int64_t)index, 0); }
static void down_job(void *data, size_t index) { multiply_share(data, (int64_t)index, 1); }

static void combine_job(void *data, size_t index) {
    const mixture *m = data;
    int64_t job = (int64_t)index, width = m->width;
    for (int64_t t = m->tokens * job / m->jobs; t < m->tokens * (job + 1) / m->jobs; t++) {
        float *y = m->y + t * width;
        memset(y, 0, (size_t)width * sizeof(float));
        for (int64_t pair = t * m->slots; pair < (t + 1) * m->slots; pair++) {
            if (m->row_of[pair] < 0) continue;
            const float *result = m->results + m->row_of[pair] * width;
            for (int64_t i = 0; i < width; i++) y[i] += m->weights[pair] * result[i];
        }
        if (m->residual)
            for (int64_t i = 0; i < width; i++) y[i] += m->residual[t * width + i];
    }
}

/* Sorts the pairs whose weight is not zero by expert, in the order of the experts, and makes a group of each expert that
 * was chosen. `starts` has room for a number per expert and one more, all zero. */
static void make_groups(mixture *m, int64_t experts, int64_t *starts, int64_t *chosen) {
    for (int64_t p = 0; p < m->pairs; p++)
        if (m->weights[p] != 0) starts[m->ids[p] + 1]++;
    for (int64_t e = 0; e < experts; e++) {
        if (starts[e + 1]) {
            chosen[m->group_count] = e;
            m->groups[m->group_count++] = (group){.first = starts[e], .m = starts[e + 1]};
        }
        starts[e + 1] += starts[e];
    }
    m->rows = starts[experts];
    for (int64_t p = 0; p < m->pairs; p++) {
        m->row_of[p] = -1;
        if (m->weights[p] == 0) continue;
        int64_t row = starts[m->ids[p]]++;
        m->pair_of[row] = p;
        m->row_of[p] = row;
    }
    for (int64_t i = 0; i < m->group_count; i++)
        for (int64_t r = 0; r < m->groups[i].m; r++) m->group_of[m->groups[i].first + r] = i;
}

/* Lays out the groups' working memory from `memory` on; returns its size. Without memory only the size is meant. */
static size_t place_groups(mixture *m, char *memory) {
    size_t used = (size_t)(m->rows * m->width) * sizeof(float);
    m->results = (float *)(void *)memory;
    for (int64_t i = 0; i < m->group_count; i++) {
        group *g = &m->groups[i];
        const lowbit_matrix *up = &g->gate_up, *down = &g->down;
        size_t in = scratch_rows_bytes(g->m, up->k, up->block), mid = scratch_rows_bytes(g->m, down->k, down->block);
        used = (used + 63) / 64 * 64;
        if (memory) {
            g->in = scratch_rows(memory + used, g->m, up->k, up->block);
            g->mid = scratch_rows(memory + used + in, g->m, down->k, down->block);
            g->hidden = (float *)(void *)(memory + used + in + mid);
        }
        used += in + mid + (size_t)(g->m * down->k) * sizeof(float);
    }
    return used;
}

static int64_t step_jobs(const mixture *m, int down) {
    int64_t tiles = 0, bytes = 0;
    for (int64_t i = 0; i < m->group_count; i++) {
        const lowbit_matrix *w = down ? &m->groups[i].down : &m->groups[i].gate_up;
        tiles += lowbit_tiles(w);
        bytes += lowbit_tiles(w) * matrix_tile_bytes(w) * (1 + m->groups[i].m / FREE_ROWS);
    }
    return ort_jobs(tiles, bytes);
}

static OrtStatus *run_steps(const moe *op, const OrtKernelContext *context, mixture *m) {
    int64_t inner = 0;
    for (int64_t i = 0; i < m->group_count; i++) inner += m->groups[i].m * m->groups[i].down.k;
    const struct {
        ort_job job;
        int64_t count;
    } steps[] = {
        {quantize_in_job, ort_jobs(m->rows, m->rows * m->width * VALUE_BYTES)},
        {gate_up_job, step_jobs(m, 0)},
        {quantize_mid_job, ort_jobs(m->rows, inner * VALUE_BYTES)},
        {down_job, step_jobs(m, 1)},
        {combine_job, ort_jobs(m->tokens, (m->tokens + m->rows) * m->width * VALUE_BYTES)},
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        m->jobs = steps[i].count;
        ORT_TRY(ort_parallel(&op->base, context, steps[i].job, m->jobs, m));
    }
    return NULL;
}

/* A chosen expert's part of the biases, which hold as many for each expert. */
static OrtStatus *read_biases(const moe *op, const OrtKernelContext *context, int64_t experts, int64_t expert,
                              group *g) {
    const void *up, *down;
    ORT_TRY(ort_expect(&op->base, UP_BIAS, experts * g->gate_up.n));
    ORT_TRY(ort_expect(&op->base, DOWN_BIAS, experts * g->down.n));
    ORT_TRY(ort_read(&op->base, context, UP_BIAS, experts * g->gate_up.n, &up));
    ORT_TRY(ort_read(&op->base, context, DOWN_BIAS, experts * g->down.n, &down));
    g->up_bias = up ? (const float *)up + expert * g->gate_up.n : NULL;
    g->down_bias = down ? (const float *)down + expert * g->down.n : NULL;
    return NULL;
}

/* Everything after the inputs are read. */
static OrtStatus *mix(const moe *op, const OrtKernelContext *context, mixture *m, const int64_t *directory,
                      int64_t experts, const uint8_t *bytes, int64_t size, int planes) {
    int64_t most = m->pairs < experts ? m->pairs : experts;
    size_t numbers = (size_t)(3 * m->pairs + experts + 1 + most);
    char *memory = NULL, *index = calloc(1, numbers * sizeof(int64_t) + (size_t)most * sizeof(group));
    if (!index) return ort_fail(&op->base, "out of memory for %lld experts", (long long)experts);
    m->groups = (group *)(void *)index;
    m->pair_of = (int64_t *)(void *)(index + (size_t)most * sizeof(group));
    m->row_of = m->pair_of + m->pairs, m->group_of = m->row_of + m->pairs;
    int64_t *chosen = m->group_of + m->pairs;
    make_groups(m, experts, chosen + most, chosen);
    OrtStatus *status = NULL;
    for (int64_t i = 0; i < m->group_count && !status; i++) {
        status = read_expert(op, directory, chosen[i], bytes, size, &m->groups[i].gate_up, &m->groups[i].down);
        if (!status) status = read_biases(op, context, experts, chosen[i], &m->groups[i]);
        if (planes == 1) m->groups[i].gate_up.low = m->groups[i].down.low = NULL;
    }
    if (!status) {
        memory = scratch_take(place_groups(m, NULL));
        if (!memory) status = ort_fail(&op->base, "out of memory for %lld rows", (long long)m->rows);
    }
    if (!status) {
        place_groups(m, memory);
        status = run_steps(op, context, m);
    }
    scratch_give(memory);
    free(index);
    return status;
}

static OrtStatus *ORT_CALL compute(void *kernel, OrtKernelContext *context) {
    const moe *op = kernel;
    const ort_kernel *base = &op->base;
    mixture m = {.isa = base->isa, .width = op->width, .swiglu = op->gelu ? 4 : op->squared ? 3 : op->clamped ? 2 : 1};
    const void *x, *ids, *weights, *bytes, *directory, *residual, *planes;
    ort_shape shape, choices, blob, rows;
    ORT_TRY(ort_read_shaped(base, context, X, &shape, &x));
    ORT_TRY(ort_read_shaped(base, context, EXPERT_IDS, &choices, &ids));
    ORT_TRY(ort_read_shaped(base, context, EXPERTS, &blob, &bytes));
    ORT_TRY(ort_read_shaped(base, context, DIRECTORY, &rows, &directory));
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != m.width)
        return ort_fail(base, "the last dimension of X must be D = %lld", (long long)m.width);
    if (rows.elements % COLUMNS) return ort_fail(base, "directory must have %d columns", COLUMNS);
    int64_t experts = rows.elements / COLUMNS;
    m.tokens = shape.elements / m.width, m.pairs = choices.elements;
    m.slots = m.tokens ? m.pairs / m.tokens : 0;
    if (m.slots * m.tokens != m.pairs || (m.tokens && !m.slots))
        return ort_fail(base, "%lld expert ids do not fit %lld tokens", (long long)m.pairs, (long long)m.tokens);
    ORT_TRY(ort_read(base, context, EXPERT_WEIGHTS, m.pairs, &weights));
    ORT_TRY(ort_read(base, context, RESIDUAL, shape.elements, &residual));
    ORT_TRY(ort_read(base, context, PLANES, 1, &planes));
    m.x = x, m.ids = ids, m.weights = weights, m.residual = residual;
    for (int64_t p = 0; p < m.pairs; p++)
        if (m.weights[p] != 0 && (m.ids[p] < 0 || m.ids[p] >= experts))
            return ort_fail(base, "expert id %lld is outside %lld experts", (long long)m.ids[p], (long long)experts);
    int32_t count = planes ? *(const int32_t *)planes : 2;
    if (count != 1 && count != 2) return ort_fail(base, "planes must be 1 or 2, not %d", (int)count);
    ORT_TRY(ort_write(base, context, &shape, &m.y));
    return m.tokens ? mix(op, context, &m, directory, experts, bytes, blob.elements, count) : NULL;
}

static void ORT_CALL destroy(void *kernel) { free(kernel); }

const ort_operator ort_moe = {
    .base = ORT_BASE(create, compute, destroy),
    .name = "MoELowBit",
    .input_count = 9,
    .inputs =
        {
            {"X", ORT_FLOAT, ORT_REQUIRED},
            {"expert_ids", ORT_INT64, ORT_REQUIRED},
            {"expert_weights", ORT_FLOAT, ORT_REQUIRED},
            {"experts", ORT_UINT8, ORT_REQUIRED},
            {"directory", ORT_INT64, ORT_REQUIRED},
            {"residual", ORT_FLOAT, ORT_OPTIONAL},
            {"planes", ORT_INT32, ORT_OPTIONAL},
            {"up_bias", ORT_FLOAT, ORT_OPTIONAL},
            {"down_bias", ORT_FLOAT, ORT_OPTIONAL},
        },
};
