/* Which paths this library has and this machine can run, and single rows; knows nothing of what a path computes. */
#include "lowbit.h"
#include "span_values.h"

#if defined(__x86_64__) || defined(_M_X64)
#define X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
extern const lowbit_isa lowbit_avx512vnni, lowbit_avxvnni, lowbit_avx2;
#elif defined(__aarch64__) || defined(_M_ARM64)
#define ARM64 1
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include <windows.h>
#endif
extern const lowbit_isa lowbit_neon_i8mm, lowbit_neon_dot;
#endif

#ifdef X86
typedef struct {
    uint32_t a, b, c, d;
} registers;

static registers cpuid(uint32_t leaf, uint32_t subleaf) {
    registers r = {0, 0, 0, 0};
#if defined(_MSC_VER)
    int out[4];
    __cpuidex(out, (int)leaf, (int)subleaf);
    r.a = (uint32_t)out[0], r.b = (uint32_t)out[1], r.c = (uint32_t)out[2], r.d = (uint32_t)out[3];
#else
    __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
#endif
    return r;
}

/* Registers the operating system saves: bits 1, 2 for AVX, 5 to 7 for AVX-512. */
static uint64_t saved_registers(void) {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | (uint64_t)high << 32;
#endif
}

static int bit(uint32_t word, int index) { return (int)(word >> index & 1); }

/* Feature bits: Intel's Architecture Instruction Set Extensions reference, chapter 1, "CPUID". */
static int usable_x86(const lowbit_isa *isa) {
    if (cpuid(0, 0).a < 7) return 0;
    registers one = cpuid(1, 0), seven = cpuid(7, 0);
    if (!bit(one.c, 27)) return 0;
    uint64_t saved = saved_registers();
    int avx2 = (saved & 0x06) == 0x06 && bit(one.c, 12) && bit(one.c, 28) && bit(seven.b, 5);
    if (isa == &lowbit_avx2) return avx2;
    if (isa == &lowbit_avxvnni) return avx2 && seven.a >= 1 && bit(cpuid(7, 1).a, 4);
    int avx512 = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31) && bit(seven.c, 11);
    return avx2 && avx512 && (saved & 0xe6) == 0xe6;
}
#endif

#ifdef ARM64
static int usable_arm64(const lowbit_isa *isa) {
    int i8mm = isa == &lowbit_neon_i8mm;
#if defined(__linux__)
    /* asm/hwcap.h: HWCAP_ASIMDDP and HWCAP2_I8MM. */
    unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    return (first >> 20 & 1) && (!i8mm || (second >> 13 & 1));
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    const char *name = i8mm ? "hw.optional.arm.FEAT_I8MM" : "hw.optional.arm.FEAT_DotProd";
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value;
#elif defined(_WIN32)
    /* winnt.h: PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE; Windows reports no i8mm before 11 24H2, as 66. */
    return IsProcessorFeaturePresent(i8mm ? 66 : 43);
#else
    (void)i8mm;
    return 0;
#endif
}
#endif

static const lowbit_isa *const paths[] = {
#ifdef X86
    &lowbit_avx512vnni, &lowbit_avxvnni, &lowbit_avx2,
#endif
#ifdef ARM64
    &lowbit_neon_i8mm, &lowbit_neon_dot,
#endif
    &lowbit_portable, NULL,
};

const lowbit_isa *lowbit_isa_at(size_t index) {
    return index < sizeof paths / sizeof *paths ? paths[index] : NULL;
}

int lowbit_usable(const lowbit_isa *isa) {
    if (isa == &lowbit_portable) return 1;
    /* A compiler that could not build a path leaves it without functions. */
    if (!isa->multiply) return 0;
#if defined(X86)
    return usable_x86(isa);
#elif defined(ARM64)
    return usable_arm64(isa);
#else
    return 0;
#endif
}

/* Column c of a tile of a kind: (k). */
static void span_row(const lowbit_matrix *w, int64_t tile, int c, float *out) {
    const kind_facts *kind = &kinds[w->kind];
    const uint8_t *span = w->data + tile * lowbit_tile_bytes(w);
    const int64_t blocks = w->k / SPAN_BLOCK;
    int16_t codes[SPAN_BLOCK];
    for (int64_t start = 0; start < blocks; start += SPAN_BLOCKS) {
        const int64_t n = smaller(blocks - start, SPAN_BLOCKS);
        const span_column head = span_column_of(kind, span, n, c);
        for (int64_t b = 0; b < n; b++) {
            span_codes(kind, span + span_head(kind, n) + b * span_values(kind), c, codes);
            for (int k = 0; k < SPAN_BLOCK; k++) {
                const int64_t g = kind->halves ? 2 * b + k / 16 : b;
                const float scale = head.scales[g], minimum = head.minima[g];
                /* Whole numbers and their products are exact, so that nothing but the last step rounds. */
                if (kind->halves)
                    *out++ = fmaf((float)codes[k] * scale, head.d, -(head.dmin * minimum));
                else
                    *out++ = fmaf((float)codes[k], scale, -minimum);
            }
        }
        span += span_bytes(kind, n);
    }
}

void lowbit_row(const lowbit_matrix *w, int64_t n, float *out) {
    int64_t half = w->n / 2, blocks = lowbit_blocks(w->k, w->block);
    int64_t within = w->paired ? n % half : n, per_tile = w->paired ? LOWBIT_GROUP : LOWBIT_TILE;
    int64_t tile = within / per_tile;
    int column = (int)(within % per_tile) + (w->paired && n >= half ? LOWBIT_GROUP : 0);
    if (w->kind) {
        span_row(w, tile, column, out);
        return;
    }
    uint8_t values[128];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t at = (tile * blocks + b) * LOWBIT_TILE + column, start = b * w->block;
        float scale = lowbit_scale(w, at);
        int32_t zero = lowbit_zero(w, at), step = lowbit_high_only(w) ? 2 : 1;
        lowbit_values(w, tile, b, column, values);
        for (int64_t j = 0; j < w->block && start + j < w->k; j++)
            out[start + j] = (float)(step * values[j] - zero) * scale;
    }
}
