/* One block of positions and the rows that see it: scores, softmax, results; knows nothing of jobs.
 *
 * Part of attention.inc.h. One kernel does both products: sums (rows, 16 lanes) of a[row][k] * b[k][lane], k ascending.
 * Lanes are 16 positions of keys, or 16 channels of values.
 */

/* A panel of rows times vectors of lanes, over k = 0..count-1. */
typedef struct {
    const float *a; /* (rows, count), a_step apart */
    const float *b; /* (count, lanes), b_step apart; the second vector of lanes b_apart from the first */
    float *c;       /* (rows, lanes), c_step apart, second vector right behind the first */
    int64_t a_step, b_step, b_apart, c_step, count;
    intptr_t ahead; /* from b to what is asked for early */
} panel;

/* With `add`, sums go on from what is there. */
INLINE void multiply_panel(panel p, int rows, int width, int add) {
    vec sums[PANEL][WIDTH];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < width; w++)
            sums[r][w] = add ? vec_load(p.c + r * p.c_step + w * LANES) : vec_set(0.0f);
    for (int64_t k = 0; k < p.count; k++) {
        vec b[WIDTH];
        UNROLL for (int w = 0; w < width; w++) {
            const float *at = p.b + k * p.b_step + w * p.b_apart;
            vec_fetch((intptr_t)at + p.ahead);
            b[w] = vec_load(at);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const vec a = vec_set(p.a[r * p.a_step + k]);
            UNROLL for (int w = 0; w < width; w++) sums[r][w] = vec_fma(a, b[w], sums[r][w]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int w = 0; w < width; w++) vec_store(p.c + r * p.c_step + w * LANES, sums[r][w]);
}

/* One function per number of rows: the compiler then keeps every sum in a register of its own. */
typedef void panel_function(panel p);
#define PANEL_OF(rows, width)                                                               \
    NOINLINE void scores_##rows##_##width(panel p) { multiply_panel(p, rows, width, 0); }   \
    NOINLINE void results_##rows##_##width(panel p) { multiply_panel(p, rows, width, 1); }
#define PANEL_NAMES(rows) {{scores_##rows##_1, scores_##rows##_2}, {results_##rows##_1, results_##rows##_2}}
#define EVERY_WIDTH(rows) PANEL_OF(rows, 1) PANEL_OF(rows, 2)
EVERY_ROWS(EVERY_WIDTH)
#define NAMES_OF(rows) PANEL_NAMES(rows),
static panel_function *const panel_functions[PANEL][2][2] = {EVERY_ROWS(NAMES_OF)};

/* Scores of a tile or two: (queries, 16 or 32) at `scores`. */
static void multiply_keys(int64_t h, const float *queries, int64_t count, const float *tile, int64_t width,
                          intptr_t ahead, float *scores) {
    for (int64_t i = 0, rows; i < count; i += rows) {
        rows = even_panel(count - i, PANEL);
        panel_functions[rows - 1][0][width - 1]((panel){queries + i * h, tile, scores + i * ATTENTION_STRIDE, h,
                                                        ATTENTION_TILE, h * ATTENTION_TILE, ATTENTION_STRIDE, h,
                                                        i ? 0 : ahead});
    }
}

/* Adds the values of positions first..last-1 times their probabilities to the results of a panel of queries. */
static void add_values(const float *probabilities, const float *values, int64_t padded, int64_t first, int64_t last,
                       int64_t rows, intptr_t ahead, float *results) {
    if (first >= last) return;
    for (int64_t c = 0, width; c < padded; c += width * LANES) {
        width = padded - c >= 2 * LANES && rows <= WIDE_ROWS ? 2 : 1;
        panel_functions[rows - 1][1][width - 1]((panel){probabilities + first, values + first * padded + c, results + c,
                                                        ATTENTION_STRIDE, padded, LANES, padded, last - first,
                                                        ahead});
    }
}

/* 2^x, where x is at most 0 or not a number: 2^n times a polynomial on [-1/2, 1/2] (Cephes' exp2f). Below LEAST_POWER it
 * is 0. */
INLINE vec vec_exp2(vec x) {
    const vec shifted = vec_add(x, vec_set(ROUNDER)), r = vec_sub(x, vec_sub(shifted, vec_set(ROUNDER)));
    vec p = vec_set(EXP2[0]);
    UNROLL for (int i = 1; i < EXP2_TERMS; i++) p = vec_fma(p, r, vec_set(EXP2[i]));
    return vec_zero_below(x, vec_set(LEAST_POWER), vec_mul(p, vec_power(shifted)));
}

/* log2(e) c * tanh(s / c): of t = exp(-2 |s / c|) it is (1 - t) / (1 + t) with the sign of s. */
INLINE vec soft_capped(vec s, float cap) {
    const vec x = vec_div(s, vec_set(cap)), size = vec_abs(x);
    const vec t = vec_exp2(vec_mul(size, vec_set(-2.0f * LOG2E))), one = vec_set(1.0f);
    return vec_mul(vec_set(cap * LOG2E), vec_sign(vec_div(vec_sub(one, t), vec_add(one, t)), x));
}

/* Some rows of one sequence, one kv head and one block, with the positions each of them sees. */
typedef struct {
    const uint8_t *queries;           /* (rows * group), float32 or int8 */
    int64_t rows, group;
    const int64_t (*seen)[2];         /* (rows): first and last within the block */
    int64_t first, last;              /* of all of them */
    const uint8_t *pages[ATTENTION_BLOCK / ATTENTION_PAGE]; /* keys and values of the head; NULL where nobody looks */
    const uint8_t *next;              /* the page after them, or NULL: asked for early */
} block_view;

/* Makes scores of the products of the positions of a block that a row sees, in place; returns the greatest. */
static float scale_scores(const head_layout *l, const block_view *b, const int64_t *seen, float *scores, float factor,
                          float softcap) {
    const int64_t first = seen[0], last = seen[1];
    const vec none = vec_set(-INFINITY), scale = vec_set(factor);
    vec most = none;
    for (int64_t j = first / LANES * LANES; j < last; j += LANES) {
        vec s = vec_mul(vec_load(scores + j), scale);
        if (softcap > 0.0f) s = soft_capped(s, softcap);
        if (l->weights_at) {
            const uint8_t *weights = b->pages[j / ATTENTION_PAGE] + l->weights_at + j % ATTENTION_PAGE * 4;
            s = vec_fma(vec_load_bytes(weights), vec_set(LOG2E), s);
        }
        if (j < first || j + LANES > last) s = vec_within(s, (int)(first - j), (int)(last - j), none);
        vec_store(scores + j, s);
        most = vec_max(s, most);
    }
    return vec_fold_max(most);
}

/* From keys of a page of a block, or from its values, to what comes after them. */
static intptr_t keys_ahead(const head_layout *l, const block_view *b, int64_t start) {
    const int64_t page = start / ATTENTION_PAGE;
    if (start + ATTENTION_PAGE < b->last) return distance(b->pages[page], b->pages[page + 1]);
    return distance(b->pages[page], b->pages[b->first / ATTENTION_PAGE] + l->key_bytes);
}

static intptr_t values_ahead(const head_layout *l, const block_view *b, int64_t start) {
    const int64_t page = start / ATTENTION_PAGE;
    if (start + ATTENTION_PAGE < b->last) return distance(b->pages[page], b->pages[page + 1]);
    return b->next ? distance(b->pages[page] + l->key_bytes, b->next) : 0;
}

static void score_block(const attention *a, const head_layout *l, const block_view *b, const attention_bench *w) {
    const int64_t count = b->rows * b->group, tile_size = l->met * ATTENTION_TILE, first = b->first, last = b->last;
    for (int64_t start = first / ATTENTION_PAGE * ATTENTION_PAGE; start < last; start += ATTENTION_PAGE) {
        const uint8_t *page = b->pages[start / ATTENTION_PAGE];
        int64_t tile = start < first ? (first - start) / ATTENTION_TILE : 0;
        int64_t end = (smaller(last - start, ATTENTION_PAGE) + ATTENTION_TILE - 1) / ATTENTION_TILE;
        intptr_t ahead = keys_ahead(l, b, start);
        if (l->integer_keys) {
            score_page_int8(l, page, tile, end, b->queries, count, ahead, w->scores + start);
            continue;
        }
        const float *keys = w->keys;
        if (a->latent)
            unpack_latent(a, l, page, tile, end, 0, w), ahead = 0;
        else if (a->key_type == ATTENTION_FLOAT32)
            keys = (const float *)(const void *)page;
        else
            unpack_keys(a->key_type, l, page, tile, end, ahead, w->keys), ahead = 0;
        for (int64_t width; tile < end; tile += width) {
            width = end - tile >= 2 && even_panel(count, PANEL) <= WIDE_ROWS ? 2 : 1;
            multiply_keys(l->met, (const float *)(const void *)b->queries, count, keys + tile * tile_size, width, ahead,
                          w->scores + start + tile * ATTENTION_TILE);
        }
    }
}

/* Adds a page's values to the results of the queries: what all rows of a panel see together, what one sees before and
 * after that by itself. */
static void add_page(const head_layout *l, const block_view *b, const float *values, int64_t start, intptr_t ahead,
                     const attention_bench *w) {
    const int64_t count = b->rows * b->group, padded = l->padded;
    for (int64_t i = 0, rows; i < count; i += rows) {
        rows = even_panel(count - i, PANEL);
        const float *p = w->scores + i * ATTENTION_STRIDE + start;
        float *results = w->results + i * padded;
        int64_t from[PANEL], to[PANEL], first = 0, last = ATTENTION_PAGE;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t *seen = b->seen[(i + r) / b->group];
            from[r] = seen[0] > start ? seen[0] - start : 0;
            to[r] = smaller(seen[1] - start, ATTENTION_PAGE);
            first = from[r] > first ? from[r] : first;
            last = smaller(to[r], last);
        }
        if (first > last) first = last = ATTENTION_PAGE;
        for (int64_t r = 0; r < rows; r++)
            add_values(p + r * ATTENTION_STRIDE, values, padded, from[r], smaller(first, to[r]), 1, 0, results + r * padded);
        add_values(p, values, padded, first, last, rows, i ? 0 : ahead, results);
        for (int64_t r = 0; r < rows; r++)
            add_values(p + r * ATTENTION_STRIDE, values, padded, last > from[r] ? last : from[r], to[r], 1, 0,
                       results + r * padded);
    }
}

