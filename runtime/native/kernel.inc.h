/* What all paths share: quantizing rows, walking tiles, finishing results; knows nothing of instruction sets.
 *
 * Included by each path after it has declared `tile_rows`, and `span_rows` of the same form for matrices of a kind:
 *     static void tile_rows(const lowbit_matrix *w, int64_t tile, const lowbit_rows *rows, int64_t first,
 *                           int64_t count, float *sums);
 * which adds the products of rows first..first+count-1, at most ROWS_AT_ONCE, to sums (count, 32). Plain C here is
 * written so that compilers vectorize it without reordering: compile with -ffp-contract=off, so that only the fused
 * operations written as fmaf are fused, and every path gives the same bits.
 */
#include "arithmetic.inc.h"
#include "lowbit.h"

static int32_t half_sum(const int8_t *values) {
    int32_t sum = 0;
    for (int i = 0; i < SPAN_BLOCK / 2; i++) sum += values[i];
    return sum;
}

static void quantize(const lowbit_input *in, const lowbit_rows *rows, int64_t first, int64_t last) {
    int64_t k = rows->k, blocks = lowbit_blocks(k, rows->block);
    float values[128];
    for (int64_t r = first; r < last; r++) {
        const float *x = in->x + r * k;
        float inverse = in->weight ? inverse_norm(x, k, in->epsilon) : 1.0f;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t start = b * rows->block;
            int32_t count = (int32_t)(k - start < rows->block ? k - start : rows->block);
            if (in->weight)
                for (int32_t i = 0; i < count; i++) values[i] = x[start + i] * inverse * in->weight[start + i];
            else
                memcpy(values, x + start, (size_t)count * sizeof(float));
            for (int32_t i = count; i < rows->block; i++) values[i] = 0;
            int64_t at = b * rows->m + r;
            quantize_block(values, rows->block, rows->values + at * rows->block, &rows->scales[at], &rows->sums[at]);
            if (rows->halves) rows->halves[at] = half_sum(rows->values + at * rows->block);
        }
    }
}

static void finish_half(const float *sums, const lowbit_output *out, int64_t row, int64_t width, int64_t column,
                        int64_t count) {
    const int64_t at = row * (out->stride ? out->stride : width) + column;
    float *y = out->y + at;
    const float *bias = out->bias ? out->bias + column : NULL;
    const float *residual = out->residual ? out->residual + at : NULL;
    for (int64_t c = 0; c < count; c++) {
        float value = out->factor ? sums[c] * out->factor : sums[c];
        if (bias) value += bias[c];
        if (residual) value += residual[c];
        y[c] = value;
    }
}

static void finish_swiglu(const float *sums, const lowbit_output *out, int64_t row, int64_t width, int64_t column,
                          int64_t count) {
    float gate[LOWBIT_GROUP], up[LOWBIT_GROUP];
    memcpy(gate, sums, sizeof gate);
    memcpy(up, sums + LOWBIT_GROUP, sizeof up);
    if (out->bias)
        for (int64_t c = 0; c < count; c++) {
            gate[c] += out->bias[column + c];
            up[c] += out->bias[width + column + c];
        }
    if (out->swiglu == 2)
        for (int c = 0; c < LOWBIT_GROUP; c++) gate[c] = clamped_swiglu(gate[c], up[c]);
    else if (out->swiglu == 4)
        for (int c = 0; c < LOWBIT_GROUP; c++) gate[c] = gelu_tanh(gate[c]) * up[c];
    else
        for (int c = 0; c < LOWBIT_GROUP; c++) gate[c] = gate[c] / (1.0f + exponential(-gate[c])) * up[c];
    const lowbit_output rest = {.y = out->y, .residual = out->residual};
    finish_half(gate, &rest, row, width, column, count);
}

static void finish_activated(const float *sums, const lowbit_output *out, int64_t row, int64_t width, int64_t column,
                        int64_t count) {
    float y[LOWBIT_TILE];
    memcpy(y, sums, sizeof y);
    if (out->bias)
        for (int64_t c = 0; c < count; c++) y[c] += out->bias[column + c];
    if (out->swiglu == 3)
        for (int c = 0; c < LOWBIT_TILE; c++) y[c] = y[c] <= 0.0f ? 0.0f : y[c] * y[c];
    else
        for (int c = 0; c < LOWBIT_TILE; c++) y[c] = y[c] / (1.0f + exponential(-y[c]));
    const lowbit_output rest = {.y = out->y, .residual = out->residual};
    finish_half(y, &rest, row, width, column, count);
}

static void finish(const lowbit_matrix *w, const lowbit_output *out, int64_t tile, const float *sums, int64_t first,
                   int64_t count) {
    int64_t half = w->n / 2, column = tile * (w->paired ? LOWBIT_GROUP : LOWBIT_TILE);
    for (int64_t r = 0; r < count; r++, sums += LOWBIT_TILE) {
        if (out->swiglu && w->paired) {
            finish_swiglu(sums, out, first + r, half, column, smaller(half - column, LOWBIT_GROUP));
        } else if (w->paired) {
            int64_t columns = smaller(half - column, LOWBIT_GROUP);
            finish_half(sums, out, first + r, w->n, column, columns);
            finish_half(sums + LOWBIT_GROUP, out, first + r, w->n, half + column, columns);
        } else if (out->swiglu) {
            finish_activated(sums, out, first + r, w->n, column, smaller(w->n - column, LOWBIT_TILE));
        } else {
            finish_half(sums, out, first + r, w->n, column, smaller(w->n - column, LOWBIT_TILE));
        }
    }
}

/* Asks for the lines that a tile's results go to: rows lie apart, so that each is one of its own. */
static void fetch_results(const lowbit_matrix *w, const lowbit_output *out, int64_t tile, int64_t first, int64_t count) {
#if defined(__GNUC__)
    const int64_t own = out->swiglu && w->paired ? w->n / 2 : w->n, width = out->stride ? out->stride : own, columns = w->paired ? LOWBIT_GROUP : LOWBIT_TILE;
    for (int64_t r = first; r < first + count; r++)
        for (int64_t c = 0; c < columns; c += LOWBIT_GROUP) __builtin_prefetch(out->y + r * width + tile * columns + c, 1);
#else
    (void)w, (void)out, (void)tile, (void)first, (void)count;
#endif
}

/* Rows whose sums for one tile, 128 bytes each, stay in the first-level cache beside the tile and the activations. */
enum { ROWS_AT_ONCE = 64 };

static void multiply(const lowbit_matrix *w, const lowbit_rows *rows, const lowbit_output *out, int64_t first,
                     int64_t last) {
    float sums[ROWS_AT_ONCE * LOWBIT_TILE];
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t row = 0; row < rows->m; row += ROWS_AT_ONCE) {
            int64_t count = smaller(rows->m - row, ROWS_AT_ONCE);
            memset(sums, 0, (size_t)(count * LOWBIT_TILE) * sizeof(float));
            fetch_results(w, out, tile, row, count);
            (w->kind ? span_rows : tile_rows)(w, tile, rows, row, count, sums);
            finish(w, out, tile, sums, row, count);
        }
}
