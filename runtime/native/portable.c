/* The portable path: plain C, the definition of what all others compute; knows nothing of vectors. */
#include "lowbit.h"
#include "values.h"

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums);

#include "span_rows.inc.h"

#include "kernel.inc.h"

static int32_t dot(const uint8_t *weights, const int8_t *values, int32_t block) {
    int32_t total = 0;
    for (int32_t j = 0; j < block; j++) total += weights[j] * values[j];
    return total;
}

static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first, int64_t count,
                      float *sums) {
    int64_t blocks = lowbit_blocks(w->k, w->block);
    uint8_t weights[128];
    for (int64_t b = 0; b < blocks; b++)
        for (int c = 0; c < LOWBIT_TILE; c++) {
            int64_t column = (tile * blocks + b) * LOWBIT_TILE + c;
            float scale = lowbit_scale(w, column);
            int32_t zero = lowbit_zero(w, column);
            lowbit_values(w, tile, b, c, weights);
            for (int64_t r = 0; r < count; r++) {
                int64_t at = b * rows->m + first + r;
                int32_t product = dot(weights, rows->values + at * w->block, w->block);
                /* By the high plane alone a value is taken as the middle of the 16 it may be, doubled to stay whole. */
                int high = lowbit_high_only(w);
                int32_t whole = (high ? 2 : 1) * product - zero * rows->sums[at];
                float *sum = &sums[r * LOWBIT_TILE + c];
                *sum = fmaf((float)whole, scale * rows->scales[at], *sum);
            }
        }
}

const lowbit_isa lowbit_portable = {"portable", quantize, multiply};
