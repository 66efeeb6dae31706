/* Single values of a matrix of a kind by the words of spans.h, slowly; knows nothing of products. */
#ifndef EDGEINFER_SPAN_VALUES_H
#define EDGEINFER_SPAN_VALUES_H

#include "values.h"

/* What the head of a span says of one column, by groups: in groups of 32 scales and minima are whole, in groups of 16 they
 * are still to be multiplied by d and dmin. */
typedef struct {
    float scales[2 * SPAN_BLOCKS], minima[2 * SPAN_BLOCKS], d, dmin;
} span_column;

static inline float span_half(const uint8_t *entries, int64_t at) {
    return float_of((uint16_t)(entries[2 * at] | entries[2 * at + 1] << 8));
}

/* 2^(e - 128), of which the two least are no normal floats. */
static inline float span_exponent(uint8_t e) { return bits_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }

/* Half of what a UE4M3 stands for; without a fraction's leading one where the exponent is 0. There is no branch, for
 * compilers that else find no vectors in it. */
static inline float span_minifloat(uint8_t code) {
    const uint32_t normal = ((uint32_t)(code & 127) << 20) + (119u << 23), small = float_bits((float)(code & 7) * 0x1p-10f);
    const uint32_t is_normal = 0u - (uint32_t)((code & 0x78) != 0), counts = 0u - (uint32_t)(code != 0x7f);
    return bits_float(((normal & is_normal) | (small & ~is_normal)) & counts);
}

/* Number i of the 6-bit numbers of a column: 8 scales, then 8 minima, packed into 12 bytes; those from the fifth on have
 * their upper two bits with the first four. */
static inline int span_six(const uint8_t *words, int c, int i) {
    const uint8_t *column = words + c * 4;
    const int word = 4 * SPAN_COLUMNS, minimum = i / 8, j = i % 4;
    if (i % 8 < 4) return column[minimum * word + j] & 63;
    return (column[2 * word + j] >> 4 * minimum & 15) | column[minimum * word + j] >> 6 << 4;
}

static inline span_column span_column_of(const kind_facts *kind, const uint8_t *head, int64_t blocks, int c) {
    const int64_t groups = kind->halves ? 2 * blocks : blocks;
    const int row = 2 * SPAN_COLUMNS;
    span_column out = {.d = 1.0f};
    const int super = kind->head == HEAD_SIXES || kind->head == HEAD_BYTES || kind->head == HEAD_NIBBLES;
    if (super) out.d = span_half(head, c);
    if (kind->minimum && super) out.dmin = span_half(head + row, c);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t byte = g * SPAN_COLUMNS + c;
        switch (kind->head) {
            case HEAD_HALF_MINIMUM: out.minima[g] = span_half(head + groups * row, byte); /* fall through */
            case HEAD_HALF: out.scales[g] = span_half(head, byte); break;
            case HEAD_SIXES:
                out.scales[g] = out.d * (float)span_six(head + 2 * row, c, (int)g);
                out.minima[g] = out.dmin * (float)span_six(head + 2 * row, c, 8 + (int)g);
                break;
            case HEAD_BYTES: out.scales[g] = (float)(int8_t)head[row + byte] * (kind->halves ? 1.0f : out.d); break;
            case HEAD_NIBBLES:
                out.scales[g] = (float)(head[2 * row + byte] & 15);
                out.minima[g] = (float)(head[2 * row + byte] >> 4);
                break;
            case HEAD_EXPONENTS: out.scales[g] = span_exponent(head[byte]); break;
            default: out.scales[g] = span_minifloat(head[byte]); break;
        }
    }
    return out;
}

/* The values of column c of a block, less the zero, by ascending k. */
static inline void span_codes(const kind_facts *kind, const uint8_t *data, int c, int16_t *out) {
    for (int k = 0; k < SPAN_BLOCK; k++) {
        const int column = c * 4 + k % 4, run = 4 * SPAN_COLUMNS, s = k / 16, v = k % 16 / 4;
        int code;
        if (kind->bits == 2) code = data[k % 8 / 4 * run + column] >> k / 8 * 2 & 3;
        else if (kind->bits == 3)
            code = (data[s * run + column] >> 2 * v & 3) | (data[2 * run + column] >> (v / 2 * 4 + 2 * s + v % 2) & 1) << 2;
        else
            code = data[v * run + column] >> 4 * s & 15;
        const uint8_t *rest = data + 4 * run + column;
        if (kind->bits == 5) code |= (rest[0] >> (4 * s + v) & 1) << 4;
        if (kind->bits == 6) code |= (rest[v / 2 * run] >> 2 * (2 * (v % 2) + s) & 3) << 4;
        out[k] = (int16_t)((kind->levels ? kind->levels[code] : code) - kind->zero);
    }
}

#endif
