/* Products of a tile of a kind (spans.h) in plain C, the definition of what all others compute; knows nothing of
 * vectors. */
#include "span_values.h"

/* Adds the products of one column of a block to its sum, where `values` of all rows lie apart by a block. */
static void span_block(const kind_facts *kind, const span_column *head, int64_t b, const int16_t *codes,
                       const lowbit_rows *rows, int64_t at, float *sum) {
    const int8_t *values = rows->values + at * SPAN_BLOCK;
    const float a = rows->scales[at], whole = (float)rows->sums[at], half = (float)rows->halves[at];
    int32_t dots[2] = {0, 0};
    for (int k = 0; k < SPAN_BLOCK; k++) dots[k / 16] += codes[k] * values[k];
    if (kind->halves) {
        const float *s = head->scales + 2 * b, *m = head->minima + 2 * b;
        *sum = fmaf(fmaf(s[1], (float)dots[1], s[0] * (float)dots[0]), head->d * a, *sum);
        if (kind->minimum) *sum = fmaf(-(m[0] * half + m[1] * (whole - half)), head->dmin * a, *sum);
    } else {
        *sum = fmaf((float)(dots[0] + dots[1]), head->scales[b] * a, *sum);
        if (kind->minimum) *sum = fmaf(head->minima[b], -(a * whole), *sum);
    }
}

static void span_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums) {
    const kind_facts *kind = &kinds[w->kind];
    const int64_t blocks = w->k / SPAN_BLOCK;
    const uint8_t *span = w->data + tile * lowbit_tile_bytes(w);
    int16_t codes[SPAN_BLOCK];
    for (int64_t start = 0; start < blocks; start += SPAN_BLOCKS) {
        const int64_t n = smaller(blocks - start, SPAN_BLOCKS);
        for (int c = 0; c < SPAN_COLUMNS; c++) {
            const span_column head = span_column_of(kind, span, n, c);
            for (int64_t b = 0; b < n; b++) {
                span_codes(kind, span + span_head(kind, n) + b * span_values(kind), c, codes);
                for (int64_t r = 0; r < count; r++)
                    span_block(kind, &head, b, codes, rows, (start + b) * rows->m + first + r, &sums[r * LOWBIT_TILE + c]);
            }
        }
        span += span_bytes(kind, n);
    }
}
