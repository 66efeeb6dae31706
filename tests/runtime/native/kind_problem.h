/* Random matrices of a kind for the driver, packed by the letter of spans.h; knows nothing of products. */
#ifndef EDGEINFER_TEST_KIND_PROBLEM_H
#define EDGEINFER_TEST_KIND_PROBLEM_H

#include <math.h>
#include <string.h>

#include "lowbit.h"
#include "random.h"

/* Bytes of a head by blocks, and bytes before them. */
static const int HEAD_FIXED[KINDS] = {[KIND_Q2_K] = 128, [KIND_Q3_K] = 64, [KIND_Q4_K] = 512, [KIND_Q5_K] = 512,
                                      [KIND_Q6_K] = 64, [KIND_IQ4_XS] = 64};
static const int HEAD_BLOCK[KINDS] = {
    [KIND_Q4_0] = 64, [KIND_Q4_1] = 128, [KIND_Q5_0] = 64, [KIND_Q5_1] = 128, [KIND_Q2_K] = 64, [KIND_Q3_K] = 64,
    [KIND_Q6_K] = 64, [KIND_IQ4_NL] = 64, [KIND_IQ4_XS] = 32, [KIND_MXFP4] = 32, [KIND_NVFP4] = 64};
static const int ZERO[KINDS] = {[KIND_Q4_0] = 8, [KIND_Q5_0] = 16, [KIND_Q3_K] = 4, [KIND_Q6_K] = 32};
static const int IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* A group's scale and what is taken off its weights. */
typedef struct {
    double scale, minimum;
} group_numbers;

static int64_t head_size(int kind, int64_t n) { return (HEAD_FIXED[kind] + n * HEAD_BLOCK[kind] + 63) / 64 * 64; }

static double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, rest = bits & 1023;
    const double size = exponent ? ldexp(1024 + rest, exponent - 25) : ldexp(rest, -24);
    return bits >> 15 ? -size : size;
}

/* Float16 of moderate size, now and then zero, subnormal or negative. */
static uint16_t random_half(void) {
    const int exponent = chance(4) ? 0 : 5 + (int)below(6);
    return (uint16_t)((chance(10) ? 1 << 15 : 0) | exponent << 10 | (chance(4) ? 0 : below(1024)));
}

static double put_half(uint8_t *at) {
    const uint16_t bits = random_half();
    at[0] = (uint8_t)bits, at[1] = (uint8_t)(bits >> 8);
    return half_value(bits);
}

/* llama.cpp's way of reading a scale and a minimum out of 12 bytes. */
static void sixes(const uint8_t *q, int j, double *scale, double *minimum) {
    *scale = j < 4 ? q[j] & 63 : (q[j + 4] & 15) | q[j - 4] >> 6 << 4;
    *minimum = j < 4 ? q[j + 4] & 63 : q[j + 4] >> 4 | q[j] >> 6 << 4;
}

