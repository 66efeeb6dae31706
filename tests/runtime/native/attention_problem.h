/* Random passes of attention for its driver: shapes, pages, rows of chains and trees; knows nothing of kernels.
 *
 * History is written by the path under test as rows of their own pass, one chain per sequence.
 */
#ifndef EDGEINFER_TEST_ATTENTION_PROBLEM_H
#define EDGEINFER_TEST_ATTENTION_PROBLEM_H

#include "attention.h"
#include <math.h>
#include <string.h>

#include "random.h"

enum { MOST_ROWS = 40, SEQUENCES = 3, MOST_HISTORY = 700, TABLE = (MOST_HISTORY + MOST_ROWS) / ATTENTION_PAGE + 1 };

typedef struct {
    attention shape; /* what the two passes have in common */
    int64_t width;   /* of a row of qkv */
    int64_t pages;   /* in the pool */
    int64_t history[SEQUENCES];
    attention past, now; /* the pass that writes the history, and the one that is looked at */
    /* By row of `now`: the slots of its path. */
    int32_t *paths[MOST_ROWS];
    int64_t lengths[MOST_ROWS];
} attention_problem;

static float *random_floats(int64_t count, float size) {
    float *x = take_floats(count);
    for (int64_t i = 0; i < count; i++) x[i] = uniform(-size, size);
    return x;
}

static int32_t *take_ints(int64_t count) { return take((size_t)count * 4, 16, 4); }

static void draw_shape(attention *a, int key_type, int value_type) {
    static const int SIZES[] = {1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 64, 65, 80, 96, 128, 160};
    static const int GROUPS[] = {1, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 13, 16, 17};
    *a = (attention){.kv_heads = 1 + (int32_t)below(3), .key_type = key_type, .value_type = value_type};
    a->heads = a->kv_heads * PICK(GROUPS);
    a->key_size = PICK(SIZES);
    a->value_size = chance(50) ? a->key_size : PICK(SIZES);
    a->rotary = chance(70) ? (int32_t)(below(a->key_size / 2 + 1) * 2) : 0;
    a->interleaved = chance(30), a->norm_whole = chance(30), a->norm_epsilon = 1e-6f;
    a->window = chance(35) ? 1 + below(chance(50) ? 20 : 400) : 0;
    a->scale = chance(50) ? 1.0f / sqrtf((float)a->key_size) : uniform(0.05f, 1.0f);
    a->softcap = chance(30) ? uniform(1.0f, 30.0f) : 0.0f;
    int64_t whole = a->norm_whole;
    if (chance(25)) {
        a->latent = 1, a->heads /= a->kv_heads, a->kv_heads = 1;
        if (chance(60)) a->k_norm = random_floats(a->value_size, 2.0f);
    } else if (chance(40)) a->q_norm = random_floats((whole ? a->heads : 1) * a->key_size, 2.0f);
    if (!a->latent && chance(40)) a->k_norm = random_floats((whole ? a->kv_heads : 1) * a->key_size, 2.0f);
    a->weighed = !a->latent && chance(40);
    if (chance(30)) a->sinks = random_floats(a->heads, 4.0f);
    if (!a->rotary) return;
    int64_t cells = (MOST_HISTORY + MOST_ROWS) * (a->rotary / 2);
    float *cosines = take_floats(cells), *sines = take_floats(cells);
    for (int64_t i = 0; i < cells; i++) {
        float angle = uniform(-3.0f, 3.0f);
        cosines[i] = cosf(angle), sines[i] = sinf(angle);
    }
    a->cosines = cosines, a->sines = sines;
}

/* Pages at random places of a pool whose other bytes are what another conversation left there. */
static void draw_pages(attention_problem *p) {
    attention *a = &p->shape;
    a->offset = 64 * below(3);
    a->page_bytes = (a->offset + a->kv_heads * attention_head_bytes(a) + 4095) / 4096 * 4096;
    a->columns = TABLE;
    p->pages = SEQUENCES * TABLE + 2;
    int32_t *table = take_ints(p->pages);
    for (int64_t i = 0; i < p->pages; i++) table[i] = (int32_t)i;
    for (int64_t i = p->pages - 1; i > 0; i--) {
        int64_t j = below(i + 1);
        int32_t held = table[i];
        table[i] = table[j], table[j] = held;
    }
    a->pages = table;
}

