/* Products of int8 keys and values, in integers; knows nothing of pages and softmax.
 *
 * Part of attention.inc.h. Sums of integers are exact, so their order is free: positions that a row does not see have
 * levels of 0, and all rows of a panel run over the same positions.
 */

/* Scores of 16 positions, or of 32 in two tiles next to each other, for some queries. */
typedef struct {
    const uint8_t *queries; /* query_head and int8, `step` apart */
    const uint8_t *keys;    /* (tiles, fours, 16, 4) */
    const uint8_t *scales;  /* (tiles, 16) float */
    float *scores;          /* ATTENTION_STRIDE apart */
    int64_t step, fours;
    intptr_t ahead; /* from keys to what is asked for early */
} key_panel;

/* Adds the products of four channels of the keys with those of some queries. */
INLINE void dot_four(const key_panel *p, int64_t i, int rows, int width, ivec sums[INT_PANEL][WIDTH]) {
    kvec keys[WIDTH];
    UNROLL for (int w = 0; w < width; w++) {
        const uint8_t *at = p->keys + (w * p->fours + i) * 64;
        vec_fetch((intptr_t)at + p->ahead);
        keys[w] = kvec_load(at);
    }
    UNROLL for (int r = 0; r < rows; r++) {
        int32_t q;
        memcpy(&q, p->queries + r * p->step + sizeof(query_head) + (size_t)i * 4, sizeof q);
        UNROLL for (int w = 0; w < width; w++) sums[r][w] = ivec_dot(sums[r][w], keys[w], q);
    }
}

INLINE void score_int8(key_panel p, int rows, int width) {
    ivec sums[INT_PANEL][WIDTH];
    UNROLL for (int r = 0; r < rows; r++) {
        query_head head;
        memcpy(&head, p.queries + r * p.step, sizeof head);
        UNROLL for (int w = 0; w < width; w++) sums[r][w] = ivec_set(-KEY_BIAS * head.sum);
    }
    int64_t i = 0;
    for (; i + FOURS <= p.fours; i += FOURS)
        UNROLL for (int j = 0; j < FOURS; j++) dot_four(&p, i + j, rows, width, sums);
    for (; i < p.fours; i++) dot_four(&p, i, rows, width, sums);
    UNROLL for (int w = 0; w < width; w++) {
        vec_fetch((intptr_t)(p.scales + w * 64) + p.ahead);
        const vec scales = vec_load_bytes(p.scales + w * 64);
        UNROLL for (int r = 0; r < rows; r++)
            vec_store(p.scores + r * ATTENTION_STRIDE + w * LANES, vec_mul(ivec_float(sums[r][w]), scales));
    }
}

/* Results of some queries over the positions of a block, in some channels. */
typedef struct {
    const int16_t *levels;                                 /* (rows, positions), 2 * ATTENTION_STRIDE apart */
    const int8_t *pages[ATTENTION_BLOCK / ATTENTION_PAGE]; /* (16, step, 4): at the first channel */
    const float *factors;                                  /* (rows) */
    float *results;                                        /* (rows, step): at the first channel */
    int64_t first, last, step;                             /* positions, whole tiles */
    const int8_t *next;                                    /* what is asked for early beside the last page */
} value_panel;

INLINE void add_int8(value_panel p, int rows, int width) {
    ivec sums[INT_PANEL][WIDTH];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < width; w++) sums[r][w] = ivec_set(0);
    for (int64_t j = p.first; j < p.last; j += ATTENTION_TILE) {
        const int64_t number = j / ATTENTION_PAGE;
        const int8_t *page = p.pages[number];
        const intptr_t ahead = distance(page, (number + 1) * ATTENTION_PAGE < p.last ? p.pages[number + 1] : p.next);
        UNROLL for (int i = 0; i < ATTENTION_TILE; i += 4) {
            four values[WIDTH];
            UNROLL for (int w = 0; w < width; w++) {
                const int8_t *at = page + (j % ATTENTION_PAGE + i) * p.step + w * 4 * LANES;
                vec_fetch((intptr_t)at + ahead);
                values[w] = four_load(at);
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int w = 0; w < width; w++)
                    sums[r][w] = ivec_add_four(sums[r][w], values[w], p.levels + r * 2 * ATTENTION_STRIDE + j + i);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < width; w++)
            vec_store(p.results + r * p.step + w * LANES, vec_mul(ivec_float(sums[r][w]), vec_set(p.factors[r])));
}

