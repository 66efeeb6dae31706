/* Tests of attention on every instruction set that runs here, against each other and against plain double arithmetic:
 * knows the contract in attention.h and nothing of how a kernel works.
 *
 * Prints a line per instruction set: name, cases, failures. Exits with 1 if anything failed.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include <stdio.h>

#include "attention_problem.h"

enum { MAX_MESSAGES = 12 };

typedef struct {
    const lowbit_isa *isa;
    const attention_path *path;
    long cases, failures;
} report;

static void fail(report *r, const attention *a, const char *what, int64_t row, int64_t column, double got, double want) {
    if (r->failures++ >= MAX_MESSAGES) return;
    fprintf(stderr,
            "%s: %s: row %lld column %lld: %.9g, expected %.9g (heads %d/%d sizes %d %d types %d %d rotary %d window "
            "%lld softcap %g sinks %d rows %lld)\n",
            r->isa->name, what, (long long)row, (long long)column, got, want, a->heads, a->kv_heads, a->key_size,
            a->value_size, a->key_type, a->value_type, a->rotary, (long long)a->window, a->softcap, a->sinks != NULL,
            (long long)a->count);
}

static int same(float a, float b) { return memcmp(&a, &b, 4) == 0 || (isnan(a) && isnan(b)); }

/* ---- running ---- */

static void shuffle(int64_t *order, int64_t count) {
    for (int64_t i = 0; i < count; i++) order[i] = i;
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = below(i + 1), held = order[i];
        order[i] = order[j], order[j] = held;
    }
}

/* A pass in at most `wanted` jobs, done in any order; without `results` it only writes. */
static void run(const attention_path *path, attention *a, int64_t wanted, int results) {
    int keep = buffer_count;
    int64_t order[64];
    attention_plan plan = attention_plan_of(a, wanted);
    void *memory = take(plan.bytes, 64, 0);
    memset(memory, 0x5a, plan.bytes);
    attention_start(a, &plan, memory);
    int64_t cut = below(a->count + 1);
    path->write(a, &plan, cut, a->count);
    path->write(a, &plan, 0, cut);
    shuffle(order, plan.jobs);
    for (int64_t i = 0; i < plan.jobs && results; i++) path->attend(a, &plan, order[i]);
    shuffle(order, plan.merges);
    for (int64_t i = 0; i < plan.merges && results; i++) path->merge(a, &plan, order[i]);
    release(keep);
}

/* A pool like one that was in use before: not zeros, but zero where a page has padding. */
static uint8_t *new_pool(const attention_problem *p) {
    size_t bytes = (size_t)(p->pages * p->shape.page_bytes);
    uint8_t *pool = take(bytes, 64, 0);
    memset(pool, 0, bytes);
    return pool;
}

/* The weight of a position of a head, at its place in the pool. */
static uint8_t *weight_at(const attention *a, uint8_t *pool, int64_t page, int64_t kv, int64_t s) {
    const int64_t head = attention_key_bytes(a->key_type, a->key_size) + attention_value_bytes(a->value_type, a->value_size);
    return pool + page * a->page_bytes + a->offset + kv * attention_head_bytes(a) + head + s * 4;
}

/* Weighs every position of a pool; rows that are written later have none. */
static void weigh(const attention_problem *p, uint8_t *pool) {
    const attention *a = &p->shape;
    for (int64_t page = 0; page < p->pages && a->weighed; page++)
        for (int64_t kv = 0; kv < a->kv_heads; kv++)
            for (int64_t s = 0; s < ATTENTION_PAGE; s++) {
                const float weight = (float)((page * 31 + kv * 17 + s * 7) % 29) * 0.13f;
                memcpy(weight_at(a, pool, page, kv, s), &weight, sizeof weight);
            }
}

/* The whole pass: (count, heads v), with its pool. */
static float *result_of(const attention_path *path, const attention_problem *p, uint8_t *pool, int64_t wanted) {
    attention past = p->past, now = p->now;
    past.pool = now.pool = pool;
    now.out = take_floats(now.count * now.heads * now.value_size);
    if (past.count) run(path, &past, 1, 0);
    weigh(p, pool);
    run(path, &now, wanted, 1);
    return now.out;
}

