/* The AVX-VNNI path: vpdpbusd adds four products of unsigned weights and signed activations per lane, exactly; knows
 * only its sums.
 */
#include "lowbit.h"

#if defined(__AVXVNNI__) || (defined(_MSC_VER) && !defined(__clang__) && defined(__AVX2__))

#include "avx256.inc.h"

/* Adds the products of 3-bit weights. */
INLINE void add_chunks(piece p, __m256i sums[PANEL][REGISTERS]) {
    const __m256i mask = _mm256_set1_epi8(7);
    for (int k = 0; k < p.block; k += LOWBIT_CHUNK) {
        fetch_chunk(p, k);
        for (int part = 0; part < 4; part++)
            for (int c = 0; c < p.width; c++) {
                __m256i both = nibbles3(p.data + k * k_bytes(BITS3) + c * 32, part / 2, part % 2);
                for (int upper = 0; upper < 2; upper++) {
                    __m256i weights = _mm256_and_si256(upper ? _mm256_srli_epi16(both, 4) : both, mask);
                    for (int i = 0; i < p.rows; i++) {
                        const int8_t *at = p.values + i * p.block + k + part / 2 * 16 + (part % 2 + 2 * upper) * 4;
                        sums[i][c] = _mm256_dpbusd_avx_epi32(sums[i][c], weights, four(at));
                        KEEP(sums[i][c]);
                    }
                }
            }
    }
}

INLINE void add_dots(piece p, __m256i sums[PANEL][REGISTERS]) {
    if (p.format == BITS3) {
        add_chunks(p, sums);
        return;
    }
    const int slots = values_per_byte(p.format), span = p.block / slots, both = p.format == BITS8;
    /* An addition takes 4 or 5 cycles, and two start in each: where registers are left, every other value of a byte has
     * sums of its own. */
    const int apart = p.rows * p.width <= (has_fours(p.format) || both ? 4 : 6);
    __m256i dots[PANEL][REGISTERS], more[PANEL][REGISTERS];
    for (int i = 0; i < p.rows; i++)
        for (int c = 0; c < p.width; c++) {
            dots[i][c] = p.format == HIGH8 ? _mm256_setzero_si256() : sums[i][c];
            more[i][c] = _mm256_setzero_si256();
        }
    for (int v = 0; v < span; v += 4)
        for (int c = 0; c < p.width; c += 2) {
            const int at = v * LOWBIT_TILE + c * 32;
            __m256i left = load(p.data + at), right = load(p.data + at + 32);
            __m256i low_left = both ? load(p.low + at) : left, low_right = both ? load(p.low + at + 32) : right;
            fetch(p, p.data, v, c);
            if (both) fetch(p, p.low, v, c);
            for (int s = 0; s < slots; s++) {
                __m256i l = unpack(p.format, s, left, low_left), r = unpack(p.format, s, right, low_right);
                for (int i = 0; i < p.rows; i++) {
                    __m256i a = four(p.values + i * p.block + s * span + v);
                    __m256i *dot = (apart && s % 2 ? more[i] : dots[i]) + c;
                    dot[0] = _mm256_dpbusd_avx_epi32(dot[0], l, a);
                    dot[1] = _mm256_dpbusd_avx_epi32(dot[1], r, a);
                    KEEP(dot[0]);
                    KEEP(dot[1]);
                }
            }
        }
    for (int i = 0; i < p.rows; i++)
        for (int c = 0; c < p.width; c++) {
            __m256i dot = apart ? _mm256_add_epi32(dots[i][c], more[i][c]) : dots[i][c];
            /* By the high plane alone: 16 * high, doubled. */
            sums[i][c] = p.format == HIGH8 ? _mm256_add_epi32(sums[i][c], _mm256_slli_epi32(dot, 5)) : dot;
        }
}

INLINE void add_half(span_piece p, int h, __m256i sums[PANEL][REGISTERS]) {
    UNROLL for (int v = 0; v < 4; v++)
        UNROLL for (int c = 0; c < p.width; c++) {
            const __m256i codes = span_codes_of(p, c, h, v), weights = p.f.levels ? span_levels(p, codes) : codes;
            UNROLL for (int r = 0; r < p.rows; r++) {
                sums[r][c] = _mm256_dpbusd_avx_epi32(sums[r][c], weights, four(p.values + r * SPAN_BLOCK + h * 16 + v * 4));
                KEEP(sums[r][c]);
            }
        }
}

INLINE int zero_of(form_facts f) { return f.zero; }

INLINE int reads_groups(int form) { return (void)form, 0; }

const lowbit_isa lowbit_avxvnni = {"avxvnni", quantize, multiply};
#else
const lowbit_isa lowbit_avxvnni = {"avxvnni", NULL, NULL};
#endif