/* Makes probabilities of the scores of positions that a row sees, relative to the greatest, in place; returns their sum.
 * With `weigh` they are multiplied by the scales of the int8 values they belong to, and `most` has the greatest. */
INLINE float soften(const head_layout *l, const block_view *b, const int64_t *seen, float *scores, float greatest,
                    int weigh, ivec *most) {
    const vec m = vec_set(greatest), zero = vec_set(0.0f);
    vec total = zero;
    ivec top = ivec_set(0);
    for (int64_t j = seen[0] / LANES * LANES; j < seen[1]; j += LANES) {
        const int edge = j < seen[0] || j + LANES > seen[1], from = (int)(seen[0] - j), to = (int)(seen[1] - j);
        vec p = vec_exp2(vec_sub(vec_load(scores + j), m));
        if (edge) p = vec_within(p, from, to, zero);
        total = vec_add(total, p);
        if (weigh) {
            const uint8_t *values = b->pages[j / ATTENTION_PAGE] + l->key_bytes;
            p = vec_mul(p, vec_load_bytes(values + ATTENTION_PAGE * l->padded + j % ATTENTION_PAGE * 4));
            /* What lies there and nobody sees need not be a number. */
            if (edge) p = vec_within(p, from, to, zero);
            top = ivec_max_bits(top, p);
        }
        vec_store(scores + j, p);
    }
    *most = top;
    return vec_fold_sum(total);
}

