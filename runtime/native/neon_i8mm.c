/* The NEON matrix path, Armv8.2 with i8mm: knows how products of two rows are summed, nothing of panels or tiles.
 *
 * usmmla multiplies 2 columns of unsigned weights by 2 rows of activations, 8 k deep, exactly: zipping the words of two
 * steps of 4 k gives it its columns. A row by itself would leave half of it idle and takes usdot.
 */
#include "lowbit.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include <arm_neon.h>

enum { PAIRS = 1, BIAS8 = 0 };
typedef int8x16_t activations;

#include "neon.inc.h"

INLINE activations fetch(int pairs, const int8_t *row, const int8_t *next) {
    int8x8_t values = vld1_s8(row);
    return vcombine_s8(values, pairs ? vld1_s8(next) : values);
}

INLINE void arrange(int format, int pairs, uint8x16_t *weights) {
    (void)format;
    if (!pairs) return;
    uint32x4_t left = vreinterpretq_u32_u8(weights[0]), right = vreinterpretq_u32_u8(weights[1]);
    weights[0] = vreinterpretq_u8_u32(vzip1q_u32(left, right));
    weights[1] = vreinterpretq_u8_u32(vzip2q_u32(left, right));
}

/* In pairs `even` sums columns 0 and 1, `odd` columns 2 and 3, each of them for both rows. */
INLINE void accumulate(int pairs, const uint8x16_t *weights, activations a, int32x4_t *even, int32x4_t *odd) {
    if (pairs) {
        *even = vusmmlaq_s32(*even, weights[0], a);
        *odd = vusmmlaq_s32(*odd, weights[1], a);
    } else {
        *even = vusdotq_laneq_s32(*even, weights[0], a, 0);
        *even = vusdotq_laneq_s32(*even, weights[1], a, 1);
    }
}

INLINE void collect(int32x4_t *even, int32x4_t *odd) {
    int32x4_t first = vuzp1q_s32(*even, *odd);
    *odd = vuzp2q_s32(*even, *odd);
    *even = first;
}

const lowbit_isa lowbit_neon_i8mm = {"neon-i8mm", quantize, multiply};
#else
const lowbit_isa lowbit_neon_i8mm = {"neon-i8mm", NULL, NULL};
#endif