/* Some rows of the pass, in any order, after the whole of it: (count, heads v). */
static float *some_rows(const attention_path *path, const attention_problem *p, uint8_t *pool, const int64_t *index,
                        int64_t count, int64_t wanted) {
    attention a = p->now;
    int32_t *rows = take_ints(count * 4), *extras = take_ints(count * (MOST_HISTORY + MOST_ROWS)), used = 0;
    float *qkv = take_floats(count * p->width);
    int64_t *positions = take((size_t)count * 8, 16, 8);
    for (int64_t i = 0; i < count; i++) {
        describe(p, index[i], p->now.rows[index[i] * 4], rows + i * 4, extras, &used);
        memcpy(qkv + i * p->width, p->now.qkv + index[i] * p->width, (size_t)p->width * 4);
        positions[i] = p->now.positions[index[i]];
    }
    a.pool = pool, a.rows = rows, a.extras = extras, a.qkv = qkv, a.positions = positions, a.count = count;
    a.out = take_floats(count * a.heads * a.value_size);
    run(path, &a, wanted, 1);
    return a.out;
}

/* ---- the oracle ---- */

static double half_value(const uint8_t *at) {
    int bits = at[0] | at[1] << 8, exponent = bits >> 10 & 31, rest = bits & 1023;
    double size = exponent ? ldexp(1024 + rest, exponent - 25) : ldexp(rest, -24);
    return bits & 0x8000 ? -size : size;
}

static double float_value(const uint8_t *at) {
    float x;
    memcpy(&x, at, 4);
    return x;
}

/* What 4 bits stand for under their group's word, and the greatest error of a number: a range is moved inwards by up to
 * 4% of 15 levels, and the scale is rounded to 5 bits. */
static double word_value(const uint8_t *at, int q, double *step) {
    int word = at[0] | at[1] << 8;
    const uint8_t half[2] = {(uint8_t)(word >> 1 & 0xe0), (uint8_t)(word >> 9 & 0x7f)};
    double scale = half_value(half);
    *step = 3.5 * scale + 1e-6;
    return (4 * q - (word & 63)) * scale / 4;
}

/* Channel c of a key at place s of a head's page, and the greatest error of its storing: the letter of attention.h. */
static double key_value(const attention *a, const uint8_t *keys, int64_t s, int64_t c, double *step) {
    int64_t t = s / 16, lane = s % 16, h = a->key_size, G = (h + 3) / 4, E = (h + 7) / 8;
    *step = 0.0;
    if (a->key_type == ATTENTION_FLOAT32) return float_value(keys + ((t * h + c) * 16 + lane) * 4);
    if (a->key_type == ATTENTION_FLOAT16) {
        double x = half_value(keys + ((t * h + c) * 16 + lane) * 2);
        return *step = fabs(x) / 1024 + 1e-7, x;
    }
    if (a->key_type == ATTENTION_INT8) {
        double scale = float_value(keys + 64 * G * 4 + s * 4);
        return *step = scale, scale * (int8_t)keys[((t * G + c / 4) * 16 + lane) * 4 + c % 4];
    }
    const uint8_t *word = keys + 64 * E * 4 + (s * ((h + 15) / 16) + c / 16) * 2;
    int byte = keys[((t * E + c / 8) * 16 + lane) * 4 + c % 4];
    return word_value(word, c % 8 < 4 ? byte & 15 : byte >> 4, step);
}

static double value_value(const attention *a, const uint8_t *values, int64_t s, int64_t c, double *step) {
    int64_t v = a->value_size, p = (v + 15) / 16 * 16;
    *step = 0.0;
    if (a->value_type == ATTENTION_FLOAT32) return float_value(values + (s * p + c) * 4);
    if (a->value_type == ATTENTION_FLOAT16) {
        double x = half_value(values + (s * p + c) * 2);
        return *step = fabs(x) / 1024 + 1e-7, x;
    }
    if (a->value_type == ATTENTION_INT8) {
        double scale = float_value(values + 64 * p + s * 4);
        return *step = scale, scale * (int8_t)values[(s / 4 * p + c) * 4 + "\0\2\1\3"[s % 4]];
    }
    int64_t run = c / 32 * 32, half = p - run < 32 ? 8 : 16, at = c - run;
    int byte = values[s * p / 2 + run / 2 + at % half];
    return word_value(values + 64 * p / 2 + (s * (p / 16) + c / 16) * 2, at < half ? byte & 15 : byte >> 4, step);
}

