/* What the paths of 256-bit registers share: unpacking, scales, walking a tile; knows nothing of how dots are summed.
 *
 * A path includes this file and then defines add_dots, and add_half and zero_of of spans.
 */
#include <immintrin.h>

#include "lowbit.h"
#include "tile.h"

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);
static void span_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);

#include "kernel.inc.h"

/* Has a sum updated where that is written: GCC else computes the products of many steps first, and spills them. */
#if defined(__GNUC__)
#define KEEP(sum) __asm__("" : "+x"(sum))
#define UNROLL _Pragma("GCC unroll 16")
#else
#define KEEP(sum) (void)0
#define UNROLL
#endif

/* A register holds 8 columns by 4 consecutive k; these cover a tile. */
enum { REGISTERS = 4 };
/* Rows whose integer sums, two registers each, stay in registers beside the weights. */
enum { PANEL = 4 };
/* Bytes that are asked for early, into the second-level cache, of whose requests more can wait than of the first's
 * (docs/LOG.md, 2026-11-26). */
enum { AHEAD = 6144 };
/* Panels take turns after this many k: if each crossed the whole tile, memory would wait for all but the first. */
enum { TURN = 128 };
/* One block of weights, `width` registers of the tile, and of some rows. */
typedef struct {
    int format, block, width, rows;
    const uint8_t *data, *low;
    int64_t ahead; /* bytes from here to what is fetched */
    const int8_t *values;
} piece;

/* Adds the integer products of a piece to sums, in the units of values.h. */
INLINE void add_dots(piece p, __m256i sums[PANEL][REGISTERS]);

INLINE int values_per_byte(int format) { return has_fours(format) ? 4 : 2; }

/* Bytes of the tile by one k, in one plane. */
INLINE int k_bytes(int format) { return has_fours(format) ? 8 : format == BITS3 ? 12 : 16; }

INLINE __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

INLINE __m256i four(const int8_t *values) {
    int32_t word;
    memcpy(&word, values, sizeof word);
    return _mm256_set1_epi32(word);
}

/* The s-th values that codes of vectors stand for. */
INLINE __m256i unpack_vectors(int s, __m256i codes) {
    const __m256i chosen = _mm256_and_si256(codes, _mm256_set1_epi8(15)), zero = _mm256_set1_epi8(LOWBIT_VECTOR_ZERO);
    const __m256i magnitudes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)lowbit_vectors[s]));
    const __m256i above = _mm256_shuffle_epi8(_mm256_add_epi8(zero, magnitudes), chosen);
    const __m256i below = _mm256_shuffle_epi8(_mm256_sub_epi8(zero, magnitudes), chosen);
    /* The sign comes into the highest bit, by which one of the two is chosen. */
    return _mm256_blendv_epi8(above, below, s == 3 ? codes : _mm256_slli_epi16(codes, 3 - s));
}

/* The s-th values of each byte; of 8 bits with both planes. */
INLINE __m256i unpack(int format, int s, __m256i data, __m256i low) {
    const __m256i mask = _mm256_set1_epi8(format == BITS2 ? 3 : 15);
    if (format == VECTORS) return unpack_vectors(s, data);
    if (format == BITS2) return _mm256_and_si256(_mm256_srli_epi16(data, 2 * s), mask);
    if (format == BITS8) {
        __m256i high = s == 0 ? _mm256_slli_epi16(_mm256_and_si256(data, mask), 4) : _mm256_andnot_si256(mask, data);
        return _mm256_or_si256(high, _mm256_and_si256(s == 0 ? low : _mm256_srli_epi16(low, 4), mask));
    }
    __m256i codes = _mm256_and_si256(s == 0 ? data : _mm256_srli_epi16(data, 4), mask);
    if (format != E2M1) return codes;
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)lowbit_e2m1)), codes);
}

/* Weights of 8 columns at 3 bits, from a chunk's bytes on: of the values s and s + 2 of half `h` of it, s being `odd`, in
 * halves of bytes. */
