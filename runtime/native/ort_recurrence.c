/* What the operators of recurrences share: their first inputs, working memory, the pass itself; knows nothing of kinds. */
#include "ort_recurrence.h"

#include <math.h>
#include <string.h>

#include "arithmetic.inc.h"
#include "scratch.h"

enum { MOST_HEADS = 1 << 12, MOST_SIZE = 1 << 12, MOST_CHANNELS = 1 << 20, HEADER = 64 };

static int64_t rounded(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

OrtStatus *recurrence_open(recurrence_node *op, const OrtKernelInfo *info) {
    const ort_kernel *base = &op->base;
    recurrence *r = &op->sizes;
    int64_t heads, key_heads, key_size, value_size;
    ORT_TRY(ort_int(base, info, "heads", &heads));
    ORT_TRY(ort_int(base, info, "key_heads", &key_heads));
    ORT_TRY(ort_int(base, info, "key_size", &key_size));
    ORT_TRY(ort_int(base, info, "value_size", &value_size));
    ORT_TRY(ort_int(base, info, "channels", &r->channels));
    ORT_TRY(ort_int(base, info, "width", &r->width));
    ORT_TRY(ort_int(base, info, "layer", &op->layer));
    if (heads < 1 || heads > MOST_HEADS || key_heads < 1 || heads % key_heads)
        return ort_fail(base, "heads must be at most 2^12 and a multiple of key_heads");
    if (key_size < 1 || key_size > MOST_SIZE || value_size < 1 || value_size > MOST_SIZE)
        return ort_fail(base, "key_size and value_size must be between 1 and 2^12");
    if (r->channels < 1 || r->channels > MOST_CHANNELS || r->width < 1 || r->width > RECURRENCE_WIDTH)
        return ort_fail(base, "channels must be between 1 and 2^20, width between 1 and 16");
    r->heads = (int32_t)heads, r->key_heads = (int32_t)key_heads;
    r->key_size = (int32_t)key_size, r->value_size = (int32_t)value_size;
    ORT_TRY(ort_expect(base, RECURRENCE_WEIGHTS, r->channels * r->width));
    return ort_expect(base, RECURRENCE_BIAS, r->channels);
}

/* The slots that a pass may read and write. */
typedef struct {
    uint8_t *pool;
    int64_t bytes, slot_bytes, offset, sequences, extras;
    const int64_t *table; /* (sequences, 2) */
} slots;

static OrtStatus *read_slots(const recurrence_node *op, const OrtKernelContext *context, recurrence *r, slots *s) {
    const ort_kernel *base = &op->base;
    ort_shape pool, layout, table;
    const void *memory, *numbers, *rows;
    ORT_TRY(ort_read_shaped(base, context, RECURRENCE_POOL, &pool, &memory));
    ORT_TRY(ort_read_shaped(base, context, RECURRENCE_LAYOUT, &layout, &numbers));
    ORT_TRY(ort_read_shaped(base, context, RECURRENCE_SEQUENCES, &table, &rows));
    if (op->layer < 0 || op->layer >= layout.elements - 2) return ort_fail(base, "state_layout does not have the layer");
    const int64_t *given = numbers, padded = recurrence_padded(r);
    *s = (slots){(uint8_t *)(uintptr_t)memory, pool.elements, given[0], given[2 + op->layer], table.elements / 2, 0, rows};
    r->ring_rows = given[1];
    r->ring_stride = rounded(r->channels + (int64_t)r->key_heads * r->key_size + r->heads * (padded + 1), RECURRENCE_TILE);
    if (r->ring_rows < r->width || r->ring_rows > 1 << 16) return ort_fail(base, "a ring has too few or too many rows");
    int64_t floats = r->heads * r->key_size * padded + r->ring_rows * r->ring_stride;
    int64_t bytes = HEADER + floats * (int64_t)sizeof(float);
    if (s->offset < 0 || s->offset % 64 || s->slot_bytes % 64 || bytes > s->slot_bytes || s->offset > s->slot_bytes - bytes)
        return ort_fail(base, "the layer does not fit into a slot");
    if ((uintptr_t)s->pool % 64) return ort_fail(base, "state_pool must begin at a multiple of 64 bytes");
    return NULL;
}

/* The rows of a sequence, of which the first is given, and where it stands; refuses what no path is. */
static const char *open_sequence(recurrence_pass *p, const slots *s, int64_t row) {
    recurrence *r = &p->sequences[p->count];
    const int32_t *rows = p->all.rows + row * ATTENTION_ROW;
    const int64_t sequence = rows[ATTENTION_SEQUENCE];
    if (sequence < 0 || sequence >= s->sequences) return "is of a sequence that has no state";
    const int64_t slot = s->table[2 * sequence];
    if (slot < 0 || slot >= s->bytes / s->slot_bytes) return "is of a sequence whose state lies outside the pool";
    uint8_t *layer = s->pool + slot * s->slot_bytes + s->offset;
    for (int64_t other = 0; other < p->count; other++)
        if (p->positions[other] == (int64_t *)(void *)layer) return "has a state that another sequence has";
    p->positions[p->count] = (int64_t *)(void *)layer;
    r->position = *p->positions[p->count], r->committed = s->table[2 * sequence + 1];
    r->state = (float *)(void *)(layer + HEADER);
    r->ring = r->state + r->heads * r->key_size * recurrence_padded(r);
    r->rows = rows, r->count = 0;
    return NULL;
}

/* Adds the next row to its sequence: its slot follows the row before it, its parent is before it. */
static const char *add_row(recurrence *r, const slots *s, int64_t *parent) {
    const int32_t *row = r->rows + r->count * ATTENTION_ROW;
    const int64_t prefix = row[ATTENTION_PREFIX], first = row[ATTENTION_FIRST_EXTRA], extras = row[ATTENTION_EXTRAS];
    if (prefix < 0 || extras < 0 || prefix + extras < 1) return "has no slot of its own";
    if (extras && (first < 0 || first > s->extras - extras)) return "has extras outside the list of extras";
    const int64_t length = prefix + extras, own = recurrence_slot(r, row, length - 1);
    if (!r->count) r->first = own;
    if (own != r->first + r->count) return "does not lie behind the row before it";
    *parent = length > 1 ? recurrence_slot(r, row, length - 2) : -1;
    for (int64_t i = 1; i < extras; i++)
        if (r->extras[first + i] <= r->extras[first + i - 1]) return "has extras that do not ascend";
    if (extras && r->extras[first] < prefix) return "has extras that do not ascend after its prefix";
    const int64_t known = r->committed < r->first ? r->committed : r->first;
    const int64_t held = known > r->position ? known : r->position;
    if (r->position < 0 || length <= held || prefix < held) return "leaves out what its state holds";
    if (r->first - r->position > r->ring_rows) return "follows a state that is too far behind";
    r->count++;
    return NULL;
}

/* A state may go on beyond the rows before the pass only along a chain. */
static int can_commit(const recurrence *r) {
    if (r->committed > r->first + r->count) return 0;
    for (int64_t i = 1; r->committed > r->first && i < r->count; i++)
        if (r->parents[i] != r->first + i - 1) return 0;
    return 1;
}

static OrtStatus *split_rows(const recurrence_node *op, recurrence_pass *p, const slots *s) {
    recurrence *r = NULL;
    for (int64_t row = 0; row < p->all.count; row++) {
        const int32_t *given = p->all.rows + row * ATTENTION_ROW;
        const char *fault = NULL;
        if (!row || given[ATTENTION_SEQUENCE] != given[ATTENTION_SEQUENCE - ATTENTION_ROW]) {
            if (p->count == s->sequences) return ort_fail(&op->base, "the rows of a sequence lie apart");
            r = &p->sequences[p->count];
            *r = p->all;
            fault = open_sequence(p, s, row);
            r->parents += row, p->count++;
        }
        if (!fault) fault = add_row(r, s, &p->all.parents[row]);
        if (fault) return ort_fail(&op->base, "row %lld %s", (long long)row, fault);
    }
    for (int64_t i = 0; i < p->count; i++)
        if (!can_commit(&p->sequences[i])) return ort_fail(&op->base, "a state cannot go on into a tree, or beyond its rows");
    return NULL;
}

/* Lays out what a pass of so many rows works with; only counts where there is no memory yet. */
static size_t lay_out(recurrence_pass *p, int64_t sequences, char *memory) {
    recurrence *a = &p->all;
    const int64_t keys = (int64_t)a->key_heads * a->key_size, values = a->heads * recurrence_padded(a);
    const int64_t floats[] = {a->channels, keys, keys, a->key_heads, values, a->heads, a->heads, values};
    float **arrays[] = {&a->mixed, &a->q, &a->k, &a->qk, &a->u, &a->decay, &a->beta, &a->out};
    size_t at = 0;
    for (int i = 0; i < 8; i++) {
        *arrays[i] = memory ? (float *)(void *)(memory + at) : NULL;
        at += (size_t)rounded(a->count * floats[i] * (int64_t)sizeof(float), 64);
    }
    p->states = memory ? (float *)(void *)(memory + at) : NULL;
    at += (size_t)(p->jobs * rounded(a->key_size, 4) * RECURRENCE_TILE * (int64_t)sizeof(float));
    a->parents = memory ? (int64_t *)(void *)(memory + at) : NULL;
    at += (size_t)rounded(a->count * (int64_t)sizeof(int64_t), 64);
    p->sequences = memory ? (recurrence *)(void *)(memory + at) : NULL;
    at += (size_t)rounded(sequences * (int64_t)sizeof(recurrence), 64);
    p->positions = memory ? (int64_t **)(void *)(memory + at) : NULL;
    return at + (size_t)sequences * sizeof(int64_t *);
}

OrtStatus *recurrence_begin(const recurrence_node *op, OrtKernelContext *context, recurrence_pass *p, const float *x,
                            int64_t x_stride, int64_t rows) {
    const ort_kernel *base = &op->base;
    *p = (recurrence_pass){.path = attention_path_of(base->isa)->recurrences, .all = op->sizes};
    recurrence *a = &p->all;
    const void *table, *extras, *weights, *bias;
    ort_shape shape;
    slots s;
    a->count = rows, a->x = x, a->x_stride = x_stride;
    ORT_TRY(ort_read(base, context, RECURRENCE_ROWS, rows * ATTENTION_ROW, &table));
    ORT_TRY(ort_read_shaped(base, context, RECURRENCE_EXTRAS, &shape, &extras));
    ORT_TRY(ort_read(base, context, RECURRENCE_WEIGHTS, a->channels * a->width, &weights));
    ORT_TRY(ort_read(base, context, RECURRENCE_BIAS, a->channels, &bias));
    a->rows = table, a->extras = extras, a->weights = weights, a->bias = bias;
    ORT_TRY(read_slots(op, context, a, &s));
    s.extras = shape.elements;
    const int64_t tiles = recurrence_tiles(a), bytes = a->key_size * RECURRENCE_TILE * (int64_t)sizeof(float);
    /* A row takes the time of reading its state once or twice. */
    p->jobs = ort_jobs(s.sequences * tiles, (rows + 1) * tiles * bytes);
    p->memory = scratch_take(lay_out(p, s.sequences, NULL));
    if (!p->memory) return ort_fail(base, "out of memory for %lld rows", (long long)rows);
    lay_out(p, s.sequences, p->memory);
    return split_rows(op, p, &s);
}

/* A sequence's part of the arrays of all, which lie row by row. */
static void place(recurrence_pass *p) {
    const recurrence *a = &p->all;
    const int64_t keys = (int64_t)a->key_heads * a->key_size, values = a->heads * recurrence_padded(a);
    int64_t row = 0;
    for (int64_t i = 0; i < p->count; i++) {
        recurrence *r = &p->sequences[i];
        r->x = a->x + row * a->x_stride, r->mixed = a->mixed + row * a->channels;
        r->q = a->q + row * keys, r->k = a->k + row * keys, r->qk = a->qk + row * a->key_heads;
        r->u = a->u + row * values, r->out = a->out + row * values;
        r->decay = a->decay + row * a->heads, r->beta = a->beta + row * a->heads;
        row += r->count;
    }
}

/* Calls `path->convolve` for rows first..last-1 of all. */
static void convolve_job(void *data, size_t index) {
    const recurrence_pass *p = data;
    int64_t job = (int64_t)index, first = p->all.count * job / p->jobs, last = p->all.count * (job + 1) / p->jobs;
    for (int64_t i = 0, start = 0; i < p->count; start += p->sequences[i++].count) {
        const recurrence *r = &p->sequences[i];
        int64_t from = first - start, to = last - start;
        from = from > 0 ? from : 0, to = to < r->count ? to : r->count;
        if (from < to) p->path->convolve(r, from, to);
    }
}

OrtStatus *recurrence_convolve(const recurrence_node *op, const OrtKernelContext *context, recurrence_pass *p) {
    place(p);
    const int64_t jobs = p->jobs;
    p->jobs = jobs < p->all.count ? jobs : p->all.count;
    OrtStatus *status = ort_parallel(&op->base, context, convolve_job, p->jobs, p);
    p->jobs = jobs;
    return status;
}

static void recur_job(void *data, size_t index) {
    const recurrence_pass *p = data;
    const int64_t job = (int64_t)index, tiles = recurrence_tiles(&p->all), all = tiles * p->count;
    float *state = p->states + job * rounded(p->all.key_size, 4) * RECURRENCE_TILE;
    for (int64_t tile = all * job / p->jobs, last = all * (job + 1) / p->jobs; tile < last;) {
        const int64_t sequence = tile / tiles, first = tile % tiles;
        const int64_t count = last - tile < tiles - first ? last - tile : tiles - first;
        p->path->recur(&p->sequences[sequence], first, first + count, state);
        tile += count;
    }
}

/* Keeps what the last rows are taken in by, as many as a ring has. */
static void keep(const recurrence *r) {
    const int64_t keys = (int64_t)r->key_heads * r->key_size, values = r->heads * recurrence_padded(r);
    for (int64_t i = r->count > r->ring_rows ? r->count - r->ring_rows : 0; i < r->count; i++) {
        float *kept = recurrence_ring(r, r->first + i);
        memcpy(kept, r->x + i * r->x_stride, (size_t)r->channels * sizeof(float));
        memcpy(kept + r->channels, r->k + i * keys, (size_t)keys * sizeof(float));
        memcpy(kept + r->channels + keys, r->u + i * values, (size_t)values * sizeof(float));
        memcpy(kept + r->channels + keys + values, r->decay + i * r->heads, (size_t)r->heads * sizeof(float));
    }
}

OrtStatus *recurrence_run(const recurrence_node *op, const OrtKernelContext *context, recurrence_pass *p) {
    ORT_TRY(ort_parallel(&op->base, context, recur_job, p->jobs, p));
    for (int64_t i = 0; i < p->count; i++) {
        const recurrence *r = &p->sequences[i];
        keep(r);
        if (r->committed > r->position) *p->positions[i] = r->committed;
    }
    return NULL;
}

float recurrence_product(const float *x, const float *y, int64_t n) {
    float lanes[LANES] = {0};
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += x[i + l] * y[i + l];
    for (int64_t i = whole; i < n; i++) lanes[i - whole] += x[i] * y[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

float recurrence_softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

void recurrence_end(recurrence_pass *p) {
    if (p->memory) scratch_give(p->memory);
    p->memory = NULL;
}
