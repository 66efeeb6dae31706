/* The AVX2 path: products in pairs of 16 bits, widened before they can overflow; knows only its sums.
 *
 * vpmaddubsw adds two products of unsigned weights and signed activations, saturating at 16 bits; activations are
 * within 127. Pairs of 4-bit weights are within 2 * 15 * 127 = 3810, so 8 of them fit; pairs of 2-bit weights within
 * 762, so 32, a whole block, do; pairs of 3-bit weights within 1778, so 16 do; pairs of E2M1 within 6096, so 4 do; of vectors within 3810 again. Pairs of 8-bit weights would not fit: their planes are summed apart.
 */
#include "lowbit.h"

#if defined(__AVX2__)

#include "avx256.inc.h"

/* Adds factor * the products of one plane. */
INLINE void add_plane(piece p, const uint8_t *plane, int factor, __m256i sums[PANEL][REGISTERS]) {
    const int format = p.format == BITS8 || p.format == HIGH8 ? BITS4 : p.format, slots = values_per_byte(format), span = p.block / slots;
    const int most = (format == BITS2 ? 32 : format == E2M1 ? 4 : 8) / slots * 4, run = span < most ? span : most;
    const __m256i factors = _mm256_set1_epi16((int16_t)factor);
    for (int start = 0; start < span; start += run) {
        __m256i pairs[PANEL][REGISTERS];
        for (int i = 0; i < p.rows; i++)
            for (int c = 0; c < p.width; c++) pairs[i][c] = _mm256_setzero_si256();
        for (int v = start; v < start + run; v += 4)
            for (int c = 0; c < p.width; c += 2) {
                const uint8_t *at = plane + v * LOWBIT_TILE + c * 32;
                __m256i left = load(at), right = load(at + 32);
                fetch(p, plane, v, c);
                for (int s = 0; s < slots; s++) {
                    __m256i l = unpack(format, s, left, left), r = unpack(format, s, right, right);
                    for (int i = 0; i < p.rows; i++) {
                        __m256i a = four(p.values + i * p.block + s * span + v), *pair = pairs[i] + c;
                        pair[0] = _mm256_add_epi16(pair[0], _mm256_maddubs_epi16(l, a));
                        pair[1] = _mm256_add_epi16(pair[1], _mm256_maddubs_epi16(r, a));
                        KEEP(pair[0]);
                        KEEP(pair[1]);
                    }
                }
            }
        for (int i = 0; i < p.rows; i++)
            for (int c = 0; c < p.width; c++)
                sums[i][c] = _mm256_add_epi32(sums[i][c], _mm256_madd_epi16(pairs[i][c], factors));
    }
}

/* Adds the products of 3-bit weights. */
INLINE void add_chunks(piece p, __m256i sums[PANEL][REGISTERS]) {
    const __m256i mask = _mm256_set1_epi8(7), ones = _mm256_set1_epi16(1);
    const int run = p.block < 2 * LOWBIT_CHUNK ? p.block : 2 * LOWBIT_CHUNK;
    for (int start = 0; start < p.block; start += run) {
        __m256i pairs[PANEL][REGISTERS];
        for (int i = 0; i < p.rows; i++)
            for (int c = 0; c < p.width; c++) pairs[i][c] = _mm256_setzero_si256();
        for (int k = start; k < start + run; k += LOWBIT_CHUNK) {
            fetch_chunk(p, k);
            for (int part = 0; part < 4; part++)
                for (int c = 0; c < p.width; c++) {
                    const uint8_t *chunk = p.data + k * k_bytes(BITS3) + c * 32;
                    __m256i both = nibbles3(chunk, part / 2, part % 2);
                    for (int upper = 0; upper < 2; upper++) {
                        __m256i weights = _mm256_and_si256(upper ? _mm256_srli_epi16(both, 4) : both, mask);
                        for (int i = 0; i < p.rows; i++) {
                            const int8_t *at = p.values + i * p.block + k + part / 2 * 16 + (part % 2 + 2 * upper) * 4;
                            pairs[i][c] = _mm256_add_epi16(pairs[i][c], _mm256_maddubs_epi16(weights, four(at)));
                            KEEP(pairs[i][c]);
                        }
                    }
                }
        }
        for (int i = 0; i < p.rows; i++)
            for (int c = 0; c < p.width; c++)
                sums[i][c] = _mm256_add_epi32(sums[i][c], _mm256_madd_epi16(pairs[i][c], ones));
    }
}

INLINE void add_dots(piece p, __m256i sums[PANEL][REGISTERS]) {
    if (p.format == BITS3) {
        add_chunks(p, sums);
        return;
    }
    if (p.format == BITS8) add_plane(p, p.low, 1, sums);
    add_plane(p, p.data, p.format == BITS8 ? 16 : p.format == HIGH8 ? 32 : 1, sums);
}

/* Weights of a register, and what they are more than the codes mean. Levels within 12 are taken plus 12; others as they
 * are, so that their signs must go to the activations. */
INLINE __m256i span_weights(span_piece p, int c, int h, int v) {
    const __m256i codes = span_codes_of(p, c, h, v);
    if (!p.f.levels) return codes;
    return _mm256_sub_epi8(span_levels(p, codes), _mm256_set1_epi8((char)(SPAN_LEVEL_ZERO - zero_of(p.f))));
}

INLINE int zero_of(form_facts f) { return f.levels == SMALL ? 12 : f.levels ? 0 : f.zero; }

/* Levels reach 127 in magnitude, so that pairs are widened at once; of 6 bits pairs are within 16002, so 2 of them fit; of 5
 * within 7874 and of small levels within 6096, so 4 do. */
INLINE void add_half(span_piece p, int h, __m256i sums[PANEL][REGISTERS]) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int is_signed = p.f.levels == LARGE, run = is_signed ? 1 : p.f.bits == 6 ? 2 : 4;
    UNROLL for (int start = 0; start < 4; start += run) {
        __m256i pairs[PANEL][REGISTERS];
        UNROLL for (int r = 0; r < p.rows; r++)
            UNROLL for (int c = 0; c < p.width; c++) pairs[r][c] = _mm256_setzero_si256();
        UNROLL for (int v = start; v < start + run; v++)
            UNROLL for (int c = 0; c < p.width; c++) {
                const __m256i weights = span_weights(p, c, h, v), sizes = _mm256_abs_epi8(weights);
                UNROLL for (int r = 0; r < p.rows; r++) {
                    const __m256i a = four(p.values + r * SPAN_BLOCK + h * 16 + v * 4);
                    const __m256i made = is_signed ? _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(a, weights))
                                                   : _mm256_maddubs_epi16(weights, a);
                    pairs[r][c] = _mm256_add_epi16(pairs[r][c], made);
                    KEEP(pairs[r][c]);
                }
            }
        UNROLL for (int c = 0; c < p.width; c++) {
            const __m256i by = p.whole ? scale_pairs(p, c, h, h) : ones;
            UNROLL for (int r = 0; r < p.rows; r++)
                sums[r][c] = _mm256_add_epi32(sums[r][c], _mm256_madd_epi16(pairs[r][c], by));
        }
    }
}

/* Sums of 16 bits are multiplied by scales where they else were by one. (Of 3 bits the zero takes back what that gains.) */
INLINE int reads_groups(int form) { return form == FORM_2_HALVES_MINIMUM || form == FORM_6_HALVES; }

const lowbit_isa lowbit_avx2 = {"avx2", quantize, multiply};
#else
const lowbit_isa lowbit_avx2 = {"avx2", NULL, NULL};
#endif
