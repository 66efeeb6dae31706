/* What this machine can do at best: bytes read per second, multiply-adds per second; knows nothing of matrices.
 *
 * The callers time these; each does a known amount of work that a compiler cannot leave out.
 */
#include <string.h>

#include "lowbit.h"

#if defined(__x86_64__) || defined(_M_X64)
#define X86 1
#include <immintrin.h>
#elif defined(__aarch64__) || defined(_M_ARM64)
#define ARM64 1
#include <arm_neon.h>
#endif

#if defined(__GNUC__)
#define TARGET(features) __attribute__((target(features)))
#define UNROLL _Pragma("GCC unroll 12")
#else
#define TARGET(features)
#define UNROLL
#endif

/* Independent sums enough to hide the latency of one multiply-add behind the others. */
enum { CHAINS = 12 };

static volatile int32_t sink;

/* A function doing `rounds` times CHAINS of one instruction, each `width` multiply-adds; returns their number. */
#define DOTS(name, features, vector, zero, add, last, width)                      \
    TARGET(features) static int64_t name(int64_t rounds) {                        \
        vector sums[CHAINS];                                                      \
        for (int c = 0; c < CHAINS; c++) sums[c] = zero;                          \
        for (int64_t i = 0; i < rounds; i++) {                                    \
            UNROLL for (int c = 0; c < CHAINS; c++) sums[c] = add(sums[c]);       \
        }                                                                         \
        for (int c = 0; c < CHAINS; c++) sink = last(sums[c]);                    \
        return rounds * CHAINS * (width);                                         \
    }

#ifdef X86
#define ZERO_512 _mm512_setzero_si512()
#define ADD_512(sum) _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_set1_epi8(1))
#define LAST_512(sum) _mm_cvtsi128_si32(_mm512_castsi512_si128(sum))
DOTS(dots_512, "avx512f,avx512vnni", __m512i, ZERO_512, ADD_512, LAST_512, 64)
#define ZERO_256 _mm256_setzero_si256()
/* The sum is among the factors, or the product would be the same every time and taken once. */
#define ADD_256(sum) _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(1), sum))
#define LAST_256(sum) _mm_cvtsi128_si32(_mm256_castsi256_si128(sum))
DOTS(dots_256, "avx2", __m256i, ZERO_256, ADD_256, LAST_256, 32)
#elif defined(ARM64)
#define ZERO_128 vdupq_n_s32(0)
#define ADD_128(sum) vdotq_s32(sum, vdupq_n_s8(1), vdupq_n_s8(1))
#define LAST_128(sum) vgetq_lane_s32(sum, 0)
DOTS(dots_128, "arch=armv8.2-a+dotprod", int32x4_t, ZERO_128, ADD_128, LAST_128, 16)
#endif

int64_t lowbit_probe_dots(const lowbit_isa *isa, int64_t rounds) {
    if (!lowbit_usable(isa) || isa == &lowbit_portable) return 0;
#if defined(X86)
    if (strcmp(isa->name, "avx512vnni") == 0) return dots_512(rounds);
    return strcmp(isa->name, "avx2") == 0 ? dots_256(rounds) : 0;
#elif defined(ARM64)
    return dots_128(rounds);
#else
    return 0;
#endif
}

uint64_t lowbit_probe_read(const uint64_t *words, size_t count) {
    /* Sums of 64 bytes at a time, which compilers keep in vector registers. */
    uint64_t sums[8] = {0};
    for (size_t i = 0; i + 8 <= count; i += 8)
        for (int l = 0; l < 8; l++) sums[l] += words[i + (size_t)l];
    uint64_t total = 0;
    for (int l = 0; l < 8; l++) total += sums[l];
    return total;
}