static void add_block(const attention *a, const head_layout *l, const block_view *b, const attention_bench *w) {
    memset(w->results, 0, (size_t)(b->rows * b->group * l->padded) * sizeof(float));
    for (int64_t start = b->first / ATTENTION_PAGE * ATTENTION_PAGE; start < b->last; start += ATTENTION_PAGE) {
        const uint8_t *page = b->pages[start / ATTENTION_PAGE] + l->key_bytes;
        const float *values = w->values;
        intptr_t ahead = values_ahead(l, b, start);
        if (a->value_type == ATTENTION_FLOAT32)
            values = (const float *)(const void *)page;
        else
            unpack_values(a->value_type, l, page, start < b->first ? b->first - start : 0,
                          smaller(b->last - start, ATTENTION_PAGE), ahead, w->values), ahead = 0;
        add_page(l, b, values, start, ahead, w);
    }
}

/* Greatest score, sum and result of every query over a block. */
static void attend_block(const attention *a, const head_layout *l, const block_view *b, const attention_bench *w) {
    const int64_t count = b->rows * b->group;
    score_block(a, l, b, w);
    for (int64_t i = 0; i < count; i++) {
        const int64_t *seen = b->seen[i / b->group];
        float *scores = w->scores + i * ATTENTION_STRIDE, factor = a->softcap > 0.0f ? a->scale : a->scale * LOG2E;
        if (l->integer_keys) {
            query_head head;
            memcpy(&head, b->queries + i * l->query_bytes, sizeof head);
            factor = head.scale * factor;
        }
        w->greatest[i] = scale_scores(l, b, seen, scores, factor, a->softcap);
        ivec most;
        if (l->integer_values) {
            w->sums[i] = soften(l, b, seen, scores, w->greatest[i], 1, &most);
            w->factors[i] = level_weights(scores, seen[0] / LANES * LANES, (seen[1] + LANES - 1) / LANES * LANES, most);
        } else {
            w->sums[i] = soften(l, b, seen, scores, w->greatest[i], 0, &most);
        }
    }
    if (l->integer_values)
        add_block_int8(l, b->pages, b->first / LANES * LANES, (b->last + LANES - 1) / LANES * LANES, count,
                       b->next ? b->next : b->pages[b->first / ATTENTION_PAGE], w);
    else
        add_block(a, l, b, w);
}
