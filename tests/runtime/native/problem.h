/* Random matrices and rows for the driver, packed by the letter of lowbit.h; knows nothing of products. */
#ifndef EDGEINFER_TEST_PROBLEM_H
#define EDGEINFER_TEST_PROBLEM_H

#include <math.h>
#include <string.h>

#include "kind_problem.h"

/* What a row of activations holds. */
enum { NORMAL, ZEROS, DENORMAL, HUGE_VALUES, EXTREME, TIES, WIDE, ONE_NAN, ONE_INFINITY, VALUE_KINDS };

/* What stands for the low plane where the high one is read alone: the middle of 0 to 15. */
static const double LOW_MIDDLE = 7.5;

/* Twice the values of E2M1, by their codes. */
static const int DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

typedef struct {
    int bits, kind, float16, e2m1, vectors, high_only, inline_scales, block, zeros, paired, swiglu, bias, residual, norm;
    int64_t n, k, m;
} shape;

typedef struct {
    shape s;
    lowbit_matrix w;
    double *dense;  /* (n, k): the weights, dequantized */
    double *minima; /* (n, k / 16): what is taken off them; NULL but of a kind */
    int *kinds;    /* (m) */
    float *x, *weight, *bias, *residual;
    int64_t width, tiles, blocks;
} problem;

/* Magnitudes that a code of vectors stands for, by its low half. */
static const int MAGNITUDES[16][4] = {
    {1, 1, 1, 1}, {1, 1, 4, 1}, {4, 1, 1, 1}, {1, 3, 1, 3}, {2, 1, 2, 3}, {2, 3, 2, 1}, {2, 2, 2, 7}, {2, 2, 7, 2},
    {2, 7, 2, 2}, {7, 2, 2, 2}, {2, 2, 5, 5}, {2, 5, 5, 2}, {5, 2, 2, 5}, {5, 2, 5, 2}, {5, 5, 2, 2}, {2, 6, 3, 6}};

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static double scale_value(const shape *s, uint16_t bits) { return s->float16 ? half_value(bits) : from_bf16(bits); }

static uint16_t random_scale(const shape *s) {
    if (s->float16) return random_half();
    float value = chance(4) ? 0.0f : uniform(0.002f, 0.03f);
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (uint16_t)(wide >> 16);
}

/* Tile and lane of row n of the matrix. */
static void locate(const shape *s, int64_t n, int64_t *tile, int64_t *lane) {
    int64_t half = s->n / 2;
    *tile = s->paired ? n % half / 16 : n / 32;
    *lane = s->paired ? n / half * 16 + n % half % 16 : n % 32;
}

/* Adds value v of 3 bits at row n, position k, otherwise as `put`. */
static void put3(const problem *p, uint8_t *data, int64_t between, int64_t n, int64_t k, int v) {
    int64_t t, lane, B = p->s.block, b = k / B, j = k % B, i = j % 32, h = i / 16, s = i % 16 / 4;
    locate(&p->s, n, &t, &lane);
    uint8_t *run = data + (t * p->blocks + b) * (12 * B + between) + j / 32 * 384 + lane * 4 + i % 4;
    run[128 * h] = (uint8_t)(run[128 * h] | (v & 3) << 2 * s);
    run[256] = (uint8_t)(run[256] | v >> 2 << (s / 2 * 4 + 2 * h + s % 2));
}

/* Adds value v (of plane_bits bits) at row n, position k, to a plane: the formula of lowbit.h, spelled out. `between`
 * bytes of something else follow those of each block. */
static void put(const problem *p, uint8_t *plane, int64_t between, int64_t n, int64_t k, int v) {
    if (p->s.bits == 3) {
        put3(p, plane, between, n, k, v);
        return;
    }
    int plane_bits = p->s.bits == 2 ? 2 : 4;
    int64_t t, lane, B = p->s.block, S = B * plane_bits / 8, b = k / B, j = k % B, r = j % S;
    locate(&p->s, n, &t, &lane);
    int64_t byte = (t * p->blocks + b) * (32 * S + between) + r / 4 * 128 + lane * 4 + r % 4;
    plane[byte] = (uint8_t)(plane[byte] | v << (j / S * plane_bits));
}

/* What the code of row n, position k, stands for there. */
static double vector_value(const problem *p, const uint8_t *data, int64_t between, int64_t n, int64_t k) {
    int64_t t, lane, B = p->s.block, S = B / 4, b = k / B, j = k % B, r = j % S;
    locate(&p->s, n, &t, &lane);
    const int code = data[(t * p->blocks + b) * (32 * S + between) + r / 4 * 128 + lane * 4 + r % 4];
    const int magnitude = MAGNITUDES[code % 16][j / S];
    return code / 16 >> j / S & 1 ? -magnitude : magnitude;
}

static void make_kind(problem *p) {
    const shape *s = &p->s;
    const int64_t step = tile_size(s->kind, p->blocks);
    uint8_t *data = take((size_t)(p->tiles * step), 64, 0);
    memset(data, 0, (size_t)(p->tiles * step));
    p->dense = take((size_t)(s->n * s->k) * sizeof(double), 16, 0);
    p->minima = take((size_t)(s->n * s->k / 16) * sizeof(double), 16, 0);
    for (int64_t n = 0; n < s->n; n++) {
        int64_t t, lane;
        locate(s, n, &t, &lane);
        put_row(s->kind, data + t * step, p->blocks, (int)lane, p->dense + n * s->k, p->minima + n * s->k / 16);
    }
    p->w = (lowbit_matrix){.n = s->n, .k = s->k, .bits = s->bits, .block = 32, .paired = s->paired, .kind = s->kind, .data = data};
}