static void turn(double *x, int64_t n) {
    int64_t block = 1;
    while (n % (2 * block) == 0 && block < 128) block *= 2;
    double out[256];
    for (int64_t i = 0; i < n; i++) {
        out[i] = 0.0;
        for (int64_t j = 0; j < block; j++) {
            int64_t common = i % block & j, odd = 0;
            for (; common; common &= common - 1) odd ^= 1;
            out[i] += (odd ? -1 : 1) * x[i / block * block + j] / sqrt((double)block);
        }
    }
    memcpy(x, out, (size_t)n * sizeof *x);
}

static int turned(int type) { return type == ATTENTION_INT8 || type == ATTENTION_INT4; }

/* A query's or key's head as it should be before it is stored. */
static void exact_head(const attention *a, int64_t row, const float *all, int64_t heads, int64_t head,
                       const float *norm, double *x) {
    int64_t h = a->key_size, half = a->rotary / 2, from = a->norm_whole ? 0 : head * h;
    int64_t count = a->norm_whole ? heads * h : h;
    double squares = 0.0;
    for (int64_t i = 0; i < count; i++) squares += (double)all[from + i] * all[from + i];
    double factor = 1.0 / sqrt(squares / (double)count + a->norm_epsilon);
    for (int64_t i = 0; i < h; i++)
        x[i] = norm ? all[head * h + i] * factor * norm[a->norm_whole ? head * h + i : i] : all[head * h + i];
    for (int64_t i = 0; i < half; i++) {
        int64_t l = a->interleaved ? 2 * i : i, r = a->interleaved ? l + 1 : l + half;
        double c = a->cosines[a->positions[row] * half + i], s = a->sines[a->positions[row] * half + i];
        double left = x[l], right = x[r];
        x[l] = left * c - right * s, x[r] = right * c + left * s;
    }
    if (turned(a->key_type)) turn(x, h);
}

/* A value as it should be before it is stored. */
static void exact_value(const attention *a, const float *value, double *x) {
    double squares = 0.0;
    for (int64_t c = 0; c < a->value_size; c++) squares += (double)value[c] * value[c];
    double factor = 1.0 / sqrt(squares / (double)a->value_size + a->norm_epsilon);
    for (int64_t c = 0; c < a->value_size; c++)
        x[c] = a->latent && a->k_norm ? value[c] * factor * a->k_norm[c] : value[c];
    if (turned(a->value_type)) turn(x, a->value_size);
}

/* The part of a query that meets values. */
static void exact_latent_query(const attention *a, const float *row, int64_t head, double *x) {
    for (int64_t c = 0; c < a->value_size; c++) x[c] = row[head * a->value_size + c];
    if (turned(a->value_type)) turn(x, a->value_size);
}

static const uint8_t *page_of(const attention_problem *p, const uint8_t *pool, int64_t sequence, int64_t slot, int64_t kv) {
    const attention *a = &p->shape;
    int64_t page = a->pages[sequence * a->columns + slot / 64];
    return pool + page * a->page_bytes + a->offset + kv * attention_head_bytes(a);
}

/* The row's key and value stand in the pool, as near as their type allows. */
static void check_written(const attention_problem *p, const uint8_t *pool, int64_t row, report *r) {
    const attention *a = &p->now;
    int64_t slot = p->paths[row][p->lengths[row] - 1], s = slot % 64, h = a->key_size, v = a->value_size;
    const float *keys = a->qkv + row * p->width + a->heads * attention_query_size(a), *values = keys + a->kv_heads * h;
    if (a->latent) values = keys, keys = values + v;
    double x[256], step;
    for (int64_t kv = 0; kv < a->kv_heads; kv++) {
        const uint8_t *at = page_of(p, pool, a->rows[row * 4], slot, kv);
        exact_head(a, row, keys, a->kv_heads, kv, a->latent ? NULL : a->k_norm, x);
        for (int64_t c = 0; c < h; c++) {
            double got = key_value(a, at, s, c, &step);
            if (!(fabs(got - x[c]) <= step * 0.501 + 2e-6)) fail(r, a, "key", row, c, got, x[c]);
        }
        exact_value(a, values + kv * v, x);
        for (int64_t c = 0; c < v; c++) {
            double got = value_value(a, at + attention_key_bytes(a->key_type, a->key_size), s, c, &step);
            if (!(fabs(got - x[c]) <= step * 0.501 + 2e-6)) fail(r, a, "value", row, c, got, x[c]);
        }
        double weight = a->weighed ? float_value(at + attention_head_bytes(a) - 4 * ATTENTION_PAGE + s * 4) : 0.0;
        if (weight != 0.0) fail(r, a, "weight", row, 0, weight, 0.0);
    }
}

