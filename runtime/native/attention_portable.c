/* The portable path of attention and of float matrices: plain C, the definition of what all others compute; knows nothing of registers. */
#include "arithmetic.inc.h"
#include "tile.h"

typedef struct {
    float lane[LANES];
} vec;

#define EACH(expression)                                    \
    vec out;                                                \
    for (int l = 0; l < LANES; l++) out.lane[l] = (expression); \
    return out

INLINE vec vec_set(float x) { EACH(x); }
INLINE vec vec_load(const float *at) { EACH(at[l]); }
INLINE void vec_store(float *at, vec x) { memcpy(at, x.lane, sizeof x.lane); }
INLINE void vec_fetch(intptr_t at) { (void)at; }
INLINE vec vec_add(vec a, vec b) { EACH(a.lane[l] + b.lane[l]); }
INLINE vec vec_sub(vec a, vec b) { EACH(a.lane[l] - b.lane[l]); }
INLINE vec vec_mul(vec a, vec b) { EACH(a.lane[l] * b.lane[l]); }
INLINE vec vec_div(vec a, vec b) { EACH(a.lane[l] / b.lane[l]); }
INLINE vec vec_fma(vec a, vec b, vec c) { EACH(fmaf(a.lane[l], b.lane[l], c.lane[l])); }
INLINE vec vec_abs(vec x) { EACH(fabsf(x.lane[l])); }
INLINE vec vec_sign(vec size, vec of) { EACH(copysignf(size.lane[l], of.lane[l])); }
INLINE vec vec_max(vec a, vec b) { EACH(a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l]); }
INLINE vec vec_zero_below(vec x, vec least, vec y) { EACH(x.lane[l] < least.lane[l] ? 0.0f : y.lane[l]); }
INLINE vec vec_within(vec x, int from, int to, vec other) { EACH(l >= from && l < to ? x.lane[l] : other.lane[l]); }
INLINE vec vec_power(vec shifted) { EACH(power_of_two(shifted.lane[l])); }
static float vec_fold_sum(vec x) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) x.lane[l] += x.lane[l + half];
    return x.lane[0];
}

static float vec_fold_max(vec x) {
    float most = x.lane[0];
    for (int l = 1; l < LANES; l++) most = x.lane[l] > most ? x.lane[l] : most;
    return most;
}

INLINE void vec_transpose(const float *from, int64_t step, float *to) {
    for (int64_t c = 0; c < LANES; c++)
        for (int64_t i = 0; i < LANES; i++) to[c * LANES + i] = from[i * step + c];
}

INLINE vec vec_bfloats(const uint8_t *at) { EACH(bits_float((uint32_t)at[2 * l] << 16 | (uint32_t)at[2 * l + 1] << 24)); }
INLINE vec vec_halves(const uint8_t *at) { EACH(float_of((uint16_t)(at[2 * l] | at[2 * l + 1] << 8))); }
INLINE vec vec_int8(const int8_t *at) { EACH((float)at[l]); }
INLINE vec vec_halves_of(const uint8_t *at, int high) { EACH((float)(at[l] >> 4 * high & 15)); }
INLINE vec vec_eight(const uint8_t *at) { EACH((float)(at[l % 8] >> l / 8 * 4 & 15)); }
INLINE vec vec_nibbles(const uint8_t *at, int c, int high) { EACH((float)(at[4 * l + c] >> 4 * high & 15)); }

typedef struct {
    int32_t lane[LANES];
} ivec;
typedef struct {
    int8_t value[4 * LANES];
} kvec, four;

#define EACH_INT(expression)                                \
    ivec out;                                               \
    for (int l = 0; l < LANES; l++) out.lane[l] = (expression); \
    return out

INLINE ivec ivec_set(int32_t x) { EACH_INT(x); }
INLINE vec ivec_float(ivec x) { EACH((float)x.lane[l]); }

static int32_t ivec_fold_max(ivec x) {
    int32_t most = x.lane[0];
    for (int l = 1; l < LANES; l++) most = x.lane[l] > most ? x.lane[l] : most;
    return most;
}

INLINE int32_t greater_bits(int32_t most, float x) {
    const int32_t bits = (int32_t)(float_bits(x) & 0x7fffffffu);
    return bits > most ? bits : most;
}
INLINE ivec ivec_max_bits(ivec most, vec x) { EACH_INT(greater_bits(most.lane[l], x.lane[l])); }

enum { KEY_BIAS = 0 };
INLINE kvec kvec_load(const uint8_t *at) {
    kvec out;
    memcpy(out.value, at, sizeof out.value);
    return out;
}

INLINE int32_t four_products(const int8_t *keys, int32_t q) {
    int8_t values[4];
    memcpy(values, &q, sizeof values);
    return keys[0] * values[0] + keys[1] * values[1] + keys[2] * values[2] + keys[3] * values[3];
}
INLINE ivec ivec_dot(ivec sum, kvec k, int32_t q) { EACH_INT(sum.lane[l] + four_products(k.value + 4 * l, q)); }

INLINE void vec_store_levels(int16_t *at, vec shifted) {
    for (int l = 0; l < LANES; l++) at[l] = (int16_t)(float_bits(shifted.lane[l]) - 0x4b400000u);
}

INLINE four four_load(const int8_t *at) { return kvec_load((const uint8_t *)at); }
INLINE int32_t four_positions(const int8_t *v, const int16_t *levels) {
    return v[0] * levels[0] + v[2] * levels[1] + v[1] * levels[2] + v[3] * levels[3];
}
INLINE ivec ivec_add_four(ivec sum, four values, const int16_t *levels) {
    EACH_INT(sum.lane[l] + four_positions(values.value + 4 * l, levels));
}

/* Compilers take minutes over more of it unrolled, sanitizers most of all. */
#define UNROLL
enum { PANEL = 2, WIDE_ROWS = 2, INT_PANEL = 2, INT_WIDTH = 1 };
#define EVERY_INT_ROWS(what) EVERY_ROWS(what)
#define EVERY_ROWS(what) what(1) what(2)

#include "attention.inc.h"
#include "floats.inc.h"
#include "activation.inc.h"
#include "recurrence.inc.h"

const attention_path attention_portable = {"portable", write_rows, attend, merge,
                                           normalise_floats, multiply_floats, activate, &recurrence_functions};