typedef void key_function(key_panel p);
typedef void value_function(value_panel p);
#define INTEGERS_OF(rows, width)                                                        \
    NOINLINE void keys_##rows##_##width(key_panel p) { score_int8(p, rows, width); }     \
    NOINLINE void values_##rows##_##width(value_panel p) { add_int8(p, rows, width); }
#define EVERY_INT_WIDTH(rows) INTEGERS_OF(rows, 1) INTEGERS_OF(rows, 2)
EVERY_INT_ROWS(EVERY_INT_WIDTH)
#define KEY_NAMES(rows) {keys_##rows##_1, keys_##rows##_2},
#define VALUE_NAMES(rows) {values_##rows##_1, values_##rows##_2},
static key_function *const key_functions[INT_PANEL][WIDTH] = {EVERY_INT_ROWS(KEY_NAMES)};
static value_function *const value_functions[INT_PANEL][WIDTH] = {EVERY_INT_ROWS(VALUE_NAMES)};

/* Rows of the next panel, of `left`: panels as even as can be. */
static inline int64_t even_panel(int64_t left, int64_t most) {
    const int64_t panels = (left + most - 1) / most;
    return (left + panels - 1) / panels;
}

/* Scores of tiles first..last-1 of a page for `count` queries. */
static void score_page_int8(const head_layout *l, const uint8_t *page, int64_t first, int64_t last,
                            const uint8_t *queries, int64_t count, intptr_t ahead, float *scores) {
    const uint8_t *scales = page + ATTENTION_PAGE * l->fours * 4;
    /* Wanted before the values, if they are int8, too. */
    const intptr_t value_scales = (intptr_t)page + l->key_bytes + ATTENTION_PAGE * l->padded;
    for (int64_t tile = first, width; tile < last; tile += width) {
        width = last - tile >= 2 && INT_WIDTH == 2 ? 2 : 1;
        for (int64_t i = 0; i < width; i++) vec_fetch(value_scales + (tile + i) * 64);
        for (int64_t i = 0, rows; i < count; i += rows) {
            rows = even_panel(count - i, INT_PANEL);
            key_functions[rows - 1][width - 1]((key_panel){queries + i * l->query_bytes, page + tile * l->fours * 64,
                                                           scales + tile * 64,
                                                           scores + i * ATTENTION_STRIDE + tile * LANES,
                                                           l->query_bytes, l->fours, i ? 0 : ahead});
        }
    }
}

/* Results of `count` queries over tiles of positions first..last-1 of a block, of its pages' values. */
static void add_block_int8(const head_layout *l, const uint8_t *const *pages, int64_t first, int64_t last, int64_t count,
                           const uint8_t *next, const attention_bench *w) {
    for (int64_t i = 0, rows; i < count; i += rows) {
        rows = even_panel(count - i, INT_PANEL);
        for (int64_t c = 0, width; c < l->padded; c += width * LANES) {
            width = l->padded - c >= 2 * LANES && INT_WIDTH == 2 ? 2 : 1;
            value_panel p = {(const int16_t *)(const void *)(w->scores + i * ATTENTION_STRIDE), {0}, w->factors + i,
                             w->results + i * l->padded + c, first, last, l->padded, (const int8_t *)next + c * 4};
            for (int64_t page = first / ATTENTION_PAGE; page * ATTENTION_PAGE < last; page++)
                p.pages[page] = (const int8_t *)pages[page] + l->key_bytes + c * 4;
            value_functions[rows - 1][width - 1](p);
        }
    }
}

/* Makes of the weights of positions first..last-1 of a block, whole tiles, levels of at most 32767, in place; returns
 * what a level stands for. Levels of the other positions are 0. */
static float level_weights(float *weights, int64_t first, int64_t last, ivec greatest) {
    const int32_t top = ivec_fold_max(greatest);
    int16_t *levels = (int16_t *)(void *)weights;
    const float most = bits_float((uint32_t)top);
    if (top >= 0x7f800000 || most < TINY_MAX) {
        memset(levels, 0, ATTENTION_BLOCK * sizeof *levels);
        return top >= 0x7f800000 ? bits_float(0x7fc00000u) : 0.0f;
    }
    const vec inverse = vec_set(32767.0f / most), rounder = vec_set(ROUNDER);
    for (int64_t j = first; j < last; j += LANES)
        vec_store_levels(levels + j, vec_add(vec_mul(vec_load(weights + j), inverse), rounder));
    memset(levels, 0, (size_t)first * sizeof *levels);
    memset(levels + last, 0, (size_t)(ATTENTION_BLOCK - last) * sizeof *levels);
    return most / 32767.0f;
}