INLINE __m256i nibbles3(const uint8_t *chunk, int h, int odd) {
    __m256i low = load(chunk + h * LOWBIT_TILE * 4), high = load(chunk + LOWBIT_CHUNK_HIGH);
    if (odd) low = _mm256_srli_epi16(low, 2);
    if (2 * h + odd == 3) high = _mm256_srli_epi16(high, 1);
    if (2 * h + odd < 2) high = _mm256_slli_epi16(high, 2 - odd);
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(0x33)), _mm256_and_si256(high, _mm256_set1_epi8(0x44)));
}

/* Asks for what lies ahead of a chunk of 3 bits; passes over half a tile's columns each ask for half of the bytes. */
INLINE void fetch_chunk(piece p, int k) {
    const int whole = p.width == REGISTERS, bytes = k_bytes(BITS3) / (whole ? 1 : 2);
    const char *line = (const char *)(p.data + p.ahead + k * bytes);
    for (int i = 0; i < LOWBIT_CHUNK * bytes; i += 64) _mm_prefetch(line + i, _MM_HINT_T1);
}

/* Asks for what lies ahead of registers c and c + 1 at k = v of a plane; passes over half a tile's columns each ask for
 * half of the bytes. */
INLINE void fetch(piece p, const uint8_t *plane, int v, int c) {
    const int at = p.width == REGISTERS ? v * LOWBIT_TILE + c * 32 : v * LOWBIT_GROUP;
    _mm_prefetch((const char *)(plane + p.ahead + at), _MM_HINT_T1);
}

/* Scales of 8 columns of a block, in the units of values.h. */
INLINE __m256 column_scales(int format, const tile_view *t, int64_t b, int part) {
    const __m128i bits = _mm_loadu_si128((const __m128i *)(t->scales + b * t->scale_step + part * 8));
    __m256 values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    if (may_be_float16(format) && t->float16) values = _mm256_cvtph_ps(bits);
    return format == HIGH8 ? _mm256_mul_ps(values, _mm256_set1_ps(0.5f)) : values;
}

/* Minus zero point * sum of a piece's columns and rows. The zero points are looked at once for all rows. */
INLINE void less_zeros(piece p, const tile_view *t, int64_t b, int part, const int32_t *sums, __m256i dots[PANEL][REGISTERS]) {
    if (!t->zeros) {
        for (int r = 0; r < p.rows; r++)
            for (int c = 0; c < p.width; c++) dots[r][c] = _mm256_set1_epi32(-middle_of(p.format) * sums[r]);
        return;
    }
    for (int c = 0; c < p.width; c++) {
        const uint8_t *bytes = t->zeros + b * LOWBIT_TILE + (part + c) * 8;
        __m256i zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
        if (p.format == HIGH8) zeros = _mm256_sub_epi32(_mm256_slli_epi32(zeros, 1), _mm256_set1_epi32(15));
        /* Both factors fit 16 bits, a sum being within 128 * 127; the other half of each lane is multiplied by zero. */
        for (int r = 0; r < p.rows; r++) dots[r][c] = _mm256_madd_epi16(zeros, _mm256_set1_epi32(-sums[r] & 0xffff));
    }
}

/* Adds a piece's products, less zero * sum, scaled, to the rows' sums; it begins at register `part` of block b. */
INLINE void add_piece(piece p, const tile_view *t, int64_t b, int part, int64_t first, float *sums) {
    int64_t at = b * t->m + first;
    __m256i dots[PANEL][REGISTERS];
    p.values = t->values + at * p.block;
    less_zeros(p, t, b, part, t->row_sums + at, dots);
    add_dots(p, dots);
    for (int c = 0; c < p.width; c++) {
        __m256 scales = column_scales(p.format, t, b, part + c);
        for (int r = 0; r < p.rows; r++) {
            float *sum = sums + r * LOWBIT_TILE + (part + c) * 8;
            __m256 scale = _mm256_mul_ps(scales, _mm256_set1_ps(t->row_scales[at + r]));
            _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][c]), scale, _mm256_loadu_ps(sum)));
        }
    }
}

