/* Low-bit matrices times float rows: the contract between the kernels of every instruction set and their callers.
 *
 * Knows nothing of ONNX Runtime, threads or files. No allocation and no global state in the kernels.
 *
 * Layout of a matrix W (N, K), quantized in blocks of B values along K. Columns of the product (rows of W) come in
 * tiles of 32; N is padded to whole tiles and K to whole blocks, with zeros. A byte holds
 * P = 8 / bits values of one column (planes of 8-bit matrices count as 4 bits), B / P values of K apart, the first in
 * the lowest bits. With t = n / 32, c = n % 32, b = k / B, j = k % B, S = B / P, r = j % S:
 *     byte  (t * blocks + b) * 32 * S + r / 4 * 128 + c * 4 + r % 4
 *     shift j / S * bits
 * so 128 bytes are 32 columns by 4 consecutive k: two registers of 512 bits, four of 256 or eight of 128. A tile is
 * one run of bytes, read from first to last: two runs side by side halve what one core gets from memory.
 * A 3-bit value is 4 * high + low. Every 32 values along K are three such runs of 128 bytes, two of low parts and one
 * of high bits; with i = k % 32, h = i / 16, s = i % 16 / 4 they are at
 *     byte  ((t * blocks + b) * B / 32 + j / 32) * 384 + c * 4 + i % 4, plus 128 * h of low parts, 256 of high bits
 *     shift 2 * s of low parts, s / 2 * 4 + 2 * h + s % 2 of high bits
 * so one select by bits makes of two runs a byte with the values s and s + 2 in its halves.
 * An 8-bit value is 16 * high + low; the two 4-bit planes lie apart, so that the high one can be read alone: it then
 * stands for 16 * high + 7.5, the middle of the values it may be part of.
 * Scales are bfloat16 and zero points uint8, both (tiles, blocks, 32). Without zero points the zero is 2^(bits-1).
 * Inline scales lie before the values of their block, whose 32 S bytes then come 64 bytes later and as far apart: one
 * run of bytes instead of two.
 * A code of E2M1 (OCP Microscaling Formats) stands for twice its value, plus 12; its zero is 12.
 * A byte of vectors, of 2 bits, is one code for its four values, S apart as above: the low half chooses the magnitudes in
 * the codebook of values.h, bit 4 + j / S the sign of value j / S. Values are 8 plus or minus a magnitude; their zero is 8.
 * Without inline ones, scales may be float16 instead, as GGUF's Q8_0 has them.
 * A matrix of a kind is laid out as spans.h tells, and has `data` alone.
 * A paired matrix holds two of N/2 rows each, gate and up: columns 0 to 15 of tile t are rows 16 t.. of the
 * first, columns 16 to 31 the same rows of the second.
 *
 * Arithmetic, the same in every path to the last bit: activations are quantized to int8 by block (scale = max / 127,
 * nearest, ties to even); per block, the integer dot product less zero * sum is exact; then in order of the blocks
 *     y = fma((float)dot, weight_scale * activation_scale, y)
 * so a row's result does not depend on other rows, the split over threads or the instruction set.
 */
#ifndef EDGEINFER_LOWBIT_H
#define EDGEINFER_LOWBIT_H

#include <stddef.h>
#include <stdint.h>

#include "spans.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { LOWBIT_TILE = 32, LOWBIT_GROUP = 16 };
/* Values along K that lie together at 3 bits, the bytes of 32 columns of them, and where those of their high bits begin. */
enum { LOWBIT_CHUNK = 32, LOWBIT_CHUNK_BYTES = 384, LOWBIT_CHUNK_HIGH = 256 };

typedef struct {
    int64_t n, k;           /* logical sizes: outputs, inputs */
    int32_t bits;           /* 2, 3, 4 or 8; of a kind those of its code */
    int32_t block;          /* 32, 64 or 128; 32 of a kind */
    int32_t paired;         /* gate and up share tiles; n counts both */
    int32_t e2m1;           /* values of 4 bits are codes of E2M1, in blocks of 32 without zero points */
    int32_t vectors;        /* bytes of 2 bits are codes of vectors, in whole blocks without zero points */
    int32_t inline_scales;  /* scales lie in the bytes of `data`, which points behind the first ones */
    int32_t float16;        /* scales are float16: of 2 bits in blocks of 64 or 128, of 8 bits in blocks of 32 */
    int32_t kind;           /* of spans.h; 0 are the formats above */
    const uint8_t *data;    /* the values; of 8-bit matrices the high plane. 64-byte aligned for speed only */
    const uint8_t *low;     /* low plane; NULL reads an 8-bit matrix by its high plane alone */
    const uint16_t *scales; /* bfloat16 (tiles, blocks, 32); inline ones lowbit_scale_step apart from block to block */
    const uint8_t *zeros;   /* (tiles, blocks, 32), or NULL: the middle */
} lowbit_matrix;

