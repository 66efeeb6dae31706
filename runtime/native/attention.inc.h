/* What all paths of attention share: jobs, the rows of a block, merging; knows nothing of instruction sets.
 *
 * A path defines `vec`, 16 floats, and what can be done with it, then PANEL, EVERY_ROWS and what belongs to them, and includes
 * this file. All arithmetic is written once, in terms of `vec`, so every path gives the same bits:
 *     vec_load, vec_store, vec_set    from and to memory, one value in all lanes
 *     vec_fetch                       asks for the line at an address
 *     vec_add, vec_sub, vec_mul, vec_div, vec_fma(a, b, c) = a * b + c, vec_abs, vec_sign(size, of)
 *     vec_max(a, b)                   a > b ? a : b, so b where one is not a number
 *     vec_zero_below(x, least, y)     x < least ? 0 : y
 *     vec_within(x, from, to, other)  lanes from <= lane < to of x, others of `other`
 *     vec_power(shifted)              2^n, of n + ROUNDER
 *     vec_fold_sum, vec_fold_max      of all lanes; sums by halves: l and l + 8, then l + 4, l + 2, l + 1
 *     vec_halves, vec_int8            16 values next to each other
 *     vec_halves_of(bytes, high)      the low or high half of each of 16 bytes
 *     vec_transpose(from, step, to)   16 rows of 16 floats, `step` apart, as 16 columns next to each other
 *     vec_eight(bytes)                the low halves of 8 bytes, then the high ones
 *     vec_nibbles(bytes, c, high)     of 16 times 4 bytes the low or high half of the c-th of each
 * and for integers `ivec`, 16 of 32 bits, `kvec`, 16 times 4 int8 of keys, `four`, 4 positions by 16 channels of values:
 *     ivec_set, ivec_float, ivec_max_bits(most, x), ivec_fold_max   greatest bits of floats without their sign
 *     kvec_load, ivec_dot(sum, keys, q)                          adds the products with 4 int8; KEY_BIAS * q besides
 *     vec_store_levels(at, shifted)   n, of n + ROUNDER, in 16 bits
 *     four_load(at), ivec_add_four(sum, values, levels)          adds the products with 4 levels
 * PANEL is the most rows that are multiplied at once, WIDE_ROWS the most with two vectors, WIDTH 2; INT_PANEL and INT_WIDTH
 * likewise.
 */
#include "arithmetic.inc.h"
#include "attention.h"
#include "exchange.h"

/* FOURS: groups of four channels between which a loop is left. */
enum { WIDTH = 2, FOURS = 4, EXP2_TERMS = 7 };
static const float LOG2E = 1.44269504088896341f, LEAST_POWER = -125.0f;
static const float EXP2[EXP2_TERMS] = {1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                                       5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f};
#if defined(UNROLL)
#elif defined(_MSC_VER) && !defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Bytes from one place to another, of whatever they are parts. */
static inline intptr_t distance(const void *from, const void *to) { return (intptr_t)to - (intptr_t)from; }

/* Floats of a page. GCC copies through memory what it is told to copy first, and waits for the parts. */
INLINE vec vec_load_bytes(const uint8_t *at) { return vec_load((const float *)(const void *)at); }

#include "attention_write.inc.h"

#include "attention_pages.inc.h"

#include "attention_integers.inc.h"

#include "attention_block.inc.h"

/* One job's view of a pass. */
typedef struct {
    const attention *a;
    const attention_plan *plan;
    head_layout layout;
    attention_bench bench;
} task;

/* Rows of one sequence that share readings. */
typedef struct {
    int64_t first, last;
} row_tile;

static row_tile tile_at(const attention_plan *plan, int64_t tile) {
    const int64_t *tiles = (const int64_t *)(const void *)((const char *)plan->memory + plan->tiles_at);
    return (row_tile){tiles[tile * 2], tiles[tile * 2 + 1]};
}

/* Positions of a row's path. */
static int64_t path_end(const attention *a, int64_t row) {
    const int32_t *r = a->rows + row * ATTENTION_ROW;
    return (int64_t)r[ATTENTION_PREFIX] + (r[ATTENTION_EXTRAS] > 0 ? r[ATTENTION_EXTRAS] : 0);
}

/* The first position that a row sees. */
static int64_t path_begin(const attention *a, int64_t row) {
    int64_t end = path_end(a, row);
    return a->window > 0 && a->window < end ? end - a->window : 0;
}

/* vec_exp2 of one number. */
static float decay(float x) {
    const float shifted = x + ROUNDER, r = x - (shifted - ROUNDER);
    float p = EXP2[0];
    for (int i = 1; i < EXP2_TERMS; i++) p = fmaf(p, r, EXP2[i]);
    return x < LEAST_POWER ? 0.0f : p * power_of_two(shifted);
}

