/* The AVX2 path: products in pairs of 16 bits, widened before they can overflow; knows only its sums.
 *
 * vpmaddubsw adds two products of unsigned weights and signed activations, saturating at 16 bits; activations are
 * within 127. Pairs of 4-bit weights are within 2 * 15 * 127 = 3810, so 8 of them fit; pairs of 2-bit weights within
 * 762, so 32, a whole block, do. Pairs of 8-bit weights would not fit: their planes are summed apart.
 */
#include "lowbit.h"

#if defined(__AVX2__)

#include "avx256.inc.h"

/* Adds factor * the products of one plane. */
INLINE void add_plane(job j, const uint8_t *data, const uint8_t *ahead, int format, int factor, __m256i sums[PANEL][PARTS]) {
    const int count = slots(format), span = j.block / count;
    const int most = 4 * (format == BITS2 ? 32 : 8) / count, steps = most < span ? most : span;
    const __m256i factors = _mm256_set1_epi16((int16_t)factor);
    for (int start = 0; start < span; start += steps) {
        __m256i pairs[PANEL][PARTS];
        for (int r = 0; r < j.count; r++)
            for (int c = 0; c < j.parts; c++) pairs[r][c] = _mm256_setzero_si256();
        for (int v = start; v < start + steps; v += 4)
            for (int pair = 0; pair < j.parts; pair += 2) {
                const uint8_t *at = data + v * LOWBIT_TILE + pair * 32;
                __m256i left = load(at), right = load(at + 32);
                if (j.count >= FETCH_FROM) fetch(ahead + v * 16);
                for (int s = 0; s < count; s++) {
                    __m256i l = unpack(format, s, left, left), r = unpack(format, s, right, right);
                    for (int i = 0; i < j.count; i++) {
                        __m256i a = four(j.values + i * j.block + s * span + v), *to = pairs[i] + pair;
                        to[0] = _mm256_add_epi16(to[0], _mm256_maddubs_epi16(l, a));
                        to[1] = _mm256_add_epi16(to[1], _mm256_maddubs_epi16(r, a));
                        KEEP(to[0]);
                        KEEP(to[1]);
                    }
                }
            }
        for (int r = 0; r < j.count; r++)
            for (int c = 0; c < j.parts; c++)
                sums[r][c] = _mm256_add_epi32(sums[r][c], _mm256_madd_epi16(pairs[r][c], factors));
    }
}

INLINE void add_dots(job j, __m256i sums[PANEL][PARTS]) {
    if (j.format == BITS8) add_plane(j, j.low, j.low_ahead, BITS4, 1, sums);
    int factor = j.format == BITS8 ? 16 : j.format == HIGH8 ? 32 : 1;
    add_plane(j, j.data, j.ahead, j.format == BITS2 ? BITS2 : BITS4, factor, sums);
}

const lowbit_isa lowbit_avx2 = {"avx2", quantize, multiply};
#else
const lowbit_isa lowbit_avx2 = {"avx2", NULL, NULL};
#endif
