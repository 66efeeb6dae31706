/* The NEON dot-product path, Armv8.2 with dotprod: knows how a row's products are summed, nothing of panels or tiles.
 *
 * sdot adds four products of signed weights and activations per lane, exactly. Weights of 2 and 4 bits are the same
 * signed or not; those of 8 bits are taken less 128, which the zero point makes up for.
 */
#include "lowbit.h"

#if defined(__ARM_FEATURE_DOTPROD) || (defined(_MSC_VER) && defined(_M_ARM64))
#include <arm_neon.h>

enum { PAIRS = 0, BIAS8 = 128 };
typedef int8x8_t activations;

#include "neon.inc.h"

INLINE activations fetch(int pairs, const int8_t *row, const int8_t *next) {
    (void)pairs, (void)next;
    return vld1_s8(row);
}

INLINE void arrange(int format, int pairs, uint8x16_t *weights) {
    (void)pairs;
    for (int half = 0; half < 2 && format == BITS8; half++)
        weights[half] = veorq_u8(weights[half], vdupq_n_u8(BIAS8));
}

INLINE void accumulate(int pairs, const uint8x16_t *weights, activations a, int32x4_t *even, int32x4_t *odd) {
    (void)pairs, (void)odd;
    *even = vdotq_lane_s32(*even, vreinterpretq_s8_u8(weights[0]), a, 0);
    *even = vdotq_lane_s32(*even, vreinterpretq_s8_u8(weights[1]), a, 1);
}

INLINE void collect(int32x4_t *even, int32x4_t *odd) { (void)even, (void)odd; }

const lowbit_isa lowbit_neon_dot = {"neon-dot", quantize, multiply};
#else
const lowbit_isa lowbit_neon_dot = {"neon-dot", NULL, NULL};
#endif