/* Merges a block's greatest score, sum and result into those of the blocks before it. */
static void merge_block(float greatest, float sum, const float *result, float *state, float *merged, int64_t padded,
                        int first) {
    if (first) {
        state[0] = greatest, state[1] = sum;
        memcpy(merged, result, (size_t)padded * sizeof(float));
        return;
    }
    const float most = greatest > state[0] ? greatest : state[0];
    const float a = decay(state[0] - most), b = decay(greatest - most);
    state[0] = most;
    state[1] = state[1] * a + sum * b;
    for (int64_t c = 0; c < padded; c += LANES)
        vec_store(merged + c, vec_fma(vec_set(b), vec_load(result + c), vec_mul(vec_load(merged + c), vec_set(a))));
}

/* Divides a head's result by its sum, with its sink, and turns it back. */
static void finish(const attention *a, int64_t row, int64_t head, float *state, float *merged) {
    const int64_t v = a->value_size;
    float factor = 1.0f;
    if (a->sinks) {
        const float sink = a->sinks[head] * LOG2E, most = sink > state[0] ? sink : state[0];
        factor = decay(state[0] - most);
        state[1] = state[1] * factor + decay(sink - most);
    }
    const float inverse = 1.0f / state[1];
    for (int64_t c = 0; c < v; c++) merged[c] = merged[c] * factor * inverse;
    if (transformed(a->value_type)) transform(merged, v);
    memcpy(a->out + (row * a->heads + head) * v, merged, (size_t)v * sizeof(float));
}

/* A block's result of a row and head, kept apart: greatest score, sum, channels. */
static float *partial_at(const task *t, int64_t row, int64_t head, int64_t block) {
    const int64_t size = t->layout.padded + ATTENTION_STATE;
    float *partials = (float *)(void *)((char *)t->plan->memory + t->plan->partials_at);
    return partials + ((row * t->a->heads + head) * t->plan->blocks + block) * size;
}

static void keep_results(const task *t, row_tile rows, int64_t kv_head, int64_t block, const attention_bench *w) {
    const int64_t group = t->a->heads / t->a->kv_heads, padded = t->layout.padded;
    for (int64_t i = 0; i < (rows.last - rows.first) * group; i++) {
        const int64_t row = rows.first + i / group;
        const float *result = w->results + i * padded;
        if (t->plan->split) {
            float *at = partial_at(t, row, kv_head * group + i % group, block);
            at[0] = w->greatest[i], at[1] = w->sums[i];
            memcpy(at + ATTENTION_STATE, result, (size_t)padded * sizeof(float));
        } else {
            merge_block(w->greatest[i], w->sums[i], result, w->state + i * ATTENTION_STATE, w->merged + i * padded,
                        padded, block == path_begin(t->a, row) / ATTENTION_BLOCK);
        }
    }
}

/* What a row sees of a block: 0 where that is nothing. */
static int sees(const attention *a, int64_t row, int64_t block, int64_t *seen) {
    const int64_t start = block * ATTENTION_BLOCK, begin = path_begin(a, row) - start;
    seen[0] = begin > 0 ? begin : 0;
    seen[1] = smaller(path_end(a, row) - start, ATTENTION_BLOCK);
    return seen[0] < seen[1];
}

/* Whether what a row sees of a block reaches beyond its prefix: the block is then its own. */
static int apart(const attention *a, int64_t row, int64_t block, const int64_t *seen) {
    return block * ATTENTION_BLOCK + seen[1] > a->rows[row * ATTENTION_ROW + ATTENTION_PREFIX];
}

/* Finds the pages of a block that rows of one sequence see from `first` to `last` of; those of a row that reach beyond
 * its prefix are gathered. */
static void find_pages(const task *t, int64_t row, int64_t kv_head, int64_t block, int64_t first, int64_t last,
                       block_view *view) {
    const attention *a = t->a;
    const int32_t *r = a->rows + row * ATTENTION_ROW;
    uint8_t *gathered = t->bench.gathered;
    for (int64_t i = first / ATTENTION_PAGE; i * ATTENTION_PAGE < last; i++) {
        const int64_t start = block * ATTENTION_BLOCK + i * ATTENTION_PAGE;
        const int64_t end = smaller(start + ATTENTION_PAGE, block * ATTENTION_BLOCK + last);
        if (end <= r[ATTENTION_PREFIX] || r[ATTENTION_EXTRAS] <= 0) {
            view->pages[i] = head_at(a, r[ATTENTION_SEQUENCE], start, kv_head);
            continue;
        }
        gather(a, &t->layout, row, kv_head, first > i * ATTENTION_PAGE ? block * ATTENTION_BLOCK + first : start, end,
               gathered);
        view->pages[i] = gathered;
        gathered += attention_head_bytes(a);
    }
}

/* Queries of rows from `offset` of a tile on: their part of the workbench. */
static attention_bench bench_from(const task *t, int64_t offset) {
    attention_bench w = t->bench;
    w.scores += offset * ATTENTION_STRIDE, w.results += offset * t->layout.padded;
    w.merged += offset * t->layout.padded, w.state += offset * ATTENTION_STATE;
    w.greatest += offset, w.sums += offset, w.factors += offset;
    return w;
}