/* The path of a new row of a sequence: its parent's, or the history, and itself; sometimes with gaps. */
static void draw_path(attention_problem *p, int64_t row, int64_t parent, int64_t sequence, int32_t slot) {
    int32_t *path = take_ints(MOST_HISTORY + MOST_ROWS);
    int64_t length = 0;
    if (parent >= 0)
        memcpy(path, p->paths[parent], (size_t)(length = p->lengths[parent]) * 4);
    else
        for (int32_t i = 0, gaps = chance(10); i < p->history[sequence]; i++)
            if (!gaps || chance(90)) path[length++] = i;
    path[length++] = slot;
    p->paths[row] = path, p->lengths[row] = length;
}

/* Writes a row's path as a prefix, of any length that it allows, and extras. */
static void describe(const attention_problem *p, int64_t row, int64_t sequence, int32_t *out, int32_t *extras, int32_t *used) {
    int64_t same = 0, length = p->lengths[row];
    while (same < length && p->paths[row][same] == same) same++;
    int64_t prefix = chance(70) ? same : below(same + 1);
    out[0] = (int32_t)sequence, out[1] = (int32_t)prefix, out[2] = *used, out[3] = (int32_t)(length - prefix);
    for (int64_t i = prefix; i < length; i++) extras[(*used)++] = p->paths[row][i];
}

static int64_t *draw_positions(int64_t count) {
    int64_t *positions = take((size_t)count * 8, 16, 8);
    for (int64_t i = 0; i < count; i++) positions[i] = below(MOST_HISTORY + MOST_ROWS);
    return positions;
}

static void draw_history(attention_problem *p, int64_t most) {
    int64_t total = 0;
    for (int64_t s = 0; s < SEQUENCES; s++) total += p->history[s] = s == 0 ? below(most + 1) : below(most / 3 + 1);
    p->past = p->shape;
    p->past.count = total;
    p->past.qkv = random_floats(total * p->width + 1, chance(10) ? 30.0f : 2.0f);
    p->past.positions = draw_positions(total + 1);
    int32_t *rows = take_ints(total * 4 + 1);
    for (int64_t s = 0, row = 0; s < SEQUENCES; s++)
        for (int64_t i = 0; i < p->history[s]; i++, row++) {
            int32_t values[4] = {(int32_t)s, (int32_t)(i + 1), 0, 0};
            memcpy(rows + row * 4, values, sizeof values);
        }
    p->past.rows = rows, p->past.extras = take_ints(1);
}

static void draw_rows(attention_problem *p, int64_t count) {
    int32_t *rows = take_ints(count * 4), *extras = take_ints(count * (MOST_HISTORY + MOST_ROWS)), used = 0;
    int64_t next_slot[SEQUENCES], newest[SEQUENCES], tree = chance(60), sequence = 0;
    for (int64_t s = 0; s < SEQUENCES; s++) next_slot[s] = p->history[s], newest[s] = -1;
    for (int64_t row = 0; row < count; row++) {
        if (chance(20)) sequence = below(SEQUENCES);
        int64_t parent = newest[sequence];
        if (tree && parent >= 0 && chance(50)) parent = below(row);
        if (parent >= 0 && rows[parent * 4] != sequence) parent = newest[sequence];
        if (tree && chance(10)) parent = -1;
        draw_path(p, row, parent, sequence, (int32_t)next_slot[sequence]++);
        describe(p, row, sequence, rows + row * 4, extras, &used);
        newest[sequence] = row;
    }
    p->now = p->shape;
    p->now.count = count, p->now.rows = rows, p->now.extras = extras;
    p->now.qkv = random_floats(count * p->width, 2.0f);
    p->now.positions = draw_positions(count);
}

static void draw_problem(attention_problem *p, int key_type, int value_type) {
    attention *a = &p->shape;
    draw_shape(a, key_type, value_type);
    p->width = attention_row_width(a);
    draw_pages(p);
    draw_history(p, chance(20) ? MOST_HISTORY : chance(50) ? 100 : 20);
    draw_rows(p, chance(20) ? 1 : chance(20) ? 1 + below(MOST_ROWS) : 1 + below(6));
}

#endif
