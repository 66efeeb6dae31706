/* Recurrences over a matrix for each head (recurrence.h) in vectors of 16; knows nothing of registers.
 *
 * Included by a path that has vec, vec_set, vec_load, vec_store, vec_add, vec_sub, vec_mul and vec_fma.
 */
#include "arithmetic.inc.h"
#include "recurrence.h"

/* What a slot is taken in by, of one head and tile. */
typedef struct {
    const float *k, *u;
    float decay;
} taken;

/* One tile: where it is, and the state that is computed with. */
typedef struct {
    const recurrence *r;
    int64_t head, key_head, tile;
    float *stored, *state; /* (key_size, 16) */
} state_tile;

INLINE taken taken_of(const state_tile *t, int64_t slot) {
    const recurrence *r = t->r;
    const int64_t keys = (int64_t)r->key_heads * r->key_size, padded = recurrence_padded(r);
    const int64_t key = t->key_head * r->key_size, value = t->head * padded + t->tile * RECURRENCE_TILE;
    if (slot >= r->first) {
        const int64_t row = slot - r->first;
        return (taken){r->k + row * keys + key, r->u + row * r->heads * padded + value,
                       r->decay[row * r->heads + t->head]};
    }
    const float *kept = recurrence_ring(r, slot) + r->channels;
    return (taken){kept + key, kept + keys + value, kept[keys + r->heads * padded + t->head]};
}

/* Slots that are taken in together. */
enum { TAKEN = 4 };

/* The state after `count` slots, one after the other, of which it was `from` before. */
INLINE void take_in(const state_tile *t, const taken *slots, int count, const float *from) {
    vec u[TAKEN], decay[TAKEN];
    for (int l = 0; l < count; l++) u[l] = vec_load(slots[l].u), decay[l] = vec_set(slots[l].decay);
    for (int64_t i = 0; i < t->r->key_size; i++) {
        vec values = vec_load(from + i * LANES);
        for (int l = 0; l < count; l++) values = vec_fma(vec_set(slots[l].k[i]), u[l], vec_mul(decay[l], values));
        vec_store(t->state + i * LANES, values);
    }
}

/* The state after the places `base`..`end`-1 of a row's path; what is stored is that after `base`. */
static void take_in_path(const state_tile *t, const int32_t *row, int64_t base, int64_t end) {
    const size_t bytes = (size_t)t->r->key_size * LANES * sizeof(float);
    const float *from = base ? t->stored : t->state;
    if (!base) memset(t->state, 0, bytes);
    if (base && base == end) memcpy(t->state, t->stored, bytes);
    while (base < end) {
        taken slots[TAKEN];
        const int count = (int)smaller(TAKEN, end - base);
        for (int l = 0; l < count; l++) slots[l] = taken_of(t, recurrence_slot(t->r, row, base++));
        if (count == 4) take_in(t, slots, 4, from);
        if (count == 3) take_in(t, slots, 3, from);
        if (count == 2) take_in(t, slots, 2, from);
        if (count == 1) take_in(t, slots, 1, from);
        from = t->state;
    }
}

/* `count` products of the state, four chains each, which takes in the slot `before` first, if there is one. */
INLINE void products_of(int count, const float *const *x, float *state, int64_t size, const taken *before, vec *out) {
    const vec u = before ? vec_load(before->u) : vec_set(0), decay = vec_set(before ? before->decay : 0);
    vec chains[2][4];
    for (int i = 0; i < count; i++)
        for (int l = 0; l < 4; l++) chains[i][l] = vec_set(0);
    const int64_t whole = size / 4 * 4;
    for (int64_t k = 0; k < whole; k += 4)
        for (int l = 0; l < 4; l++) {
            vec values = vec_load(state + (k + l) * LANES);
            if (before) {
                values = vec_fma(vec_set(before->k[k + l]), u, vec_mul(decay, values));
                vec_store(state + (k + l) * LANES, values);
            }
            for (int i = 0; i < count; i++) chains[i][l] = vec_fma(vec_set(x[i][k + l]), values, chains[i][l]);
        }
    for (int64_t k = whole; k < size; k++) {
        vec values = vec_load(state + k * LANES);
        if (before) {
            values = vec_fma(vec_set(before->k[k]), u, vec_mul(decay, values));
            vec_store(state + k * LANES, values);
        }
        for (int i = 0; i < count; i++) chains[i][k - whole] = vec_fma(vec_set(x[i][k]), values, chains[i][k - whole]);
    }
    for (int i = 0; i < count; i++)
        out[i] = vec_add(vec_add(chains[i][0], chains[i][1]), vec_add(chains[i][2], chains[i][3]));
}

