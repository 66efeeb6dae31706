/* What the vector paths share of spans (spans.h): their heads as floats, and walking a tile; knows nothing of registers.
 *
 * Included by a path that then defines the three functions declared here.
 */
#include "span_values.h"
#include "tile.h"

/* A span's head as floats, by groups: in groups of 32 scales and minima are whole, in groups of 16 they are still to be
 * multiplied by d and dmin. */
typedef struct {
    float scales[2 * SPAN_BLOCKS][SPAN_COLUMNS], minima[2 * SPAN_BLOCKS][SPAN_COLUMNS];
    float d[SPAN_COLUMNS], dmin[SPAN_COLUMNS];
} span_scales;

/* How bytes become weights and what groups have: all that products of a span depend on. */
enum { FORM_2_HALVES_MINIMUM, FORM_3_HALVES, FORM_4, FORM_4_MINIMUM, FORM_5, FORM_5_MINIMUM, FORM_6_HALVES, FORM_LEVELS,
       FORM_E2M1, FORM_E2M1_HALVES, FORMS };
#define ALL_FORMS(what)                                                                         \
    what(FORM_2_HALVES_MINIMUM) what(FORM_3_HALVES) what(FORM_4) what(FORM_4_MINIMUM)            \
    what(FORM_5) what(FORM_5_MINIMUM) what(FORM_6_HALVES) what(FORM_LEVELS) what(FORM_E2M1) what(FORM_E2M1_HALVES)
/* `levels` are 0 where codes are numbers, SMALL where they choose from what is within 12, LARGE where from any int8. */
enum { SMALL = 1, LARGE };
typedef struct {
    int bits, halves, minimum, levels, zero;
} form_facts;

/* A span and all rows, counted from its first block. */
typedef struct {
    const span_scales *scales;
    const uint8_t *head, *data, *levels;
    const int8_t *values;
    const float *row_scales;
    const int32_t *row_sums, *row_halves;
    int64_t m, blocks;
} span_view;

/* Whether a path takes the scales of a form's groups from the head itself. */
INLINE int reads_groups(int form);
/* 32 floats of as many float16. */
INLINE void span_floats(const uint8_t *halves, float *out);
/* Bytes of the next span's head that are asked for into the first-level cache: with nothing but requests of the second's, one
 * core got a third less from memory. */
enum { SOON = 256 };
/* Asks for what comes some time after the bytes of a head, and for the next head, which is `size` bytes on. */
INLINE void fetch_head(const uint8_t *head, int64_t bytes, int64_t size);
/* Adds the products of a span's blocks and rows first..first+count-1 to their sums. */
INLINE void add_span(int form, const span_view *t, int64_t first, int64_t count, float *sums);

INLINE form_facts facts_of(int form) {
    switch (form) {
        case FORM_2_HALVES_MINIMUM: return (form_facts){2, 1, 1, 0, 0};
        case FORM_3_HALVES: return (form_facts){3, 1, 0, 0, 4};
        case FORM_4: return (form_facts){4, 0, 0, 0, 8};
        case FORM_4_MINIMUM: return (form_facts){4, 0, 1, 0, 0};
        case FORM_5: return (form_facts){5, 0, 0, 0, 16};
        case FORM_5_MINIMUM: return (form_facts){5, 0, 1, 0, 0};
        case FORM_6_HALVES: return (form_facts){6, 1, 0, 0, 32};
        case FORM_LEVELS: return (form_facts){4, 0, 0, LARGE, SPAN_LEVEL_ZERO};
        case FORM_E2M1: return (form_facts){4, 0, 0, SMALL, SPAN_LEVEL_ZERO};
        default: return (form_facts){4, 1, 0, SMALL, SPAN_LEVEL_ZERO};
    }
}

static int form_of(const kind_facts *kind) {
    if (kind->levels == kind_e2m1_levels) return kind->halves ? FORM_E2M1_HALVES : FORM_E2M1;
    if (kind->levels) return FORM_LEVELS;
    if (kind->bits == 4) return kind->minimum ? FORM_4_MINIMUM : FORM_4;
    if (kind->bits == 5) return kind->minimum ? FORM_5_MINIMUM : FORM_5;
    return kind->bits == 2 ? FORM_2_HALVES_MINIMUM : kind->bits == 3 ? FORM_3_HALVES : FORM_6_HALVES;
}

