/* Tables of attention, most of them malformed: refused just where a slow reading of their rules refuses them, and what
 * is let through is computed, so that a sanitizer sees what it should not have touched. Knows nothing of values.
 *
 * Prints a line per instruction set: name, cases, failures. Exits with 1 if anything failed.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include <stdio.h>
#include <string.h>

#include "attention_check.h"
#include "random.h"

enum { CASES = 4000, MOST_ROWS = 6, MOST_COLUMNS = 3, MOST_SEQUENCES = 3, MOST_EXTRAS = 8 };

typedef struct {
    attention a;
    attention_bounds bounds;
    int64_t pages;
} fuzz;

static int32_t any_number(void) {
    static const int32_t ODD[] = {-1, -2, INT32_MIN, INT32_MAX, INT32_MAX - 63, 1 << 30, 63, 64, 65, 127, 128, 191, 192};
    return chance(50) ? PICK(ODD) : (int32_t)below(200) - 4;
}

static void make_sizes(fuzz *f) {
    attention *a = &f->a;
    *f = (fuzz){0};
    *a = (attention){.kv_heads = 1 + (int32_t)below(2), .scale = 0.3f, .norm_epsilon = 1e-5f};
    a->heads = a->kv_heads * (1 + (int32_t)below(3)), a->key_size = 1 + (int32_t)below(20);
    a->value_size = 1 + (int32_t)below(20), a->window = chance(50) ? 0 : 1 + below(100);
    f->pages = 1 + below(5), f->bounds.sequences = below(MOST_SEQUENCES) + 1;
    a->columns = 1 + below(MOST_COLUMNS), a->count = 1 + below(MOST_ROWS), f->bounds.extras = 1 + below(MOST_EXTRAS);
    f->bounds.positions = 5;
    a->rotary = chance(50) ? a->key_size / 2 * 2 : 0;
}

/* A row that is right as far as it can be without looking at the others: (4). */
static void make_row(const fuzz *f, int32_t *row, int32_t *extras, int64_t *used) {
    int64_t most = f->a.columns * ATTENTION_PAGE, count = chance(50) ? 0 : below(4);
    if (count > f->bounds.extras - *used) count = f->bounds.extras - *used;
    row[0] = (int32_t)below(f->bounds.sequences), row[1] = (int32_t)(count ? below(most - 20) : 1 + below(most));
    row[2] = (int32_t)*used, row[3] = (int32_t)count;
    int64_t slot = row[1] - 1;
    for (int64_t i = 0; i < count; i++) slot += 1 + below(6), extras[(*used)++] = (int32_t)slot;
}

static void make_tables(fuzz *f) {
    attention *a = &f->a;
    int64_t cells = f->bounds.sequences * a->columns, used = 0;
    int32_t *pages = take((size_t)cells * 4, 16, 4), *rows = take((size_t)a->count * 16, 16, 4);
    int32_t *extras = take((size_t)f->bounds.extras * 4, 16, 4);
    int64_t *positions = take((size_t)a->count * 8, 16, 8);
    int apart = chance(60) && f->pages >= cells;
    for (int64_t i = 0; i < cells; i++) pages[i] = (int32_t)(apart ? i : chance(15) ? -1 : below(f->pages));
    for (int64_t i = 0; i < f->bounds.extras; i++) extras[i] = any_number();
    for (int64_t r = 0; r < a->count; r++) {
        make_row(f, rows + r * ATTENTION_ROW, extras, &used);
        positions[r] = below(f->bounds.positions);
    }
    a->pages = pages, a->rows = rows, a->extras = extras, a->positions = positions;
    for (int damage = (int)below(3); damage > 0; damage--) {
        int which = (int)below(4);
        if (which == 0) pages[below(cells)] = any_number();
        if (which == 1) rows[below(a->count * ATTENTION_ROW)] = any_number();
        if (which == 2) extras[below(f->bounds.extras)] = any_number();
        if (which == 3) positions[below(a->count)] = any_number();
    }
}

static float *random_floats(int64_t count) {
    float *values = take_floats(count);
    for (int64_t i = 0; i < count; i++) values[i] = uniform(-1.0f, 1.0f);
    return values;
}

