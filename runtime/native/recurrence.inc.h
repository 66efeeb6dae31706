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

static void take_in(const state_tile *t, int64_t slot) {
    const taken s = taken_of(t, slot);
    const vec u = vec_load(s.u), decay = vec_set(s.decay);
    for (int64_t i = 0; i < t->r->key_size; i++) {
        float *at = t->state + i * LANES;
        vec_store(at, vec_fma(vec_set(s.k[i]), u, vec_mul(decay, vec_load(at))));
    }
}

/* `count` products of the state, four chains each. */
INLINE void products_of(int count, const float *const *x, const float *state, int64_t size, vec *out) {
    vec chains[2][4];
    for (int i = 0; i < count; i++)
        for (int l = 0; l < 4; l++) chains[i][l] = vec_set(0);
    const int64_t whole = size / 4 * 4;
    for (int64_t k = 0; k < whole; k += 4)
        for (int l = 0; l < 4; l++) {
            const vec values = vec_load(state + (k + l) * LANES);
            for (int i = 0; i < count; i++) chains[i][l] = vec_fma(vec_set(x[i][k + l]), values, chains[i][l]);
        }
    for (int64_t k = whole; k < size; k++)
        for (int i = 0; i < count; i++)
            chains[i][k - whole] = vec_fma(vec_set(x[i][k]), vec_load(state + k * LANES), chains[i][k - whole]);
    for (int i = 0; i < count; i++)
        out[i] = vec_add(vec_add(chains[i][0], chains[i][1]), vec_add(chains[i][2], chains[i][3]));
}

static void compute_row(const state_tile *t, int64_t row) {
    const recurrence *r = t->r;
    const int64_t padded = recurrence_padded(r), keys = row * r->key_heads + t->key_head;
    const int64_t value = (row * r->heads + t->head) * padded + t->tile * RECURRENCE_TILE;
    const vec decay = vec_set(r->decay[row * r->heads + t->head]);
    const float *const x[] = {r->q + keys * r->key_size, r->k + keys * r->key_size};
    vec u = vec_load(r->u + value), products[2];
    if (r->delta) {
        products_of(2, x, t->state, r->key_size, products);
        u = vec_mul(vec_set(r->beta[row * r->heads + t->head]), vec_sub(u, vec_mul(decay, products[1])));
        vec_store(r->u + value, u);
    } else {
        products_of(1, x, t->state, r->key_size, products);
    }
    vec_store(r->out + value, vec_fma(vec_set(r->qk[keys]), u, vec_mul(decay, products[0])));
}

INLINE void load_state(const state_tile *t, int64_t base) {
    const size_t bytes = (size_t)t->r->key_size * LANES * sizeof(float);
    if (base)
        memcpy(t->state, t->stored, bytes);
    else
        memset(t->state, 0, bytes);
}

INLINE void store_state(const state_tile *t) {
    memcpy(t->stored, t->state, (size_t)t->r->key_size * LANES * sizeof(float));
}

/* Every row from the state before it: one goes on from the row before it, or begins where the stored state ends. */
static void recur_tile(const state_tile *t) {
    const recurrence *r = t->r;
    int64_t base = r->position, at = -2; /* the last slot that the state has taken in; -2: it has not been loaded */
    if (r->committed > base && r->committed <= r->first) {
        load_state(t, base);
        for (; base < r->committed; base++) take_in(t, recurrence_slot(r, r->rows, base));
        store_state(t), at = base - 1;
    }
    for (int64_t i = 0; i < r->count; i++) {
        const int64_t parent = r->parents[i];
        if (at != parent && i && at == r->parents[i - 1] && parent == r->first + i - 1) {
            take_in(t, parent);
        } else if (at != parent) {
            const int32_t *row = r->rows + i * 4;
            load_state(t, base);
            for (int64_t place = base; place < (int64_t)row[1] + row[3] - 1; place++)
                take_in(t, recurrence_slot(r, row, place));
        }
        at = parent;
        if (r->first + i == r->committed && r->committed > base) store_state(t), base = r->committed;
        compute_row(t, i);
    }
    if (r->committed == r->first + r->count && r->committed > base) {
        take_in(t, r->committed - 1);
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

/* The convolution of rows first..last-1 over the last tokens of their paths, and silu. */
static void convolve(const recurrence *r, int64_t first, int64_t last) {
    float weights[RECURRENCE_WIDTH][CONVOLVED], sums[CONVOLVED]; /* those of a token side by side */
    for (int64_t start = 0; start < r->channels; start += CONVOLVED) {
        const int64_t n = smaller(CONVOLVED, r->channels - start);
        for (int64_t c = 0; c < n; c++)
            for (int64_t w = 0; w < r->width; w++) weights[w][c] = r->weights[(start + c) * r->width + w];
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
