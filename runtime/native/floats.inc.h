/* Float matrices times float rows in vectors of 16 (floats.h); knows nothing of registers.
 *
 * Included by a path that has vec, vec_set, vec_load, vec_halves, vec_bfloats, vec_store and vec_fma.
 */
#include "floats.h"

/* Rows whose sums stay in registers: of one row those of 4 vectors, of more those of 2 each. */
enum { FLOAT_ROWS = 3 };

INLINE void finish_float(const float_matrix *w, const float_rows *r, int64_t row, int64_t column, float sum) {
    int64_t at = row * w->n + column;
    if (r->factor) sum *= r->factor;
    if (r->bias) sum += r->bias[column];
    if (r->residual) sum += r->residual[at];
    r->y[at] = sum;
}

INLINE void finish_floats(const float_matrix *w, const float_rows *r, int64_t row, int64_t column, vec sum) {
    float values[LANES];
    vec_store(values, sum);
    for (int l = 0; l < LANES; l++) finish_float(w, r, row, column + l, values[l]);
}

INLINE int64_t float_bytes(int form) { return form == FLOATS_FLOAT32 ? sizeof(float) : sizeof(uint16_t); }

/* Weights from `at` on. */
INLINE vec load_weights(int form, const uint8_t *at) {
    if (form == FLOATS_FLOAT16) return vec_halves(at);
    return form == FLOATS_BFLOAT16 ? vec_bfloats(at) : vec_load((const float *)(const void *)at);
}

INLINE float load_weight(int form, const uint8_t *at) {
    float value;
    uint16_t half;
    memcpy(&value, at, (size_t)float_bytes(form));
    memcpy(&half, at, sizeof half);
    if (form == FLOATS_FLOAT16) return float_of(half);
    return form == FLOATS_BFLOAT16 ? bits_float((uint32_t)half << 16) : value;
}

/* `width` vectors of columns of a matrix stored by inputs. */
INLINE void chains(int count, int width, const float_matrix *w, const float_rows *r, int64_t row, int64_t column) {
    vec sums[FLOAT_ROWS][4];
    for (int i = 0; i < count; i++)
        for (int v = 0; v < width; v++) sums[i][v] = vec_set(0);
    const float *x = r->x + row * w->k, *data = w->data;
    for (int64_t k = 0; k < w->k; k++)
        for (int v = 0; v < width; v++) {
            vec weights = vec_load(data + k * w->n + column + v * LANES);
            for (int i = 0; i < count; i++) sums[i][v] = vec_fma(vec_set(x[i * w->k + k]), weights, sums[i][v]);
        }
    for (int i = 0; i < count; i++)
        for (int v = 0; v < width; v++) finish_floats(w, r, row + i, column + v * LANES, sums[i][v]);
}

/* `width` columns of a matrix stored by outputs. */
INLINE void folds(int form, int count, int width, const float_matrix *w, const float_rows *r, int64_t row, int64_t column) {
    vec sums[FLOAT_ROWS][4];
    for (int i = 0; i < count; i++)
        for (int c = 0; c < width; c++) sums[i][c] = vec_set(0);
    const float *x = r->x + row * w->k;
    const int64_t whole = w->k / LANES * LANES, size = float_bytes(form);
    const uint8_t *weights = (const uint8_t *)w->data + column * w->k * size;
    for (int64_t k = 0; k < whole; k += LANES)
        for (int c = 0; c < width; c++) {
            vec sixteen = load_weights(form, weights + (c * w->k + k) * size);
            for (int i = 0; i < count; i++) sums[i][c] = vec_fma(vec_load(x + i * w->k + k), sixteen, sums[i][c]);
        }
    for (int i = 0; i < count; i++)
        for (int c = 0; c < width; c++) {
            float lanes[LANES];
            vec_store(lanes, sums[i][c]);
            for (int64_t k = whole; k < w->k; k++)
                lanes[k - whole] = fmaf(x[i * w->k + k], load_weight(form, weights + (c * w->k + k) * size), lanes[k - whole]);
            for (int half = LANES / 2; half > 0; half /= 2)
                for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
            finish_float(w, r, row + i, column + c, lanes[0]);
        }
}

/* Columns that no vector covers, one by one. */
INLINE void chain(const float_matrix *w, const float_rows *r, int64_t row, int64_t column) {
    const float *x = r->x + row * w->k, *data = w->data;
    float sum = 0;
    for (int64_t k = 0; k < w->k; k++) sum = fmaf(x[k], data[k * w->n + column], sum);
    finish_float(w, r, row, column, sum);
}

INLINE void by_input(int count, const float_matrix *w, const float_rows *r, int64_t row, int64_t first, int64_t last) {
    const int width = count == 1 ? 4 : 2;
    int64_t column = first;
    for (; column + width * LANES <= last; column += width * LANES) chains(count, width, w, r, row, column);
    for (; column + LANES <= last; column += LANES) chains(count, 1, w, r, row, column);
    for (; column < last; column++)
        for (int i = 0; i < count; i++) chain(w, r, row + i, column);
}

INLINE void by_output(int form, int count, const float_matrix *w, const float_rows *r, int64_t row, int64_t first,
                      int64_t last) {
    const int width = count == 1 ? 4 : 2;
    int64_t column = first;
    for (; column + width <= last; column += width) folds(form, count, width, w, r, row, column);
    for (; column < last; column++) folds(form, count, 1, w, r, row, column);
}

/* One function per number of rows, so that every sum keeps its register. */
#define ROWS_OF(count)                                                                                               \
    NOINLINE void floats_##count(const float_matrix *w, const float_rows *r, int64_t row, int64_t first, int64_t last) { \
        if (w->form == FLOATS_FLOAT16) by_output(FLOATS_FLOAT16, count, w, r, row, first, last);                    \
        else if (w->form == FLOATS_BFLOAT16) by_output(FLOATS_BFLOAT16, count, w, r, row, first, last);             \
        else if (w->by_output) by_output(FLOATS_FLOAT32, count, w, r, row, first, last);                            \
        else by_input(count, w, r, row, first, last);                                                               \
    }
ROWS_OF(1)
ROWS_OF(2)
ROWS_OF(3)

static void normalise_floats(const lowbit_input *in, int64_t k, float *out, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        const float *x = in->x + row * k;
        float inverse = inverse_norm(x, k, in->epsilon);
        for (int64_t i = 0; i < k; i++) out[row * k + i] = x[i] * inverse * in->weight[i];
    }
}

static void multiply_columns(const float_matrix *w, const float_rows *r, int64_t from, int64_t to) {
    int64_t row = 0;
    for (; row + 3 <= r->m; row += 3) floats_3(w, r, row, from, to);
    if (r->m - row == 2) floats_2(w, r, row, from, to);
    if (r->m - row == 1) floats_1(w, r, row, from, to);
}

/* Computes columns of tiles first..last-1 for all rows. */
static void multiply_floats(const float_matrix *w, const float_rows *r, int64_t first, int64_t last) {
    const int64_t own = w->heads > 1 ? w->n / w->heads : w->n;
    for (int64_t tile = first; tile < last; tile++) {
        const int64_t end = smaller((tile + 1) * FLOATS_TILE, w->n);
        for (int64_t from = tile * FLOATS_TILE, to; from < end; from = to) {
            const int64_t head = from / own;
            float_rows of_head = *r;
            of_head.x += head * r->m * w->k;
            to = smaller(end, (head + 1) * own);
            multiply_columns(w, &of_head, from, to);
        }
    }
}
