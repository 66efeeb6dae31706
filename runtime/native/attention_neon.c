/* The NEON path of attention and of float matrices: a vector is four registers; knows only its operations. */
#include "arithmetic.inc.h"
#include "attention.h"
#include "tile.h"

#if defined(__ARM_FEATURE_DOTPROD) || (defined(_MSC_VER) && defined(_M_ARM64))
#include <arm_neon.h>

typedef struct {
    float32x4_t part[4];
} vec;

#define EACH(expression)                                            \
    vec out;                                                        \
    for (int i = 0; i < 4; i++) out.part[i] = (expression);         \
    return out

INLINE vec vec_set(float x) { EACH(vdupq_n_f32(x)); }
INLINE vec vec_load(const float *at) { EACH(vld1q_f32(at + 4 * i)); }
INLINE void vec_store(float *at, vec x) {
    for (int i = 0; i < 4; i++) vst1q_f32(at + 4 * i, x.part[i]);
}
INLINE void vec_transpose(const float *from, int64_t step, float *to) {
    for (int64_t i = 0; i < LANES; i += 4)
        for (int64_t c = 0; c < LANES; c += 4) {
            const float *at = from + i * step + c;
            const float32x4x2_t even = vtrnq_f32(vld1q_f32(at), vld1q_f32(at + step));
            const float32x4x2_t odd = vtrnq_f32(vld1q_f32(at + 2 * step), vld1q_f32(at + 3 * step));
            for (int r = 0; r < 2; r++) {
                vst1q_f32(to + (c + r) * LANES + i, vcombine_f32(vget_low_f32(even.val[r]), vget_low_f32(odd.val[r])));
                vst1q_f32(to + (c + r + 2) * LANES + i, vcombine_f32(vget_high_f32(even.val[r]), vget_high_f32(odd.val[r])));
            }
        }
}
#if defined(_MSC_VER) && !defined(__clang__)
INLINE void vec_fetch(intptr_t at) { __prefetch((const void *)at); }
#else
INLINE void vec_fetch(intptr_t at) { __builtin_prefetch((const void *)at); }
#endif
INLINE vec vec_add(vec a, vec b) { EACH(vaddq_f32(a.part[i], b.part[i])); }
INLINE vec vec_sub(vec a, vec b) { EACH(vsubq_f32(a.part[i], b.part[i])); }
INLINE vec vec_mul(vec a, vec b) { EACH(vmulq_f32(a.part[i], b.part[i])); }
INLINE vec vec_div(vec a, vec b) { EACH(vdivq_f32(a.part[i], b.part[i])); }
INLINE vec vec_fma(vec a, vec b, vec c) { EACH(vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
INLINE vec vec_abs(vec x) { EACH(vabsq_f32(x.part[i])); }
INLINE vec vec_sign(vec size, vec of) { EACH(vbslq_f32(vdupq_n_u32(0x80000000u), of.part[i], size.part[i])); }
/* The instruction of that name would give what is not a number from either side. */
INLINE vec vec_max(vec a, vec b) { EACH(vbslq_f32(vcgtq_f32(a.part[i], b.part[i]), a.part[i], b.part[i])); }

INLINE vec vec_zero_below(vec x, vec least, vec y) {
    EACH(vbslq_f32(vcltq_f32(x.part[i], least.part[i]), vdupq_n_f32(0.0f), y.part[i]));
}

INLINE float32x4_t part_within(float32x4_t x, int from, int to, float32x4_t other) {
    static const int32_t LANE[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(LANE);
    const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to)));
    return vbslq_f32(inside, x, other);
}

INLINE vec vec_within(vec x, int from, int to, vec other) {
    EACH(part_within(x.part[i], from - 4 * i, to - 4 * i, other.part[i]));
}

INLINE float32x4_t part_power(float32x4_t shifted) {
    const uint32x4_t n = vsubq_u32(vreinterpretq_u32_f32(shifted), vdupq_n_u32(0x4b400000u - 127u));
    return vreinterpretq_f32_u32(vshlq_n_u32(n, 23));
}

INLINE vec vec_power(vec shifted) { EACH(part_power(shifted.part[i])); }

INLINE float vec_fold_sum(vec x) {
    const float32x4_t even = vaddq_f32(x.part[0], x.part[2]), odd = vaddq_f32(x.part[1], x.part[3]);
    const float32x4_t four = vaddq_f32(even, odd);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE float vec_fold_max(vec x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.part[0], x.part[1]), vmaxq_f32(x.part[2], x.part[3])));
}

INLINE vec vec_bfloats(const uint8_t *at) {
    EACH(vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(at + 8 * i))), 16)));
}
INLINE vec vec_halves(const uint8_t *at) {
    EACH(vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at + 8 * i))));
}

