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
INLINE vec vec_halves(const uint8_t *at) { EACH(float_of((uint16_t)(at[2 * l] | at[2 * l + 1] << 8))); }
INLINE vec vec_int8(const int8_t *at) { EACH((float)at[l]); }
INLINE vec vec_fourth(const uint8_t *at, int c) { EACH((float)(int8_t)at[4 * l + c]); }
INLINE vec vec_nibbles(const uint8_t *at, int c, int high) { EACH((float)(at[4 * l + c] >> 4 * high & 15)); }

enum { PANEL = 4, WIDE_ROWS = 4 };
#define EVERY_ROWS(what) what(1) what(2) what(3) what(4)

#include "attention.inc.h"
#include "floats.inc.h"

const attention_path attention_portable = {"portable", write_rows, attend, merge, normalise_floats, multiply_floats};