/* Adds the products of blocks from..to-1 and `rows` <= PANEL rows to their sums. One or two rows take all columns at
 * once, for more independent sums; the four values of a byte leave registers for one. */
INLINE void panel(int format, int block, int rows, const tile_view *t, int64_t from, int64_t to, int64_t ahead,
                  int64_t first, float *sums) {
    const int step = block * k_bytes(format), width = rows <= (has_fours(format) ? 1 : 2) ? 4 : 2;
    for (int64_t b = from; b < to; b++) {
        /* The line of inline scales, which lies between those of the values. */
        const char *scales = (const char *)(t->scales + b * t->scale_step);
        if (t->scale_step != LOWBIT_TILE) _mm_prefetch(scales + ahead, _MM_HINT_T1);
        for (int part = 0; part < REGISTERS; part += width) {
            piece p = {.format = format, .block = block, .width = width, .rows = rows};
            p.data = t->data + b * t->data_step + part * 32;
            p.low = format == BITS8 ? t->low + b * step + part * 32 : p.data;
            p.ahead = ahead + part * (step / REGISTERS - 32);
            add_piece(p, t, b, part, first, sums);
        }
    }
}

/* One function per format, block and number of rows: the compiler then addresses all rows from one register and keeps
 * every sum in its own. */
typedef void panel_function(const tile_view *t, int64_t from, int64_t to, int64_t ahead, int64_t first, float *sums);

#define ONE(format, block, rows)                                                                                \
    NOINLINE void panel_##format##_##block##_##rows(const tile_view *t, int64_t from, int64_t to, int64_t ahead, \
                                                    int64_t first, float *sums) {                               \
        panel(format, block, rows, t, from, to, ahead, first, sums);                                            \
    }
#define ALL_ROWS(what, format, block) \
    what(format, block, 1) what(format, block, 2) what(format, block, 3) what(format, block, 4)
#define ALL_BLOCKS(what, format) ALL_ROWS(what, format, 32) ALL_ROWS(what, format, 64) ALL_ROWS(what, format, 128)
ALL_BLOCKS(ONE, BITS2)
ALL_BLOCKS(ONE, VECTORS)
ALL_BLOCKS(ONE, BITS3)
ALL_BLOCKS(ONE, BITS4)
ALL_BLOCKS(ONE, BITS8)
ALL_BLOCKS(ONE, HIGH8)
ALL_ROWS(ONE, E2M1, 32)

#define NAME(format, block, rows) panel_##format##_##block##_##rows,
#define OF_FORMAT(format) {{ALL_ROWS(NAME, format, 32)}, {ALL_ROWS(NAME, format, 64)}, {ALL_ROWS(NAME, format, 128)}}
static panel_function *const panel_functions[FORMATS][3][PANEL] = {
    [BITS2] = OF_FORMAT(BITS2), [BITS4] = OF_FORMAT(BITS4), [BITS8] = OF_FORMAT(BITS8), [HIGH8] = OF_FORMAT(HIGH8),
    [BITS3] = OF_FORMAT(BITS3), [VECTORS] = OF_FORMAT(VECTORS),
    [E2M1] = {{ALL_ROWS(NAME, E2M1, 32)}}};

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums) {
    const tile_view t = view_of(w, tile, rows);
    panel_function *const *functions = panel_functions[format_of(w)][w->block / 64];
    int64_t turn = count <= PANEL ? t.blocks : TURN / w->block;
    for (int64_t from = 0; from < t.blocks; from += turn)
        for (int64_t r = 0; r < count; r += PANEL) {
            panel_function *add = functions[smaller(count - r, PANEL) - 1];
            /* Later panels find their bytes in the cache, and ask only for those. */
            add(&t, from, smaller(from + turn, t.blocks), r == 0 ? AHEAD : 0, first + r, sums + r * LOWBIT_TILE);
        }
}

#include "span_avx256.inc.h"