INLINE void compute(const state_tile *t, int64_t row, const taken *before) {
    const recurrence *r = t->r;
    const int64_t padded = recurrence_padded(r), keys = row * r->key_heads + t->key_head;
    const int64_t value = (row * r->heads + t->head) * padded + t->tile * RECURRENCE_TILE;
    const vec decay = vec_set(r->decay[row * r->heads + t->head]);
    const float *const x[] = {r->q + keys * r->key_size, r->k + keys * r->key_size};
    vec u = vec_load(r->u + value), products[2];
    if (r->delta) {
        products_of(2, x, t->state, r->key_size, before, products);
        u = vec_mul(vec_set(r->beta[row * r->heads + t->head]), vec_sub(u, vec_mul(decay, products[1])));
        vec_store(r->u + value, u);
    } else {
        products_of(1, x, t->state, r->key_size, before, products);
    }
    vec_store(r->out + value, vec_fma(vec_set(r->qk[keys]), u, vec_mul(decay, products[0])));
}

static void compute_row(const state_tile *t, int64_t row) { compute(t, row, NULL); }

/* A row that follows the slot `before`, which the state has not taken in yet. */
static void compute_next(const state_tile *t, int64_t row, int64_t before) {
    const taken slot = taken_of(t, before);
    compute(t, row, &slot);
}

INLINE void store_state(const state_tile *t) {
    memcpy(t->stored, t->state, (size_t)t->r->key_size * LANES * sizeof(float));
}

/* Every row from the state before it: one goes on from the row before it, or begins where the stored state ends. */
static void recur_tile(const state_tile *t) {
    const recurrence *r = t->r;
    int64_t base = r->position, at = -2; /* the last slot that the state has taken in; -2: it has not been loaded */
    if (r->committed > base && r->committed <= r->first) {
        take_in_path(t, r->rows, base, r->committed);
        base = r->committed;
        store_state(t), at = base - 1;
    }
    for (int64_t i = 0; i < r->count; i++) {
        const int64_t parent = r->parents[i];
        const int32_t *row = r->rows + i * 4;
        if (at != parent && i && at == r->parents[i - 1] && parent == r->first + i - 1) {
            compute_next(t, i, parent);
        } else {
            if (at != parent) take_in_path(t, row, base, (int64_t)row[1] + row[3] - 1);
            compute_row(t, i);
        }
        at = parent;
        if (r->first + i == r->committed && r->committed > base) store_state(t), base = r->committed;
    }
    if (r->committed == r->first + r->count && r->committed > base) {
        const taken last = taken_of(t, r->committed - 1);
        take_in(t, &last, 1, t->state);
        store_state(t);
    }
}

/* Tiles first..last-1 of all heads, all rows of each; `state` is for one tile. */
static void recur(const recurrence *r, int64_t first, int64_t last, float *state) {
    const int64_t tiles = recurrence_padded(r) / RECURRENCE_TILE;
    for (int64_t i = first; i < last; i++) {
        const int64_t head = i / tiles;
        const state_tile t = {r, head, head / (r->heads / r->key_heads), i % tiles,
                              r->state + i * r->key_size * RECURRENCE_TILE, state};
        recur_tile(&t);
    }
}

/* What the convolution reads of the token at a place of a row's path. */
INLINE const float *read_at(const recurrence *r, const int32_t *row, int64_t place) {
    const int64_t slot = recurrence_slot(r, row, place);
    return slot >= r->first ? r->x + (slot - r->first) * r->x_stride : recurrence_ring(r, slot);
}

