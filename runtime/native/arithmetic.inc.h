/* Arithmetic that all paths of all kernels share: float bits, norms, int8, the exponential; knows nothing of matrices.
 *
 * Plain C, written so that compilers vectorize it without reordering: compile with -ffp-contract=off, so that only the
 * fused operations written as fmaf are fused, and every path gives the same bits.
 */
#ifndef EDGEINFER_ARITHMETIC_H
#define EDGEINFER_ARITHMETIC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#pragma fp_contract(off)
#endif

#define LANES 16

/* Blocks whose largest value is below this count as zero: 127 / max would overflow. */
static const float TINY_MAX = 1e-35f;
/* Adding 1.5 * 2^23 leaves a float of small magnitude rounded to nearest even in the low bits of its mantissa. */
static const float ROUNDER = 12582912.0f;

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 1 / sqrt(mean of squares + epsilon), summed in a fixed order of 16 lanes. */
static inline float inverse_norm(const float *x, int64_t k, float epsilon) {
    float lanes[LANES] = {0};
    int64_t whole = k / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = fmaf(x[i + l], x[i + l], lanes[l]);
    for (int64_t i = whole; i < k; i++) lanes[i - whole] = fmaf(x[i], x[i], lanes[i - whole]);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return 1.0f / sqrtf(lanes[0] / (float)k + epsilon);
}

static inline void quantize_block(const float *v, int32_t block, int8_t *q, float *scale, int32_t *sum) {
    uint32_t top = 0;
    for (int32_t i = 0; i < block; i++) {
        uint32_t magnitude = float_bits(v[i]) & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
    }
    float max = bits_float(top);
    if (top >= 0x7f800000u || max < TINY_MAX) {
        memset(q, 0, (size_t)(uint32_t)block);
        *sum = 0;
        /* Whatever a value that is not finite is multiplied by, the row's result is not a number. */
        *scale = top >= 0x7f800000u ? bits_float(0x7fc00000u) : 0.0f;
        return;
    }
    float inverse = 127.0f / max;
    int32_t total = 0;
    for (int32_t i = 0; i < block; i++) {
        int32_t value = (int32_t)float_bits(v[i] * inverse + ROUNDER) - 0x4b400000;
        q[i] = (int8_t)value;
        total += value;
    }
    *sum = total;
    *scale = max / 127.0f;
}

/* 2^n, of n + ROUNDER. */
static inline float power_of_two(float shifted) {
    return bits_float((float_bits(shifted) - 0x4b400000u + 127u) << 23);
}

/* exp(x) to 1 ulp or so, the same on every machine: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf). */
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504088896341f + ROUNDER;
    float n = shifted - ROUNDER;
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r + 1.0f);
    return p * power_of_two(shifted);
}

/* x times the logistic function of `steep` x. */
static inline float swish(float x, float steep) { return x / (1.0f + exponential(-(x * steep))); }

/* GELU by tanh, whose 0.5 (1 + tanh(u)) is the logistic function of 2 u. */
static inline float gelu_tanh(float x) { return swish(x, 1.5957691216057308f * fmaf(0.044715f, x * x, 1.0f)); }

static inline float bounded(float x, float low, float high) {
    x = x > high ? high : x;
    return x < low ? low : x;
}

/* gpt-oss's gated activation. */
static inline float clamped_swiglu(float gate, float up) {
    return swish(gate > 7.0f ? 7.0f : gate, 1.702f) * (bounded(up, -7.0f, 7.0f) + 1.0f);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The nearest IEEE half, ties to even; at most 65504 in magnitude. */
static inline uint16_t half_of(float x) {
    uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, top = bits & 0x7fffffffu;
    if (top > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (top >= 0x477fe000u) return (uint16_t)(sign | 0x7bffu);
    /* Below 2^-14 a half counts in 2^-24, which is what the last bit of a float next to 0.5 stands for. */
    if (top < 0x38800000u) return (uint16_t)(sign | (float_bits(bits_float(top) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((top + 0xfffu + (top >> 13 & 1u) - 0x38000000u) >> 13));
}

static inline float float_of(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u, rest = half & 0x3ffu;
    if (exponent == 0) return bits_float(float_bits((float)rest * 5.9604644775390625e-8f) | sign);
    return bits_float(sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | rest << 13);
}

#endif