INLINE float32x4_t four_int8(const int8_t *at) {
    int32_t word;
    memcpy(&word, at, sizeof word);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

INLINE vec vec_int8(const int8_t *at) { EACH(four_int8(at + 4 * i)); }

INLINE vec vec_levels(uint8x16_t bytes) {
    const uint16x8_t wide[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
    EACH(vcvtq_f32_u32(vmovl_u16(i % 2 ? vget_high_u16(wide[i / 2]) : vget_low_u16(wide[i / 2]))));
}

INLINE vec vec_halves_of(const uint8_t *at, int high) {
    const uint8x16_t bytes = vld1q_u8(at);
    return vec_levels(high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
}

INLINE vec vec_eight(const uint8_t *at) {
    const uint8x8_t bytes = vld1_u8(at);
    return vec_levels(vcombine_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)));
}

INLINE float32x4_t four_nibbles(const uint8_t *at, int shift) {
    const uint32x4_t moved = vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(at)), vdupq_n_s32(-shift));
    return vcvtq_f32_u32(vandq_u32(moved, vdupq_n_u32(15)));
}

INLINE vec vec_nibbles(const uint8_t *at, int c, int high) { EACH(four_nibbles(at + 16 * i, 8 * c + 4 * high)); }

typedef struct {
    int32x4_t part[4];
} ivec;
typedef struct {
    int8x16_t part[4];
} kvec;

#define EACH_INT(expression)                                \
    ivec out;                                               \
    for (int i = 0; i < 4; i++) out.part[i] = (expression); \
    return out

INLINE ivec ivec_set(int32_t x) { EACH_INT(vdupq_n_s32(x)); }
INLINE vec ivec_float(ivec x) { EACH(vcvtq_f32_s32(x.part[i])); }
INLINE int32_t ivec_fold_max(ivec x) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.part[0], x.part[1]), vmaxq_s32(x.part[2], x.part[3])));
}

INLINE int32x4_t bits_of(float32x4_t x) { return vandq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(0x7fffffff)); }
INLINE ivec ivec_max_bits(ivec most, vec x) { EACH_INT(vmaxq_s32(most.part[i], bits_of(x.part[i]))); }

enum { KEY_BIAS = 0 };
INLINE kvec kvec_load(const uint8_t *at) {
    kvec out;
    for (int i = 0; i < 4; i++) out.part[i] = vreinterpretq_s8_u8(vld1q_u8(at + 16 * i));
    return out;
}
INLINE ivec ivec_dot(ivec sum, kvec k, int32_t q) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(q));
    EACH_INT(vdotq_s32(sum.part[i], k.part[i], four));
}

INLINE void vec_store_levels(int16_t *at, vec shifted) {
    /* The lowest 16 bits of ROUNDER are 0. */
    for (int i = 0; i < 4; i++) vst1_s16(at + 4 * i, vmovn_s32(vreinterpretq_s32_f32(shifted.part[i])));
}

typedef struct {
    int16x8_t row[4][2];
} four;

INLINE four four_load(const int8_t *at) {
    const int8x16x4_t rows = vld4q_s8(at); /* of positions 0, 2, 1, 3 */
    four out;
    for (int i = 0; i < 4; i++)
        out.row[i][0] = vmovl_s8(vget_low_s8(rows.val[i])), out.row[i][1] = vmovl_s8(vget_high_s8(rows.val[i]));
    return out;
}

INLINE int32x4_t add_positions(int32x4_t sum, int16x4_t a, int16x4_t b, int16x4_t c, int16x4_t d, int16x4_t levels) {
    sum = vmlal_lane_s16(sum, a, levels, 0);
    sum = vmlal_lane_s16(sum, b, levels, 2);
    sum = vmlal_lane_s16(sum, c, levels, 1);
    return vmlal_lane_s16(sum, d, levels, 3);
}

INLINE ivec ivec_add_four(ivec sum, four v, const int16_t *at) {
    const int16x4_t levels = vld1_s16(at);
    for (int half = 0; half < 2; half++) {
        sum.part[2 * half] = add_positions(sum.part[2 * half], vget_low_s16(v.row[0][half]), vget_low_s16(v.row[1][half]),
                                           vget_low_s16(v.row[2][half]), vget_low_s16(v.row[3][half]), levels);
        sum.part[2 * half + 1] =
            add_positions(sum.part[2 * half + 1], vget_high_s16(v.row[0][half]), vget_high_s16(v.row[1][half]),
                          vget_high_s16(v.row[2][half]), vget_high_s16(v.row[3][half]), levels);
    }
    return sum;
}

/* Six rows of sums fill 24 of 32 registers. */
enum { PANEL = 6, WIDE_ROWS = 2, INT_PANEL = 4, INT_WIDTH = 1 };
#define EVERY_ROWS(what) what(1) what(2) what(3) what(4) what(5) what(6)
#define EVERY_INT_ROWS(what) what(1) what(2) what(3) what(4)

#include "attention.inc.h"
#include "floats.inc.h"
#include "activation.inc.h"
#include "recurrence.inc.h"

const attention_path attention_neon = {"neon", write_rows, attend, merge,
                                       normalise_floats, multiply_floats, activate, &recurrence_functions};
#else
const attention_path attention_neon = {"neon", NULL, NULL, NULL, NULL, NULL, NULL};
#endif