/* A query as int8 keys meet it; returns how far a score may be off where a channel lies between two integers. */
static double quantize_query(const attention *a, double *q) {
    double most = 0.0, close = 0.0;
    for (int64_t c = 0; c < a->key_size; c++) most = fmax(most, fabs(q[c]));
    for (int64_t c = 0; c < a->key_size && most > 1e-35; c++) {
        double level = q[c] * 127 / most, whole = nearbyint(level);
        if (fabs(fabs(level - whole) - 0.5) < 1e-3) close += most / 127;
        q[c] = whole * most / 127;
    }
    return close;
}

/* What a row and head should give over the pool's keys and values; returns how near: a score rounds by its own size,
 * and a result moves by that much of the greatest value. Weights of int8 values have 15 bits. */
static double exact_result(const attention_problem *p, const uint8_t *pool, int64_t row, int64_t head, double *out) {
    const attention *a = &p->now;
    int64_t length = p->lengths[row], kv = head / (a->heads / a->kv_heads);
    const float *queries = a->qkv + row * p->width;
    double q[256], latent[256], scores[MOST_HISTORY + MOST_ROWS], most = a->sinks ? a->sinks[head] : -INFINITY, sum = 0.0, step, size = 1.0, greatest = 1.0;
    if (a->latent) exact_latent_query(a, queries, head, latent);
    exact_head(a, row, queries + (a->latent ? a->heads * a->value_size : 0), a->heads, head, a->q_norm, q);
    double close = a->key_type == ATTENTION_INT8 && !a->latent ? quantize_query(a, q) : 0.0, largest = 0.0;
    int64_t begin = a->window && a->window < length ? length - a->window : 0;
    for (int64_t i = begin; i < length; i++) {
        int64_t slot = p->paths[row][i];
        const uint8_t *at = page_of(p, pool, a->rows[row * 4], slot, kv);
        scores[i] = 0.0;
        for (int64_t c = 0; c < a->key_size; c++) {
            double key = key_value(a, at, slot % 64, c, &step);
            scores[i] += q[c] * key;
            largest = fmax(largest, fabs(key));
        }
        const uint8_t *value = at + attention_key_bytes(a->key_type, a->key_size);
        for (int64_t c = 0; c < a->value_size && a->latent; c++) scores[i] += latent[c] * value_value(a, value, slot % 64, c, &step);
        scores[i] *= a->scale;
        if (a->softcap > 0) scores[i] = a->softcap * tanh(scores[i] / a->softcap);
        if (a->weighed) scores[i] += float_value(at + attention_head_bytes(a) - 4 * ATTENTION_PAGE + slot % 64 * 4);
        most = fmax(most, scores[i]);
        size = fmax(size, fabs(scores[i]));
    }
    for (int64_t c = 0; c < a->value_size; c++) out[c] = 0.0;
    if (a->sinks) sum = exp(a->sinks[head] - most);
    for (int64_t i = begin; i < length; i++) {
        int64_t slot = p->paths[row][i];
        const uint8_t *at = page_of(p, pool, a->rows[row * 4], slot, kv) + attention_key_bytes(a->key_type, a->key_size);
        double weight = exp(scores[i] - most);
        sum += weight;
        for (int64_t c = 0; c < a->value_size; c++) {
            double value = value_value(a, at, slot % 64, c, &step);
            out[c] += weight * value;
            greatest = fmax(greatest, fabs(value));
        }
    }
    for (int64_t c = 0; c < a->value_size; c++) out[c] /= sum;
    if (turned(a->value_type)) turn(out, a->value_size);
    double weights = a->value_type == ATTENTION_INT8 && !a->latent ? (double)(length - begin) * 0.5 / 32767 / sum : 0.0;
    return greatest * (size * 2e-6 + 2 * close * largest * a->scale + weights);
}

