/* Activation functions (activation.h) in plain C that compilers vectorize; knows nothing of registers.
 *
 * Compile with -ffp-contract=off, so that only what is written as fmaf is fused.
 */
#include "activation.h"
#include "arithmetic.inc.h"

/* Values that are computed at once: they stay in the first-level cache between loops. */
enum { ACTIVATION_RUN = 256 };

/* Abramowitz and Stegun 7.1.26, to 1.5e-7. */
static inline float error_function(float x) {
    float size = bits_float(float_bits(x) & 0x7fffffffu), t = 1.0f / fmaf(0.3275911f, size, 1.0f);
    float p = fmaf(1.061405429f, t, -1.453152027f);
    p = fmaf(p, t, 1.421413741f);
    p = fmaf(p, t, -0.284496736f);
    p = fmaf(p, t, 0.254829592f);
    float y = 1.0f - p * t * exponential(-(size * size));
    return bits_float(float_bits(y) | (float_bits(x) & 0x80000000u));
}

/* tanh(x): of t = exp(-2 |x|) it is (1 - t) / (1 + t) with the sign of x. */
static inline float hyperbolic_tangent(float x) {
    float t = exponential(-2.0f * bits_float(float_bits(x) & 0x7fffffffu)), y = (1.0f - t) / (1.0f + t);
    return bits_float(float_bits(y) | (float_bits(x) & 0x80000000u));
}

static inline float xielu(float x, float positive, float negative) {
    float low = x < -1e-6f ? x : -1e-6f;
    float above = positive * x * x, below = (exponential(low) - 1.0f - x) * negative;
    return (x > 0.0f ? above : below) + 0.5f * x;
}

#define VALUES(value) \
    for (int64_t i = 0; i < n; i++) y[i] = (value)

/* n <= ACTIVATION_RUN values; `up` are the factors that swiglu looks at itself. */
static void activate_run(const activation *a, const float *x, const float *up, int64_t n, float *y) {
    const float first = a->first, second = a->second;
    switch (a->kind) {
        case ACTIVATION_SILU: VALUES(swish(x[i], 1.0f)); break;
        case ACTIVATION_GELU: VALUES(0.5f * x[i] * (1.0f + error_function(x[i] * 0.70710678118654752f))); break;
        case ACTIVATION_GELU_TANH: VALUES(gelu_tanh(x[i])); break;
        case ACTIVATION_RELU2: VALUES(x[i] <= 0.0f ? 0.0f : x[i] * x[i]); break;
        case ACTIVATION_XIELU: VALUES(xielu(x[i], first, second)); break;
        case ACTIVATION_SWIGLU: VALUES(clamped_swiglu(x[i], up[i])); break;
        case ACTIVATION_LOGISTIC: VALUES(1.0f / (1.0f + exponential(-x[i]))); break;
        default: VALUES(first * hyperbolic_tangent(x[i] / first)); break;
    }
}

/* Computes pieces first..last-1: all of the first row, then all of the next. */
static void activate(const activation *a, int64_t first, int64_t last) {
    const int64_t per_row = (a->width + ACTIVATION_PIECE - 1) / ACTIVATION_PIECE;
    float values[ACTIVATION_RUN], above[ACTIVATION_RUN];
    for (int64_t piece = first; piece < last; piece++) {
        const int64_t row = piece / per_row, start = piece % per_row * ACTIVATION_PIECE;
        const int64_t stop = smaller(start + ACTIVATION_PIECE, a->width), repeat = a->repeat;
        const float *x = a->x + row * a->stride, *times = a->times ? a->times + row * a->times_stride : NULL;
        float *y = a->y + row * a->width * repeat;
        for (int64_t at = start; at < stop; at += ACTIVATION_RUN) {
            const int64_t n = smaller(stop - at, ACTIVATION_RUN);
            const int inside = a->kind == ACTIVATION_SWIGLU;
            const float *given = x + at;
            if (a->cutoffs) {
                for (int64_t i = 0; i < n; i++) above[i] = given[i] <= a->cutoffs[row] ? 0.0f : given[i] - a->cutoffs[row];
                given = above;
            }
            activate_run(a, given, inside ? times + at : NULL, n, values);
            if (!times || inside)
                memcpy(y + at, values, (size_t)n * sizeof(float));
            else if (repeat == 1)
                for (int64_t i = 0; i < n; i++) y[at + i] = values[i] * times[at + i];
            else
                for (int64_t i = 0; i < n * repeat; i++)
                    y[at * repeat + i] = values[i / repeat] * times[at * repeat + i];
        }
    }
}