/* Rows of a tile over a block: those that see nothing but their prefix together, others one by one. */
static void attend_tile(const task *t, row_tile tile, int64_t kv_head, int64_t block) {
    const attention *a = t->a;
    const int64_t group = a->heads / a->kv_heads;
    int64_t(*seen)[2] = t->bench.seen;
    for (int64_t first = tile.first, last; first < tile.last; first = last) {
        last = first + 1;
        if (!sees(a, first, block, seen[0])) continue;
        if (!apart(a, first, block, seen[0]))
            for (; last < tile.last; last++)
                if (!sees(a, last, block, seen[last - first]) || apart(a, last, block, seen[last - first])) break;
        block_view view = {.queries = queries_at(a, t->plan, kv_head, first), .rows = last - first, .group = group};
        view.seen = (const int64_t(*)[2])seen;
        view.first = ATTENTION_BLOCK;
        if ((block + 1) * ATTENTION_BLOCK < a->rows[first * ATTENTION_ROW + ATTENTION_PREFIX])
            view.next = head_at(a, a->rows[first * ATTENTION_ROW], (block + 1) * ATTENTION_BLOCK, kv_head);
        for (int64_t r = 0; r < view.rows; r++) {
            view.first = smaller(seen[r][0], view.first);
            view.last = seen[r][1] > view.last ? seen[r][1] : view.last;
        }
        find_pages(t, first, kv_head, block, view.first, view.last, &view);
        const attention_bench bench = bench_from(t, (first - tile.first) * group);
        attend_block(a, &t->layout, &view, &bench);
        keep_results(t, (row_tile){first, last}, kv_head, block, &bench);
    }
}

/* A tile of rows over all blocks, merging as it goes. */
static void attend_whole(const task *t, row_tile tile, int64_t kv_head) {
    const attention *a = t->a;
    const int64_t group = a->heads / a->kv_heads;
    int64_t begin = path_begin(a, tile.first), end = 0;
    for (int64_t row = tile.first; row < tile.last; row++) {
        begin = smaller(path_begin(a, row), begin);
        end = path_end(a, row) > end ? path_end(a, row) : end;
    }
    for (int64_t block = begin / ATTENTION_BLOCK; block * ATTENTION_BLOCK < end; block++)
        attend_tile(t, tile, kv_head, block);
    for (int64_t i = 0; i < (tile.last - tile.first) * group; i++)
        finish(a, tile.first + i / group, kv_head * group + i % group, t->bench.state + i * ATTENTION_STATE,
               t->bench.merged + i * t->layout.padded);
}

/* Working memory that no other job uses now: there is as much as there are jobs. Low ones first, so that as much of it
 * is touched as jobs run at once. */
static int64_t claim(const attention_plan *plan) {
    void **busy = (void **)(void *)((char *)plan->memory + plan->busy_at);
    int64_t slot = 0;
    while (exchange(&busy[slot], plan->memory)) slot = (slot + 1) % plan->jobs;
    return slot;
}

static void release(const attention_plan *plan, int64_t slot) {
    exchange((void **)(void *)((char *)plan->memory + plan->busy_at) + slot, NULL);
}

static void attend(const attention *a, const attention_plan *plan, int64_t job) {
    const int64_t slot = claim(plan), blocks = plan->split ? plan->blocks : 1;
    const int64_t units = plan->tiles * a->kv_heads * blocks;
    task t = {a, plan, layout_of(a), {0}};
    attention_lay_out(a, plan, (char *)plan->memory + plan->slots_at + (size_t)slot * plan->slot_bytes, &t.bench);
    for (int64_t unit = units * job / plan->jobs; unit < units * (job + 1) / plan->jobs; unit++) {
        const int64_t kv_head = unit / blocks % a->kv_heads;
        const row_tile tile = tile_at(plan, unit / blocks / a->kv_heads);
        if (plan->split)
            attend_tile(&t, tile, kv_head, unit % blocks);
        else
            attend_whole(&t, tile, kv_head);
    }
    release(plan, slot);
}

/* Merges the blocks of heads, in order: the first one's place holds the result. */
static void merge(const attention *a, const attention_plan *plan, int64_t job) {
    const task t = {a, plan, layout_of(a), {0}};
    const int64_t units = a->count * a->heads;
    for (int64_t unit = units * job / plan->merges; unit < units * (job + 1) / plan->merges; unit++) {
        const int64_t row = unit / a->heads, head = unit % a->heads;
        const int64_t begin = path_begin(a, row) / ATTENTION_BLOCK;
        float *first = partial_at(&t, row, head, begin);
        for (int64_t block = begin + 1; block * ATTENTION_BLOCK < path_end(a, row); block++) {
            const float *at = partial_at(&t, row, head, block);
            merge_block(at[0], at[1], at + ATTENTION_STATE, first, first + ATTENTION_STATE, t.layout.padded, 0);
        }
        finish(a, row, head, first, first + ATTENTION_STATE);
    }
}