static void check_results(const attention_problem *p, const uint8_t *pool, const float *got, report *r) {
    const attention *a = &p->now;
    double want[256];
    for (int64_t row = 0; row < a->count; row++) {
        check_written(p, pool, row, r);
        for (int64_t head = 0; head < a->heads; head++) {
            double slack = exact_result(p, pool, row, head, want);
            for (int64_t c = 0; c < a->value_size; c++) {
                float x = got[(row * a->heads + head) * a->value_size + c];
                if (!(fabs(x - want[c]) <= slack)) fail(r, a, "result", row, head * a->value_size + c, x, want[c]);
            }
        }
    }
}

/* ---- cases ---- */

static report reports[8];
static int report_count;

static void check_rows(const attention_problem *p, const float *got, const int64_t *index, int64_t count,
                       const float *want, const char *what, report *r) {
    int64_t width = p->now.heads * p->now.value_size;
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < width; c++) {
            float x = got[i * width + c], y = want[(index ? index[i] : i) * width + c];
            if (!same(x, y)) fail(r, &p->now, what, index ? index[i] : i, c, x, y);
        }
}

/* One path gives the portable one's pool and results, whatever the jobs, the order and the company of rows. */
static void test_path(const attention_problem *p, const uint8_t *base_pool, const float *base, report *r) {
    int64_t count = p->now.count, index[MOST_ROWS], one = below(count), some = 1 + below(count);
    r->cases++;
    uint8_t *pool = new_pool(p);
    const float *whole = result_of(r->path, p, pool, 1 + below(32));
    check_rows(p, whole, NULL, count, base, "other bits than the portable path", r);
    if (memcmp(pool, base_pool, (size_t)(p->pages * p->shape.page_bytes))) fail(r, &p->now, "another pool", 0, 0, 0, 0);
    check_rows(p, some_rows(r->path, p, pool, &one, 1, 1 + below(32)), &one, 1, base, "other bits for a row alone", r);
    shuffle(index, count);
    check_rows(p, some_rows(r->path, p, pool, index, some, 1 + below(32)), index, some, base, "other bits in company", r);
}

/* Values that are not finite make results that are not numbers, of the rows that see them and of no others. */
static void spoil(attention_problem *p) {
    int64_t row = below(p->now.count), at = below(p->width);
    ((float *)(uintptr_t)p->now.qkv)[row * p->width + at] = chance(50) ? NAN : INFINITY;
}

static void test(int key_type, int value_type) {
    attention_problem p = {0};
    draw_problem(&p, key_type, value_type);
    report *portable = &reports[report_count - 1];
    int spoiled = chance(10);
    if (spoiled) spoil(&p);
    uint8_t *pool = new_pool(&p);
    const float *base = result_of(portable->path, &p, pool, 1);
    if (!spoiled) check_results(&p, pool, base, portable);
    for (int i = 0, keep = buffer_count; i < report_count; i++, release(keep)) test_path(&p, pool, base, &reports[i]);
    release(0);
}

int main(int count, char **arguments) {
    const int cases = count > 1 ? atoi(arguments[1]) : 1600;
    const lowbit_isa *isa;
    for (size_t i = 0; (isa = lowbit_isa_at(i)) != NULL; i++) {
        if (!lowbit_usable(isa)) continue;
        reports[report_count].isa = isa;
        reports[report_count++].path = attention_path_of(isa);
    }
    for (int i = 0; i < cases; i++) test(i % ATTENTION_TYPES, chance(70) ? i % ATTENTION_TYPES : (int)below(ATTENTION_TYPES));
    long failures = 0;
    for (int i = 0; i < report_count; i++) {
        printf("%s: %ld cases, %ld failures\n", reports[i].isa->name, reports[i].cases, reports[i].failures);
        failures += reports[i].failures;
    }
    return failures != 0;
}