/* Channels that are convolved together. */
enum { CONVOLVED = 64 };

/* The weights (n, width) of some channels, those of a token side by side. */
INLINE void turned(const float *weights, int64_t width, int64_t n, float (*out)[CONVOLVED]) {
    for (int64_t c = 0; c < n; c++)
        for (int64_t w = 0; w < width; w++) out[w][c] = weights[c * width + w];
}

/* The convolution of rows first..last-1 over the last tokens of their paths, and silu. */
static void convolve(const recurrence *r, int64_t first, int64_t last) {
    float weights[RECURRENCE_WIDTH][CONVOLVED], sums[CONVOLVED];
    for (int64_t start = 0; start < r->channels; start += CONVOLVED) {
        const int64_t n = smaller(CONVOLVED, r->channels - start);
        if (r->width == 4) /* as nearly all models have it; only a known width becomes vectors */
            turned(r->weights + start * 4, 4, n, weights);
        else
            turned(r->weights + start * r->width, r->width, n, weights);
        for (int64_t i = first; i < last; i++) {
            const int32_t *row = r->rows + i * 4;
            const int64_t length = (int64_t)row[1] + row[3];
            for (int64_t c = 0; c < n; c++) sums[c] = r->bias ? r->bias[start + c] : 0.0f;
            for (int64_t place = smaller(length, r->width); place > 0; place--) {
                const float *token = read_at(r, row, length - place) + start, *weight = weights[r->width - place];
                for (int64_t c = 0; c < n; c++) sums[c] = fmaf(weight[c], token[c], sums[c]);
            }
            float *mixed = r->mixed + i * r->channels + start;
            for (int64_t c = 0; c < n; c++) mixed[c] = sums[c] / (1.0f + exponential(-sums[c]));
        }
    }
}

/* The norm of each head of rows first..last-1, times weight, times silu of the gate: (count, heads, value_size), rows
 * `stride` apart. */
static void gate_heads(const recurrence *r, const float *weight, float epsilon, const float *gate, int64_t stride,
                       float *y, int64_t first, int64_t last) {
    const int64_t size = r->value_size;
    for (int64_t i = first; i < last; i++)
        for (int64_t head = 0; head < r->heads; head++) {
            const float *o = r->out + (i * r->heads + head) * recurrence_padded(r), *z = gate + i * stride + head * size;
            float *to = y + (i * r->heads + head) * size;
            const float inverse = inverse_norm(o, size, epsilon);
            for (int64_t c = 0; c < size; c++) to[c] = o[c] * inverse * weight[c] * (z[c] / (1.0f + exponential(-z[c])));
        }
}

INLINE void times_silu(float *y, const float *z, int64_t n) {
    for (int64_t c = 0; c < n; c++) y[c] *= z[c] / (1.0f + exponential(-z[c]));
}

/* What recurrence_gate says, of rows first..last-1. */
static void gate_groups(const recurrence *r, const recurrence_gate *g, int64_t first, int64_t last) {
    const int64_t size = r->value_size, inner = r->heads * size, group = inner / r->key_heads;
    for (int64_t i = first; i < last; i++) {
        const float *z = g->z + i * g->stride;
        float *y = g->y + i * inner;
        for (int64_t head = 0; head < r->heads; head++) {
            const float *o = r->out + (i * r->heads + head) * recurrence_padded(r);
            const float *x = r->mixed + i * r->channels + head * size;
            const float d = g->d[head];
            for (int64_t c = 0; c < size; c++) y[head * size + c] = fmaf(d, x[c], o[c]);
        }
        if (!g->norm_first) times_silu(y, z, inner);
        for (int64_t at = 0; g->norm && at < inner; at += group) {
            const float inverse = inverse_norm(y + at, group, g->epsilon);
            for (int64_t c = at; c < at + group; c++) y[c] *= inverse * g->norm[c];
        }
        if (g->norm_first) times_silu(y, z, inner);
    }
}

static const recurrence_path recurrence_functions = {convolve, recur, gate_heads, gate_groups};
