/* Kinds: matrices that hold the numbers of a GGUF file's types as they are. Which there are, and where their bytes lie.
 *
 * Blocks are 32 values of K, tiles 32 columns as in lowbit.h, paired or not; K is a multiple of the kind's `whole`. A tile
 * is one run of bytes, made of spans of 8 blocks (256 values of K), the last one shorter where K is no multiple of 256:
 *     span  head, padded to 64 bytes | values of the first block | values of the second | ...
 * Values of a block, by the kind's code, of which `bits` are stored; k is the position in the block, c the column,
 * s = k / 16, v = k % 16 / 4:
 *     2, 3, 4 bits  as lowbit.h has them in blocks of 32: 256, 384 and 512 bytes
 *     5 bits        512 bytes as of 4 bits, of the lower four; then 128, of which byte c * 4 + k % 4 has the fifth at bit
 *                   4 s + v
 *     6 bits        512 bytes as of 4 bits, of the lower four; then 256, of which byte v / 2 * 128 + c * 4 + k % 4 has the
 *                   upper two from bit 2 (2 (v % 2) + s) on
 * A head has entries of all blocks, each of 32 columns (n blocks; numbers of two bytes and more are little-endian):
 *     HALF          n x 32 float16 d
 *     HALF_MINIMUM  n x 32 float16 d | n x 32 float16: the minimum of the file with its sign turned
 *     SIXES         32 float16 d | 32 float16 dmin | 3 x 32 uint32: the file's 12 bytes of 8 scales and 8 minima
 *     BYTES         32 float16 d | n x 32 int8, or 2 n x 32 of groups of 16
 *     NIBBLES       32 float16 d | 32 float16 dmin | 2 n x 32 bytes: scale in the lower half, minimum in the upper
 *     EXPONENTS     n x 32 bytes e: 2^(e - 128)
 *     MINIFLOATS    2 n x 32 bytes of UE4M3, halved; 0x7f is 0
 * `zero` is what the code counts from; a code of `levels` chooses among them, plus 128.
 *
 * Arithmetic, with a the activation scale of the block, dot its integer product less zero * sum, in order of the blocks:
 *     groups of 32   y = fma((float)dot, s * a, y), s = d or d * scale, which is exact
 *     with minimum   then y = fma(mn, -(a * sum), y), mn = minimum or dmin * minimum, exact too
 *     groups of 16   F = fma(s1, (float)dot1, s0 * (float)dot0) of both halves; y = fma(F, d * a, y). But for MINIFLOATS,
 *                    whose d is 1, F is a whole number below 2^24, so exact
 *     with minimum   then y = fma(-(m0 * sum0 + m1 * sum1), dmin * a, y), of exact whole numbers
 */
#ifndef EDGEINFER_SPANS_H
#define EDGEINFER_SPANS_H

#include <stdint.h>

/* Kinds by number; 0 are the formats of lowbit.h. */
enum {
    KIND_NONE,
    KIND_Q4_0,
    KIND_Q4_1,
    KIND_Q5_0,
    KIND_Q5_1,
    KIND_Q2_K,
    KIND_Q3_K,
    KIND_Q4_K,
    KIND_Q5_K,
    KIND_Q6_K,
    KIND_IQ4_NL,
    KIND_IQ4_XS,
    KIND_MXFP4,
    KIND_NVFP4,
    KINDS
};

enum { SPAN_BLOCK = 32, SPAN_BLOCKS = 8, SPAN_COLUMNS = 32, SPAN_LEVEL_ZERO = 128 };

enum { HEAD_HALF, HEAD_HALF_MINIMUM, HEAD_SIXES, HEAD_BYTES, HEAD_NIBBLES, HEAD_EXPONENTS, HEAD_MINIFLOATS };

