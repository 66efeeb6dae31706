/* How a pass of attention is cut into jobs and where its working memory lies, and which functions an instruction set
 * has for it; knows nothing of arithmetic.
 *
 * Few rows see many positions: jobs are then ranges of (rows, kv head, block), whose results are kept apart and merged
 * in the order of blocks. Many rows are enough jobs by themselves: (rows, kv head), merging as they go. Both give the
 * same bits.
 */
#include "attention.h"

enum { LINE = 64 };
/* Queries that share each reading of keys and values: their scores of a block, 1 KiB each, stay in the second cache. */
enum { MOST_QUERIES = 112, FEW_QUERIES = 28 };
/* Jobs among which threads find balance. */
enum { ENOUGH_JOBS = 16, MOST_JOBS = 32 };
/* Results of blocks that are kept apart take at most this. */
static const int64_t MOST_PARTIALS = (int64_t)2 << 20;

static int64_t rounded(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t attention_key_bytes(int32_t type, int32_t key_size) {
    const int64_t h = key_size, page = ATTENTION_PAGE;
    switch (type) {
    case ATTENTION_FLOAT32: return page * h * 4;
    case ATTENTION_FLOAT16: return page * h * 2;
    case ATTENTION_INT8: return page * (rounded(h, 4) + 4);
    default: return rounded(page * (rounded(h, 8) / 2 + (h + 15) / 16 * 2), LINE);
    }
}

int64_t attention_value_bytes(int32_t type, int32_t value_size) {
    const int64_t v = rounded(value_size, ATTENTION_TILE), page = ATTENTION_PAGE;
    switch (type) {
    case ATTENTION_FLOAT32: return page * v * 4;
    case ATTENTION_FLOAT16: return page * v * 2;
    case ATTENTION_INT8: return page * (v + 4);
    default: return rounded(page * (v / 2 + (value_size + 15) / 16 * 2), LINE);
    }
}

/* Positions of the path of a row. */
static int64_t length_of(const attention *a, int64_t row) {
    const int32_t *r = a->rows + row * ATTENTION_ROW;
    return (int64_t)r[ATTENTION_PREFIX] + most(r[ATTENTION_EXTRAS], 0);
}

static int64_t positions_seen(const attention *a, int64_t row) {
    int64_t length = length_of(a, row);
    return a->window && a->window < length ? a->window : length;
}

int64_t attention_cost(const attention *a) {
    /* Eight queries take as long to multiply as a position takes to read in float32. */
    enum { FREE_QUERIES = 8 };
    int64_t positions = 0, queries = a->heads / a->kv_heads;
    for (int64_t row = 0; row < a->count; row++) positions += positions_seen(a, row);
    const int64_t channels = attention_query_size(a) + a->value_size;
    return positions * a->kv_heads * channels * 4 * most(queries, FREE_QUERIES) / FREE_QUERIES;
}

/* Cuts rows into runs of one sequence of at most `tile_rows`: (tiles, 2) first and last; NULL only counts. */
static int64_t cut_rows(const attention *a, int64_t tile_rows, int64_t *tiles) {
    int64_t count = 0;
    for (int64_t first = 0, last; first < a->count; first = last) {
        const int32_t *sequence = a->rows + first * ATTENTION_ROW + ATTENTION_SEQUENCE;
        for (last = first + 1; last < a->count && last - first < tile_rows; last++)
            if (sequence[(last - first) * ATTENTION_ROW] != *sequence) break;
        if (tiles) tiles[count * 2] = first, tiles[count * 2 + 1] = last;
        count++;
    }
    return count;
}

/* Whether pages of a type are made float32 before they are multiplied. */
static int unpacked(const attention *a, int32_t type) {
    return type == ATTENTION_FLOAT16 || type == ATTENTION_INT4 || (a->latent && type == ATTENTION_INT8);
}

/* Floats of a page's keys as queries meet them; values join them by whole vectors, which reach beyond. */
static int64_t met(const attention *a, int64_t page) {
    if (a->latent) return page * attention_query_size(a) + ATTENTION_TILE * ATTENTION_TILE;
    return unpacked(a, a->key_type) ? page * a->key_size : 0;
}

static void *place(char *memory, int64_t *at, int64_t bytes) {
    void *placed = memory ? memory + *at : NULL;
    *at += rounded(bytes, LINE);
    return placed;
}

size_t attention_lay_out(const attention *a, const attention_plan *plan, char *memory, attention_bench *out) {
    const int64_t v = rounded(a->value_size, ATTENTION_TILE), page = ATTENTION_PAGE;
    const int64_t rows = least(plan->tile_rows, a->count), queries = rows * (a->heads / a->kv_heads);
    int64_t at = 0;
    out->scores = place(memory, &at, queries * ATTENTION_STRIDE * 4);
    out->results = place(memory, &at, queries * v * 4);
    out->merged = place(memory, &at, queries * v * 4);
    out->state = place(memory, &at, queries * ATTENTION_STATE * 4);
    out->greatest = place(memory, &at, queries * 4);
    out->sums = place(memory, &at, queries * 4);
    out->factors = place(memory, &at, queries * 4);
    out->seen = place(memory, &at, rows * 16);
    out->keys = place(memory, &at, met(a, page) * 4);
    out->values = place(memory, &at, unpacked(a, a->value_type) ? page * v * 4 : 0);
    out->gathered = place(memory, &at, plan->gathered * attention_head_bytes(a));
    return (size_t)at;
}

/* Pages of a block, of the row that has most, that hold positions beyond its prefix. */
static int64_t pages_gathered(const attention *a) {
    int64_t greatest = 0;
    for (int64_t row = 0; row < a->count; row++) {
        const int32_t *r = a->rows + row * ATTENTION_ROW;
        if (r[ATTENTION_EXTRAS] <= 0) continue;
        const int64_t pages = (length_of(a, row) - 1) / ATTENTION_PAGE - r[ATTENTION_PREFIX] / ATTENTION_PAGE + 1;
        greatest = most(greatest, least(pages, ATTENTION_BLOCK / ATTENTION_PAGE));
    }
    return greatest;
}

attention_plan attention_plan_of(const attention *a, int64_t wanted) {
    attention_plan plan = {0};
    const int64_t group = a->heads / a->kv_heads, kv = a->kv_heads;
    int64_t longest = 0;
    for (int64_t row = 0; row < a->count; row++) longest = most(longest, length_of(a, row));
    wanted = most(1, least(wanted, MOST_JOBS));
    plan.blocks = (longest + ATTENTION_BLOCK - 1) / ATTENTION_BLOCK;
    plan.tile_rows = most(1, MOST_QUERIES / group);
    plan.tiles = cut_rows(a, plan.tile_rows, NULL);
    const int64_t v = rounded(a->value_size, ATTENTION_TILE);
    const int64_t partials = a->count * a->heads * plan.blocks * (v + ATTENTION_STATE) * 4;
    plan.split = plan.tiles * kv < wanted && plan.blocks > 1 && partials <= MOST_PARTIALS;
    if (!plan.split && plan.tiles * kv < wanted) {
        int64_t rows = most(a->count * kv / ENOUGH_JOBS, (FEW_QUERIES + group - 1) / group);
        plan.tile_rows = most(1, least(plan.tile_rows, rows));
        plan.tiles = cut_rows(a, plan.tile_rows, NULL);
    }
    plan.jobs = least(wanted, plan.tiles * kv * (plan.split ? plan.blocks : 1));
    plan.merges = plan.split ? least(plan.jobs, most(1, partials / (64 * 1024))) : 0;
    plan.gathered = pages_gathered(a);
    attention_bench bench;
    size_t at = 0;
    plan.queries_at = at, at += (size_t)rounded(a->count * a->heads * attention_query_bytes(a), LINE);
    plan.rows_at = at, at += (size_t)(a->count * attention_row_bytes(a));
    plan.tiles_at = at, at += (size_t)rounded(plan.tiles * 2 * 8, LINE);
    plan.busy_at = at, at += (size_t)rounded(plan.jobs * (int64_t)sizeof(void *), LINE);
    plan.partials_at = at, at += plan.split ? (size_t)rounded(partials, LINE) : 0;
    plan.slots_at = at, plan.slot_bytes = attention_lay_out(a, &plan, NULL, &bench);
    plan.bytes = at + (size_t)plan.jobs * plan.slot_bytes;
    return plan;
}

void attention_start(const attention *a, attention_plan *plan, void *memory) {
    plan->memory = memory;
    cut_rows(a, plan->tile_rows, (int64_t *)(void *)((char *)memory + plan->tiles_at));
    void **busy = (void **)(void *)((char *)memory + plan->busy_at);
    for (int64_t i = 0; i < plan->jobs; i++) busy[i] = NULL;
}

#if defined(__x86_64__) || defined(_M_X64)
extern const lowbit_isa lowbit_avx512vnni, lowbit_avxvnni, lowbit_avx2;
extern const attention_path attention_avx512, attention_avx2;

static const attention_path *own_path(const lowbit_isa *isa) {
    if (isa == &lowbit_avx512vnni) return &attention_avx512;
    return isa == &lowbit_avxvnni || isa == &lowbit_avx2 ? &attention_avx2 : NULL;
}
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const lowbit_isa lowbit_neon_i8mm, lowbit_neon_dot;
extern const attention_path attention_neon;

static const attention_path *own_path(const lowbit_isa *isa) {
    return isa == &lowbit_neon_i8mm || isa == &lowbit_neon_dot ? &attention_neon : NULL;
}
#else
static const attention_path *own_path(const lowbit_isa *isa) { return (void)isa, NULL; }
#endif

const attention_path *attention_path_of(const lowbit_isa *isa) {
    const attention_path *path = own_path(isa);
    /* A compiler that could not build a path leaves it without functions. */
    return path && path->attend ? path : &attention_portable;
}