/* Rows of activations, quantized. Blocks come first, so that a tile reads what it needs of all rows in one run. */
typedef struct {
    int64_t m, k;
    int32_t block;
    int8_t *values; /* (blocks, m, block), the last block padded with zeros; 64-byte aligned */
    float *scales;  /* (blocks, m) */
    int32_t *sums;  /* (blocks, m): sums of the int8 values */
    int32_t *halves; /* (blocks, m): of their first 16 values, in blocks of 32; NULL in others */
} lowbit_rows;

/* What is done with the product. */
typedef struct {
    float *y;              /* (m, width): width is n, or n / 2 of paired matrices with swiglu */
    const float *bias;     /* (n) or NULL */
    const float *residual; /* (m, width) or NULL: added last; may be y itself */
    int32_t swiglu;        /* silu(gate) * up of paired matrices, silu(y) of others; 2: gpt-oss's, of paired ones;
                            * 3: the square of what is positive, of others; 4: gelu_tanh(gate) * up of paired ones */
    int64_t stride;        /* without swiglu: from one row of y and residual to the next; 0 is width */
    float factor;          /* without swiglu: multiplies the product before all else; 0 for none */
} lowbit_output;

/* How rows become activations. */
typedef struct {
    const float *x;      /* (m, k) */
    const float *weight; /* (k) or NULL: root-mean-square normalisation before quantizing */
    float epsilon;
} lowbit_input;

typedef struct {
    const char *name;
    /* Quantizes rows first..last-1 of `in` into `rows`. */
    void (*quantize)(const lowbit_input *in, const lowbit_rows *rows, int64_t first, int64_t last);
    /* Computes tiles first..last-1 for all rows. */
    void (*multiply)(const lowbit_matrix *w, const lowbit_rows *rows, const lowbit_output *out, int64_t first,
                     int64_t last);
} lowbit_isa;

static inline int64_t lowbit_blocks(int64_t k, int32_t block) { return (k + block - 1) / block; }

static inline int64_t lowbit_tiles(const lowbit_matrix *w) {
    int64_t per_tile = w->paired ? LOWBIT_GROUP : LOWBIT_TILE;
    return ((w->paired ? w->n / 2 : w->n) + per_tile - 1) / per_tile;
}

/* Bytes of one tile and block of a plane: 32 columns. */
static inline int64_t lowbit_step(const lowbit_matrix *w) { return (int64_t)w->block * 4 * (w->bits == 8 ? 4 : w->bits); }

/* Bytes of `data` from one block to the next. */
static inline int64_t lowbit_data_step(const lowbit_matrix *w) {
    return lowbit_step(w) + (w->inline_scales ? LOWBIT_TILE * (int64_t)sizeof(uint16_t) : 0);
}

/* Scales from those of one block to those of the next. */
static inline int64_t lowbit_scale_step(const lowbit_matrix *w) {
    return w->inline_scales ? lowbit_data_step(w) / (int64_t)sizeof(uint16_t) : LOWBIT_TILE;
}

/* Bytes of `data` from one tile to the next. */
static inline int64_t lowbit_tile_bytes(const lowbit_matrix *w) {
    const int64_t blocks = lowbit_blocks(w->k, w->block);
    return w->kind ? span_tile_bytes(&kinds[w->kind], blocks) : blocks * lowbit_data_step(w);
}

/* One row of W, dequantized: (k). */
void lowbit_row(const lowbit_matrix *w, int64_t n, float *out);

/* Instruction sets compiled into this library, best first; the last is portable. NULL past the end. */
const lowbit_isa *lowbit_isa_at(size_t index);
/* Whether this machine can run it. */
int lowbit_usable(const lowbit_isa *isa);

extern const lowbit_isa lowbit_portable;

/* Multiply-adds done in `rounds` rounds of the path's multiply instruction; 0 where it has none. */
int64_t lowbit_probe_dots(const lowbit_isa *isa, int64_t rounds);
/* Reads `count` words and returns their sum. */
uint64_t lowbit_probe_read(const uint64_t *words, size_t count);

#ifdef __cplusplus
}
#endif
#endif