typedef struct {
    const char *name;
    int32_t head;
    int32_t bits;
    int32_t halves;        /* groups of 16 */
    int32_t minimum;       /* whether groups have minima */
    int32_t zero;
    int32_t whole;         /* K is a multiple of it */
    const uint8_t *levels; /* of codes that choose, plus SPAN_LEVEL_ZERO; NULL of others */
} kind_facts;

static const uint8_t kind_iq4_levels[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
/* Twice the values of E2M1. */
static const uint8_t kind_e2m1_levels[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

static const kind_facts kinds[KINDS] = {
    [KIND_Q4_0] = {"q4_0", HEAD_HALF, 4, 0, 0, 8, 32, 0},
    [KIND_Q4_1] = {"q4_1", HEAD_HALF_MINIMUM, 4, 0, 1, 0, 32, 0},
    [KIND_Q5_0] = {"q5_0", HEAD_HALF, 5, 0, 0, 16, 32, 0},
    [KIND_Q5_1] = {"q5_1", HEAD_HALF_MINIMUM, 5, 0, 1, 0, 32, 0},
    [KIND_Q2_K] = {"q2_k", HEAD_NIBBLES, 2, 1, 1, 0, 256, 0},
    [KIND_Q3_K] = {"q3_k", HEAD_BYTES, 3, 1, 0, 4, 256, 0},
    [KIND_Q4_K] = {"q4_k", HEAD_SIXES, 4, 0, 1, 0, 256, 0},
    [KIND_Q5_K] = {"q5_k", HEAD_SIXES, 5, 0, 1, 0, 256, 0},
    [KIND_Q6_K] = {"q6_k", HEAD_BYTES, 6, 1, 0, 32, 256, 0},
    [KIND_IQ4_NL] = {"iq4_nl", HEAD_HALF, 4, 0, 0, SPAN_LEVEL_ZERO, 32, kind_iq4_levels},
    [KIND_IQ4_XS] = {"iq4_xs", HEAD_BYTES, 4, 0, 0, SPAN_LEVEL_ZERO, 256, kind_iq4_levels},
    [KIND_MXFP4] = {"mxfp4", HEAD_EXPONENTS, 4, 0, 0, SPAN_LEVEL_ZERO, 32, kind_e2m1_levels},
    [KIND_NVFP4] = {"nvfp4", HEAD_MINIFLOATS, 4, 1, 0, SPAN_LEVEL_ZERO, 64, kind_e2m1_levels},
};

/* Bytes of the values of a block. */
static inline int64_t span_values(const kind_facts *kind) { return (int64_t)kind->bits * SPAN_BLOCK * SPAN_COLUMNS / 8; }

/* Bytes of the head of a span of so many blocks. */
static inline int64_t span_head(const kind_facts *kind, int64_t blocks) {
    int64_t bytes = 0; /* of a column */
    if (kind->head == HEAD_HALF) bytes = 2 * blocks;
    if (kind->head == HEAD_HALF_MINIMUM) bytes = 4 * blocks;
    if (kind->head == HEAD_SIXES) bytes = 4 + 12;
    if (kind->head == HEAD_BYTES) bytes = 2 + (kind->halves ? 2 : 1) * blocks;
    if (kind->head == HEAD_NIBBLES) bytes = 4 + 2 * blocks;
    if (kind->head == HEAD_EXPONENTS) bytes = (blocks + 1) / 2 * 2;
    if (kind->head == HEAD_MINIFLOATS) bytes = 2 * blocks;
    return bytes * SPAN_COLUMNS;
}

static inline int64_t span_bytes(const kind_facts *kind, int64_t blocks) {
    return span_head(kind, blocks) + blocks * span_values(kind);
}

/* Bytes of a tile of so many blocks: spans from first to last. */
static inline int64_t span_tile_bytes(const kind_facts *kind, int64_t blocks) {
    const int64_t rest = blocks % SPAN_BLOCKS;
    return blocks / SPAN_BLOCKS * span_bytes(kind, SPAN_BLOCKS) + (rest ? span_bytes(kind, rest) : 0);
}

#endif