/* Fills column c of a span's head at random; `out` has its groups. Style 1 has the least scales. */
static void put_head(int kind, uint8_t *head, int64_t n, int c, int style, group_numbers *out) {
    const int64_t groups = kinds[kind].halves ? 2 * n : n;
    const int two = kind == KIND_Q2_K || kind == KIND_Q4_K || kind == KIND_Q5_K;
    const double d = HEAD_FIXED[kind] ? put_half(head + 2 * c) : 0, dmin = two ? put_half(head + 64 + 2 * c) : 0;
    uint8_t packed[12];
    for (int i = 0; i < 12 && HEAD_FIXED[kind] == 512; i++) {
        packed[i] = (uint8_t)below(256);
        head[128 + i / 4 * 128 + c * 4 + i % 4] = packed[i];
    }
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *byte = head + HEAD_FIXED[kind] + g * 32 + c;
        double scale, minimum = 0.0;
        if (kind == KIND_Q4_1 || kind == KIND_Q5_1) minimum = put_half(head + n * 64 + g * 64 + c * 2);
        switch (kind) {
        case KIND_Q4_K:
        case KIND_Q5_K:
            sixes(packed, (int)g, &scale, &minimum);
            scale *= d, minimum *= dmin;
            break;
        case KIND_Q2_K:
            *byte = (uint8_t)below(256);
            scale = d * (*byte & 15), minimum = dmin * (*byte >> 4);
            break;
        case KIND_Q3_K:
        case KIND_IQ4_XS:
            *byte = (uint8_t)(style == 1 ? -32 : below(64) - 32);
            scale = d * (int8_t)*byte;
            break;
        case KIND_Q6_K:
            *byte = (uint8_t)(style == 1 ? -128 : below(256) - 128);
            scale = d * (int8_t)*byte;
            break;
        case KIND_MXFP4:
            *byte = (uint8_t)(chance(5) ? below(3) : 112 + below(12));
            scale = ldexp(1.0, *byte - 128);
            break;
        case KIND_NVFP4:
            *byte = (uint8_t)(chance(5) ? 0x7f : below(100));
            scale = *byte >= 8 ? ldexp(8 + *byte % 8, *byte / 8 - 11) : ldexp(*byte, -10);
            if (*byte == 0x7f) scale = 0.0;
            break;
        default: scale = put_half(head + g * 64 + c * 2); break;
        }
        out[g] = (group_numbers){scale, minimum};
    }
}

/* Adds code q of position k of a block in column c. */
static void put_code(int bits, uint8_t *data, int64_t k, int64_t c, int q) {
    const int64_t s = k / 16, v = k % 16 / 4, column = c * 4 + k % 4;
    uint8_t *two = data + k % 8 / 4 * 128 + column, *low = data + s * 128 + column, *high = data + 256 + column;
    uint8_t *four = data + v * 128 + column, *fifth = data + 512 + column, *upper = data + 512 + v / 2 * 128 + column;
    if (bits == 2) *two = (uint8_t)(*two | q << k / 8 * 2);
    if (bits == 3) *low = (uint8_t)(*low | (q & 3) << 2 * v), *high = (uint8_t)(*high | q >> 2 << (v / 2 * 4 + 2 * s + v % 2));
    if (bits > 3) *four = (uint8_t)(*four | (q & 15) << 4 * s);
    if (bits == 5) *fifth = (uint8_t)(*fifth | q >> 4 << (4 * s + v));
    if (bits == 6) *upper = (uint8_t)(*upper | q >> 4 << 2 * (2 * (v % 2) + s));
}

static int level_of(int kind, int q) {
    if (kind == KIND_IQ4_NL || kind == KIND_IQ4_XS) return IQ4[q];
    return kind == KIND_MXFP4 || kind == KIND_NVFP4 ? E2M1_DOUBLED[q] : q - ZERO[kind];
}

/* Bytes of a tile of `blocks`. */
static int64_t tile_size(int kind, int64_t blocks) {
    int64_t bytes = blocks * kinds[kind].bits * 128;
    for (int64_t b = 0; b < blocks; b += 8) bytes += head_size(kind, blocks - b < 8 ? blocks - b : 8);
    return bytes;
}

/* Fills row `lane` of a tile at random; `dense` has its weights, `minima` what was taken off them, of each 16. */
static void put_row(int kind, uint8_t *span, int64_t blocks, int lane, double *dense, double *minima) {
    const int bits = kinds[kind].bits, halves = kinds[kind].halves, style = (int)below(6);
    group_numbers groups[16];
    for (int64_t start = 0; start < blocks; start += 8) {
        const int64_t n = blocks - start < 8 ? blocks - start : 8, head = head_size(kind, n);
        put_head(kind, span, n, lane, style, groups);
        for (int64_t k = 0; k < n * 32; k++) {
            const int q = style == 0 ? (1 << bits) - 1 : style == 1 ? 0 : (int)below(1 << bits);
            const group_numbers *g = &groups[k / (halves ? 16 : 32)];
            put_code(bits, span + head + k / 32 * bits * 128, k % 32, lane, q);
            dense[start * 32 + k] = level_of(kind, q) * g->scale - g->minimum;
            minima[(start * 32 + k) / 16] = g->minimum;
        }
        span += head + n * bits * 128;
    }
}

#endif
