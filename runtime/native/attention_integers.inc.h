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

INLINE void score_int8(key_panel p, int rows, int width) {
    ivec sums[INT_PANEL][WIDTH];
    UNROLL for (int r = 0; r < rows; r++) {
        query_head head;
        memcpy(&head, p.queries + r * p.step, sizeof head);
        UNROLL for (int w = 0; w < width; w++) sums[r][w] = ivec_set(-KEY_BIAS * head.sum);
    }
    for (int64_t i = 0; i < p.fours; i++) {
        kvec keys[WIDTH];
        UNROLL for (int w = 0; w < width; w++) {
            const uint8_t *at = p.keys + (w * p.fours + i) * 64;
            vec_fetch((intptr_t)at + p.ahead);
            keys[w] = kvec_load(at);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t q;
            memcpy(&q, p.queries + r * p.step + sizeof(query_head) + (size_t)i * 4, sizeof q);
            UNROLL for (int w = 0; w < width; w++) sums[r][w] = ivec_dot(sums[r][w], keys[w], q);
        }
    }
    UNROLL for (int w = 0; w < width; w++) {
        const vec scales = vec_load_bytes(p.scales + w * 64);
        UNROLL for (int r = 0; r < rows; r++)
            vec_store(p.scores + r * ATTENTION_STRIDE + w * LANES, vec_mul(ivec_float(sums[r][w]), scales));
    }
}

/* Results of some queries over the positions of a block, in some of a chunk's channels. */
typedef struct {
    const int16_t *levels;                             /* (rows, positions), 2 * ATTENTION_STRIDE apart */
    const int8_t *pages[ATTENTION_BLOCK / ATTENTION_PAGE]; /* (64, step): at the chunk's first channel */
    const float *factors;                              /* (rows) */
    float *results;                                    /* (rows, step): at the chunk's first channel */
    int64_t first, last, step, left;                   /* positions; channels of the chunk that there are */
    const int8_t *next;                                /* what is asked for early beside the last page */
} value_panel;

INLINE void add_int8(value_panel p, int rows, int part) {
    ivec sums[INT_PANEL][INT_WIDTH];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < INT_WIDTH; w++) sums[r][w] = ivec_set(0);
    for (int64_t start = p.first / ATTENTION_PAGE * ATTENTION_PAGE; start < p.last; start += ATTENTION_PAGE) {
        const int8_t *page = p.pages[start / ATTENTION_PAGE];
        const int64_t last = smaller(p.last - start, ATTENTION_PAGE);
        const intptr_t ahead = distance(page, start + ATTENTION_PAGE < p.last ? p.pages[start / ATTENTION_PAGE + 1] : p.next);
        for (int64_t j = start < p.first ? (p.first - start) / 4 * 4 : 0; j < last; j += 4) {
            four values[INT_WIDTH];
            UNROLL for (int i = 0; i < 4 && part == 0; i++) vec_fetch((intptr_t)(page + (j + i) * p.step) + ahead);
            UNROLL for (int w = 0; w < INT_WIDTH; w++)
                values[w] = four_load(page + j * p.step, p.step, p.left, part + w);
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int w = 0; w < INT_WIDTH; w++)
                    sums[r][w] = ivec_add_four(sums[r][w], values[w], p.levels + r * 2 * ATTENTION_STRIDE + start + j);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < INT_WIDTH; w++)
            four_put(p.results + r * p.step, p.left, part + w, vec_mul(ivec_float(sums[r][w]), vec_set(p.factors[r])));
}

typedef void key_function(key_panel p);
typedef void value_function(value_panel p, int part);
#define KEYS_OF(rows)                                                                       \
    NOINLINE void keys_##rows##_1(key_panel p) { score_int8(p, rows, 1); }                  \
    NOINLINE void keys_##rows##_all(key_panel p) { score_int8(p, rows, INT_WIDTH); }
#define VALUES_OF(rows)                                                           \
    NOINLINE void values_##rows(value_panel p, int part) {                        \
        if (part == 0) add_int8(p, rows, 0);                                      \
        if (INT_WIDTH < CHUNK / LANES && part == INT_WIDTH) add_int8(p, rows, INT_WIDTH); \
    }
EVERY_INT_ROWS(KEYS_OF)
EVERY_INT_ROWS(VALUES_OF)
#define KEY_NAMES(rows) {keys_##rows##_1, keys_##rows##_all},
#define VALUE_NAMES(rows) values_##rows,
static key_function *const key_functions[INT_PANEL][WIDTH] = {EVERY_INT_ROWS(KEY_NAMES)};
static value_function *const value_functions[INT_PANEL] = {EVERY_INT_ROWS(VALUE_NAMES)};

/* Rows of the next panel, of `left`: panels as even as can be. */
static inline int64_t even_panel(int64_t left, int64_t most) {
    const int64_t panels = (left + most - 1) / most;
    return (left + panels - 1) / panels;
}

/* Scores of tiles first..last-1 of a page for `count` queries. */
static void score_page_int8(const head_layout *l, const uint8_t *page, int64_t first, int64_t last,
                            const uint8_t *queries, int64_t count, intptr_t ahead, float *scores) {
    const uint8_t *scales = page + ATTENTION_PAGE * l->fours * 4;
    for (int64_t tile = first, width; tile < last; tile += width) {
        width = last - tile >= 2 && INT_WIDTH == 2 ? 2 : 1;
        for (int64_t i = 0, rows; i < count; i += rows) {
            rows = even_panel(count - i, INT_PANEL);
            key_functions[rows - 1][width - 1]((key_panel){queries + i * l->query_bytes, page + tile * l->fours * 64,
                                                           scales + tile * 64,
                                                           scores + i * ATTENTION_STRIDE + tile * LANES,
                                                           l->query_bytes, l->fours, i ? 0 : ahead});
        }
    }
}

/* Results of `count` queries over positions first..last-1 of a block, of its pages' values. */
static void add_block_int8(const head_layout *l, const uint8_t *const *pages, int64_t first, int64_t last, int64_t count,
                           const uint8_t *next, const attention_bench *w) {
    for (int64_t i = 0, rows; i < count; i += rows) {
        rows = even_panel(count - i, INT_PANEL);
        for (int64_t c = 0; c < l->padded; c += CHUNK) {
            value_panel p = {(const int16_t *)(const void *)(w->scores + i * ATTENTION_STRIDE), {0}, w->factors + i,
                             w->results + i * l->padded + c, first, last, l->padded, l->padded - c,
                             (const int8_t *)next + c};
            for (int64_t page = first / ATTENTION_PAGE; page * ATTENTION_PAGE < last; page++)
                p.pages[page] = (const int8_t *)pages[page] + l->key_bytes + c;
            for (int part = 0; part < CHUNK / LANES; part += INT_WIDTH) value_functions[rows - 1](p, part);
        }
    }
}

/* Makes of the weights of positions first..last-1 of a block, whole tiles, levels of at most 32767, in place, in every
 * four those of 0, 2, 1, 3; returns what a level stands for. Levels of the other positions are 0. */
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