static void make_weights(problem *p) {
    const shape *s = &p->s;
    if (s->kind) {
        make_kind(p);
        return;
    }
    size_t bytes = (size_t)(p->tiles * p->blocks * 4 * s->block * (s->bits == 8 ? 4 : s->bits));
    size_t entries = (size_t)(p->tiles * p->blocks * 32), all = bytes + (s->inline_scales ? entries * 2 : 0);
    int64_t between = s->inline_scales ? 64 : 0;
    int64_t scale_step = s->inline_scales ? (int64_t)all / (p->tiles * p->blocks) / 2 : 32;
    uint8_t *data = take(all, 64, 0), *low = s->bits == 8 ? take(bytes, 64, 0) : NULL;
    uint16_t *scales = s->inline_scales ? (uint16_t *)(void *)data : take(entries * 2, 16, 2);
    uint8_t *zeros = s->zeros ? take(entries, 16, 1) : NULL;
    if (!s->inline_scales) memset(scales, 0, entries * 2);
    memset(data, 0, all);
    data += between;
    if (low) memset(low, 0, bytes);
    if (zeros) memset(zeros, 0, entries);
    p->dense = take((size_t)(s->n * s->k) * sizeof(double), 16, 0);
    int top = (1 << s->bits) - 1;
    for (int64_t n = 0; n < s->n; n++) {
        int style = (int)below(6); /* 0: all greatest, 1: all least, else random */
        int64_t t, lane, entry = 0;
        uint16_t *scale = scales;
        locate(s, n, &t, &lane);
        for (int64_t k = 0; k < s->k; k++) {
            int v = style == 0 ? top : style == 1 ? 0 : (int)below(top + 1);
            if (k % s->block == 0) {
                entry = (t * p->blocks + k / s->block) * 32 + lane;
                scale = scales + entry / 32 * scale_step + lane;
                *scale = random_scale(s);
                if (zeros) zeros[entry] = (uint8_t)(chance(20) ? (chance(50) ? top : 0) : below(top + 1));
            }
            put(p, data, between, n, k, s->bits == 8 ? v >> 4 : v);
            if (low) put(p, low, 0, n, k, v & 15);
            double read = s->high_only ? (v >> 4) * 16 + LOW_MIDDLE : v;
            read = s->e2m1 ? DOUBLED[v] : read - (zeros ? zeros[entry] : 1 << (s->bits - 1));
            p->dense[n * s->k + k] = read * scale_value(s, *scale);
        }
        for (int64_t k = 0; k < s->k && s->vectors; k++) {
            entry = (t * p->blocks + k / s->block) * 32 + lane;
            const double read = vector_value(p, data, between, n, k);
            p->dense[n * s->k + k] = read * scale_value(s, scales[entry / 32 * scale_step + lane]);
        }
    }
    p->w = (lowbit_matrix){s->n,  s->k,    s->bits, s->block, s->paired, s->e2m1,
                           s->vectors, s->inline_scales, s->float16, 0, data, s->high_only ? NULL : low, scales, zeros};
}

static float element(int kind, int64_t k, int block) {
    switch (kind) {
    case ZEROS: return chance(50) ? 0.0f : -0.0f;
    case DENORMAL: return uniform(-1e-38f, 1e-38f) * (chance(50) ? 1e-4f : 1.0f);
    case HUGE_VALUES: return chance(50) ? uniform(-1e30f, 1e30f) : uniform(-1.0f, 1.0f);
    case EXTREME: return chance(50) ? 3.0f : -3.0f; /* every int8 value is 127 or -127 */
    case TIES: return k % block == 0 ? 127.0f : (float)below(253) - 126.5f;
    case WIDE: return ldexpf(uniform(-1.0f, 1.0f), (int)below(24) - 12);
    default: return uniform(-2.0f, 2.0f);
    }
}

static void make_rows(problem *p) {
    const shape *s = &p->s;
    p->kinds = take((size_t)s->m * sizeof(int), 16, 0);
    p->x = take_floats(s->m * s->k);
    p->weight = take_floats(s->k);
    p->bias = take_floats(s->n);
    p->residual = take_floats(s->m * p->width);
    for (int64_t i = 0; i < s->m; i++) {
        /* Squares of huge values overflow in the normalisation: nothing to compare with. */
        do p->kinds[i] = chance(40) ? NORMAL : (int)below(VALUE_KINDS);
        while (s->norm && p->kinds[i] == HUGE_VALUES);
        int zero_block = chance(20);
        for (int64_t k = 0; k < s->k; k++)
            p->x[i * s->k + k] = zero_block && k < s->block ? 0.0f : element(p->kinds[i], k, s->block);
        if (zero_block && p->kinds[i] == TIES) p->kinds[i] = NORMAL;
        float odd = p->kinds[i] == ONE_NAN ? NAN : chance(50) ? INFINITY : -INFINITY;
        if (p->kinds[i] >= ONE_NAN) p->x[i * s->k + below(s->k)] = odd;
    }
    for (int64_t k = 0; k < s->k; k++) p->weight[k] = uniform(-0.5f, 2.0f);
    for (int64_t n = 0; n < s->n; n++) p->bias[n] = uniform(-1.0f, 1.0f);
    for (int64_t i = 0; i < s->m * p->width; i++) p->residual[i] = uniform(-1.0f, 1.0f);
}

static void make_problem(problem *p, const shape *s) {
    *p = (problem){.s = *s, .width = s->swiglu && s->paired ? s->n / 2 : s->n, .blocks = (s->k + s->block - 1) / s->block};
    p->tiles = s->paired ? (s->n / 2 + 15) / 16 : (s->n + 31) / 32;
    make_weights(p);
    make_rows(p);
}

#endif