static void make_values(fuzz *f) {
    attention *a = &f->a;
    int64_t key = a->key_size, width = a->heads * key + a->kv_heads * (key + a->value_size);
    int64_t layout[] = {below(ATTENTION_TYPES), below(ATTENTION_TYPES), 0, 64 * below(3)};
    a->key_type = (int32_t)layout[0], a->value_type = (int32_t)layout[1];
    if (a->kv_heads == 1) a->weighed = 1, layout[0] += ATTENTION_WEIGHED;
    layout[2] = (layout[3] + a->kv_heads * attention_head_bytes(a) + 4095) / 4096 * 4096;
    f->bounds.pool = f->pages * layout[2] + below(64);
    a->pool = take((size_t)f->bounds.pool, 64, 0);
    memset(a->pool, 0, (size_t)f->bounds.pool);
    if (attention_sizes_fault(a) || attention_set_layout(a, layout, 4, 0, &f->bounds)) abort();
    a->qkv = random_floats(a->count * width), a->out = take_floats(a->count * a->heads * a->value_size);
    if (!a->rotary) return;
    a->cosines = random_floats(f->bounds.positions * a->rotary / 2);
    a->sines = random_floats(f->bounds.positions * a->rotary / 2);
}

/* ---- the rules, read slowly ---- */

/* Slots of a row's path, their number; -1 if there is no such path. */
static int64_t path_of(const fuzz *f, int64_t r, int64_t *slots) {
    const int32_t *row = f->a.rows + r * ATTENTION_ROW;
    int64_t length = 0, most = f->a.columns * ATTENTION_PAGE;
    if (row[0] < 0 || row[0] >= f->bounds.sequences || row[1] < 0 || row[1] > most || row[3] < 0) return -1;
    for (int64_t s = 0; s < row[1]; s++) slots[length++] = s;
    for (int64_t i = 0; i < row[3]; i++) {
        int64_t at = (int64_t)row[2] + i;
        if (at < 0 || at >= f->bounds.extras || f->a.extras[at] >= most || length > most) return -1;
        if (f->a.extras[at] < (length ? slots[length - 1] + 1 : 0)) return -1;
        slots[length++] = f->a.extras[at];
    }
    for (int64_t i = 0; i < length; i++)
        if (f->a.pages[row[0] * f->a.columns + slots[i] / ATTENTION_PAGE] < 0) return -1;
    return length ? length : -1;
}

static int is_right(const fuzz *f) {
    int64_t slots[MOST_COLUMNS * ATTENTION_PAGE + 1], written[MOST_ROWS], cells = f->bounds.sequences * f->a.columns;
    for (int64_t i = 0; i < cells; i++)
        if (f->a.pages[i] < -1 || f->a.pages[i] >= f->pages) return 0;
    for (int64_t r = 0; r < f->a.count; r++) {
        int64_t length = path_of(f, r, slots), position = f->a.positions[r], holders = 0;
        if (length < 0 || (f->a.cosines && (position < 0 || position >= f->bounds.positions))) return 0;
        int64_t own = slots[length - 1], row = f->a.rows[r * ATTENTION_ROW] * f->a.columns;
        int64_t page = f->a.pages[row + own / ATTENTION_PAGE];
        for (int64_t i = 0; i < cells; i++) holders += f->a.pages[i] == page;
        written[r] = page * ATTENTION_PAGE + own % ATTENTION_PAGE;
        for (int64_t i = 0; i < r; i++)
            if (written[i] == written[r]) return 0;
        if (holders != 1) return 0;
    }
    return 1;
}

/* ---- cases ---- */

static void compute(const fuzz *f, const attention_path *path) {
    const attention *a = &f->a;
    attention_plan plan = attention_plan_of(a, 1 + below(8));
    attention_start(a, &plan, take(plan.bytes, 64, 0));
    path->write(a, &plan, 0, a->count);
    for (int64_t job = plan.jobs - 1; job >= 0; job--) path->attend(a, &plan, job);
    for (int64_t job = plan.merges - 1; job >= 0; job--) path->merge(a, &plan, job);
}

static long test(const attention_path *path) {
    long failures = 0, right = 0;
    state = 88172645463325252u;
    for (int i = 0; i < CASES; i++, release(0)) {
        fuzz f;
        char message[ATTENTION_MESSAGE] = "";
        make_sizes(&f);
        make_tables(&f);
        make_values(&f);
        void *memory = take(attention_check_bytes(&f.a, &f.bounds), 16, 0);
        int wanted = is_right(&f), got = attention_check(&f.a, &f.bounds, memory, message);
        if (got != wanted && failures++ < 10) fprintf(stderr, "case %d: %s\n", i, got ? "let through" : message);
        if (got && wanted) compute(&f, path), right++;
    }
    /* Both verdicts must have been met. */
    return failures + (right < CASES / 10 || right > CASES / 2);
}

int main(void) {
    long failures = 0;
    const lowbit_isa *isa;
    for (size_t i = 0; (isa = lowbit_isa_at(i)) != NULL; i++) {
        if (!lowbit_usable(isa)) continue;
        long found = test(attention_path_of(isa));
        printf("%s: %d cases, %ld failures\n", isa->name, CASES, found);
        failures += found;
    }
    return failures != 0;
}