#define COLUMNS(value, to)                                      \
    for (int c = 0; c < SPAN_COLUMNS; c++) (to)[c] = (value)

/* The 6-bit scales and minima of 8 blocks: the first four of each in the lower bits of a byte, the others in half a byte and
 * the upper two bits of the first four. */
static void read_sixes(const uint8_t *packed, span_scales *out) {
    uint32_t w[3][SPAN_COLUMNS];
    memcpy(w, packed, sizeof w);
    for (int j = 0; j < 4; j++) {
        const int at = 8 * j;
        COLUMNS(out->d[c] * (float)(int32_t)(w[0][c] >> at & 63), out->scales[j]);
        COLUMNS(out->dmin[c] * (float)(int32_t)(w[1][c] >> at & 63), out->minima[j]);
        COLUMNS(out->d[c] * (float)(int32_t)((w[2][c] >> at & 15) | (w[0][c] >> at & 192) >> 2), out->scales[4 + j]);
        COLUMNS(out->dmin[c] * (float)(int32_t)((w[2][c] >> at >> 4 & 15) | (w[1][c] >> at & 192) >> 2), out->minima[4 + j]);
    }
}

/* The bits of a UE4M3 are those of a float16 that is 128 times smaller. */
static void read_minifloats(const uint8_t *codes, float *out) {
    uint16_t halves[SPAN_COLUMNS];
    COLUMNS((uint16_t)(codes[c] == 0x7f ? 0 : (codes[c] & 127) << 7), halves);
    span_floats((const uint8_t *)halves, out);
    COLUMNS(out[c] * 128.0f, out);
}

NOINLINE void read_head(const kind_facts *kind, const uint8_t *head, int64_t blocks, span_scales *out) {
    const int64_t all = kind->halves ? 2 * blocks : blocks, row = 2 * SPAN_COLUMNS;
    const int64_t groups = reads_groups(form_of(kind)) ? 0 : all;
    const int super = kind->head == HEAD_SIXES || kind->head == HEAD_BYTES || kind->head == HEAD_NIBBLES;
    COLUMNS(1.0f, out->d);
    if (super) span_floats(head, out->d);
    if (super && kind->minimum) span_floats(head + row, out->dmin);
    if (kind->head == HEAD_SIXES) read_sixes(head + 2 * row, out);
    for (int64_t g = 0; g < groups && kind->head != HEAD_SIXES; g++) {
        const uint8_t *bytes = head + (super ? row : 0) + (kind->head == HEAD_NIBBLES ? row : 0) + g * SPAN_COLUMNS;
        float *scales = out->scales[g], *minima = out->minima[g];
        switch (kind->head) {
            case HEAD_HALF_MINIMUM: span_floats(head + (groups + g) * row, minima); /* fall through */
            case HEAD_HALF: span_floats(head + g * row, scales); break;
            case HEAD_BYTES:
                if (kind->halves) COLUMNS((float)(int8_t)bytes[c], scales);
                else COLUMNS(out->d[c] * (float)(int8_t)bytes[c], scales);
                break;
            case HEAD_NIBBLES:
                COLUMNS((float)(bytes[c] & 15), scales);
                COLUMNS((float)(bytes[c] >> 4), minima);
                break;
            case HEAD_EXPONENTS: COLUMNS(span_exponent(bytes[c]), scales); break;
            default: read_minifloats(bytes, scales); break;
        }
    }
}

/* All rows go over a span before the next is looked at, so that its head is read once. */
static void span_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums) {
    const kind_facts *kind = &kinds[w->kind];
    const int form = form_of(kind);
    const int64_t blocks = w->k / SPAN_BLOCK, m = rows->m;
    const uint8_t *span = w->data + tile * lowbit_tile_bytes(w);
    _Alignas(64) span_scales scales;
    for (int64_t start = 0; start < blocks; start += SPAN_BLOCKS) {
        const int64_t n = smaller(blocks - start, SPAN_BLOCKS), head = span_head(kind, n);
        const int64_t cell = start * m;
        const span_view t = {&scales, span, span + head, kind->levels, rows->values + cell * SPAN_BLOCK,
                             rows->scales + cell, rows->sums + cell, rows->halves + cell, m, n};
        fetch_head(span, head, span_bytes(kind, n));
        read_head(kind, span, n, &scales);
        add_span(form, &t, first, count, sums);
        span += span_bytes(kind, n);
    }
}
