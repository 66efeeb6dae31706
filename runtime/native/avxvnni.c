/* The AVX-VNNI path: four exact products to a lane in one instruction of 256 bits; knows only its sums. */
#include "lowbit.h"

#if defined(__AVXVNNI__) || (defined(_MSC_VER) && !defined(__clang__) && defined(__AVX2__))

#include "avx256.inc.h"

INLINE void add_dots(job j, __m256i sums[PANEL][PARTS]) {
    const int count = slots(j.format), span = j.block / count, both = j.format == BITS8;
    const int split = j.count * j.parts <= (j.format == BITS4 || j.format == HIGH8 ? 6 : 4);
    __m256i dots[PANEL][PARTS], more[PANEL][PARTS];
    for (int r = 0; r < j.count; r++)
        for (int c = 0; c < j.parts; c++) {
            dots[r][c] = j.format == HIGH8 ? _mm256_setzero_si256() : sums[r][c];
            more[r][c] = _mm256_setzero_si256();
        }
    for (int v = 0; v < span; v += 4)
        for (int pair = 0; pair < j.parts; pair += 2) {
            const int at = v * LOWBIT_TILE + pair * 32;
            __m256i left = load(j.data + at), right = load(j.data + at + 32);
            __m256i low_left = both ? load(j.low + at) : left, low_right = both ? load(j.low + at + 32) : right;
            if (j.count >= FETCH_FROM) fetch(j.ahead + v * 16);
            if (j.count >= FETCH_FROM && both) fetch(j.low_ahead + v * 16);
            for (int s = 0; s < count; s++) {
                __m256i l = unpack(j.format, s, left, low_left), r = unpack(j.format, s, right, low_right);
                for (int i = 0; i < j.count; i++) {
                    __m256i a = four(j.values + i * j.block + s * span + v);
                    __m256i *dot = (split && s % 2 ? more[i] : dots[i]) + pair;
                    dot[0] = _mm256_dpbusd_avx_epi32(dot[0], l, a);
                    dot[1] = _mm256_dpbusd_avx_epi32(dot[1], r, a);
                    KEEP(dot[0]);
                    KEEP(dot[1]);
                }
            }
        }
    for (int r = 0; r < j.count; r++)
        for (int c = 0; c < j.parts; c++) {
            __m256i dot = split ? _mm256_add_epi32(dots[r][c], more[r][c]) : dots[r][c];
            sums[r][c] = j.format == HIGH8 ? _mm256_add_epi32(sums[r][c], _mm256_slli_epi32(dot, 5)) : dot;
        }
}

const lowbit_isa lowbit_avxvnni = {"avxvnni", quantize, multiply};
#else
const lowbit_isa lowbit_avxvnni = {"avxvnni", NULL, NULL};
#endif
