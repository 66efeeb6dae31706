/* Tests of the low-bit kernels of every instruction set that runs here, against each other and against plain double
 * arithmetic: knows the contract in lowbit.h and nothing of how a kernel works.
 *
 * Prints a line per instruction set: name, cases, failures. Exits with 1 if anything failed.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include <float.h>
#include <stdio.h>

#include "problem.h"

enum { MARGIN = 24, MAX_MESSAGES = 12, MAX_RANGES = 512 };

static const uint32_t CANARY = 0x7fc0beef;

/* Some rows of a problem, in some order, in one product. */
typedef struct {
    const lowbit_isa *isa;
    const problem *p;
    const int64_t *index; /* (m) */
    int64_t m;
    int cut;  /* into ranges of rows and tiles, in any order, residual in place */
    float *y; /* (m, width): the result */
    lowbit_rows rows;
} trial;

typedef struct {
    const lowbit_isa *isa;
    long cases, failures;
} report;

/* ---- running and comparing ---- */

static void fail(report *r, const problem *p, const char *what, int64_t row, int64_t column, double got, double want) {
    const shape *s = &p->s;
    if (r->failures++ >= MAX_MESSAGES) return;
    fprintf(stderr,
            "%s: %s: row %lld column %lld: %.9g, expected %.9g (%s bits %d%s%s%s%s block %d zeros %d paired %d swiglu %d "
            "bias %d residual %d norm %d, N %lld K %lld M %lld, values %d)\n",
            r->isa->name, what, (long long)row, (long long)column, got, want,
            s->kind ? kinds[s->kind].name : "", s->bits, s->float16 ? " float16" : "", s->high_only ? " high" : "", s->vectors ? " vectors" : "",
            s->inline_scales ? " inline scales" : "", s->block, s->zeros, s->paired, s->swiglu, s->bias, s->residual, s->norm, (long long)s->n, (long long)s->k,
            (long long)s->m, p->kinds[row]);
}

/* The same bits, or two NaNs: which NaN is left open. */
static int same(float a, float b) { return memcmp(&a, &b, 4) == 0 || (isnan(a) && isnan(b)); }

/* Splits 0..count into ranges in random order; returns how many. */
static int make_ranges(int64_t count, int cut, int64_t (*ranges)[2]) {
    int used = 0;
    for (int64_t first = 0, last; first < count; first = last) {
        last = cut && used < MAX_RANGES - 2 ? first + below(count - first + 1) : count;
        ranges[used][0] = first;
        ranges[used++][1] = last;
    }
    for (int i = used - 1; i > 0 && cut; i--) {
        int j = (int)below(i + 1);
        for (int e = 0; e < 2; e++) {
            int64_t held = ranges[i][e];
            ranges[i][e] = ranges[j][e];
            ranges[j][e] = held;
        }
    }
    return used;
}

static void quantize(trial *t) {
    const problem *p = t->p;
    int64_t ranges[MAX_RANGES][2], k = p->s.k, padded = p->blocks * p->s.block;
    float *x = take_floats(t->m * k);
    for (int64_t i = 0; i < t->m; i++) memcpy(x + i * k, p->x + t->index[i] * k, (size_t)k * 4);
    size_t bytes = (size_t)(t->m * padded);
    t->rows = (lowbit_rows){t->m, k, p->s.block, take(bytes, 64, 0), take_floats(t->m * p->blocks),
                            take((size_t)(t->m * p->blocks) * 4, 16, 4), NULL};
    if (p->s.block == 32) t->rows.halves = take((size_t)(t->m * p->blocks) * 4, 16, 4);
    memset(t->rows.values, 0x55, bytes);
    lowbit_input in = {x, p->s.norm ? p->weight : NULL, 1e-6f};
    int count = make_ranges(t->m, t->cut, ranges);
    for (int i = 0; i < count; i++) t->isa->quantize(&in, &t->rows, ranges[i][0], ranges[i][1]);
}

/* Fails if a cell outside the tiles done, or outside y, is not as it was. */
static void check_untouched(const trial *t, const float *base, const float *before, const char *done, report *r) {
    const problem *p = t->p;
    int64_t cells = t->m * p->width, half = p->s.n / 2;
    for (int64_t i = -MARGIN; i < cells + MARGIN; i++) {
        int64_t column = ((i % p->width) + p->width) % p->width;
        int64_t tile = p->s.paired ? column % half / 16 : column / 32;
        if (i >= 0 && i < cells && done[tile]) continue;
        if (memcmp(base + MARGIN + i, before + MARGIN + i, 4))
            fail(r, p, "written outside its tiles", 0, i, base[MARGIN + i], before[MARGIN + i]);
    }
}

static void multiply(trial *t, report *r) {
    const problem *p = t->p;
    int64_t cells = t->m * p->width, all = cells + 2 * MARGIN, ranges[MAX_RANGES][2];
    float *base = take_floats(all), *before = take_floats(all), *residual = take_floats(cells);
    t->y = base + MARGIN;
    for (int64_t i = 0; i < all; i++) memcpy(base + i, &CANARY, 4);
    for (int64_t i = 0; i < t->m; i++)
        memcpy(residual + i * p->width, p->residual + t->index[i] * p->width, (size_t)p->width * 4);
    if (t->cut && p->s.residual) memcpy(t->y, residual, (size_t)cells * 4);
    memcpy(before, base, (size_t)all * 4);
    const float *added = !p->s.residual ? NULL : t->cut ? t->y : residual;
    lowbit_output out = {.y = t->y, .bias = p->s.bias ? p->bias : NULL, .residual = added, .swiglu = p->s.swiglu};
    char *done = take((size_t)p->tiles, 16, 0);
    memset(done, 0, (size_t)p->tiles);
    int count = make_ranges(p->tiles, t->cut, ranges);
    for (int i = 0; i < count; i++) {
        t->isa->multiply(&p->w, &t->rows, &out, ranges[i][0], ranges[i][1]);
        for (int64_t tile = ranges[i][0]; tile < ranges[i][1]; tile++) done[tile] = 1;
        check_untouched(t, base, before, done, r);
    }
}

static trial run(const lowbit_isa *isa, const problem *p, const int64_t *index, int64_t m, int cut, report *r) {
    trial t = {.isa = isa, .p = p, .index = index, .m = m, .cut = cut};
    quantize(&t);
    multiply(&t, r);
    return t;
}

/* Every row of `t` has the bits of the same row of `whole`, where each row stands at its own place. */
static void check_rows(const trial *t, const trial *whole, const char *what, report *r) {
    int64_t width = t->p->width;
    for (int64_t i = 0; i < t->m; i++)
        for (int64_t c = 0; c < width; c++) {
            float got = t->y[i * width + c], want = whole->y[t->index[i] * width + c];
            if (!same(got, want)) fail(r, t->p, what, t->index[i], c, got, want);
        }
}

/* ---- the oracle ---- */

/* A row as it should be before quantization: (k). */
static void exact_row(const problem *p, int64_t row, double *x) {
    double squares = 0.0;
    for (int64_t k = 0; k < p->s.k; k++) {
        x[k] = p->x[row * p->s.k + k];
        squares += x[k] * x[k];
    }
    double factor = 1.0 / sqrt(squares / (double)p->s.k + 1e-6);
    for (int64_t k = 0; k < p->s.k && p->s.norm; k++) x[k] *= factor * p->weight[k];
}

/* The int8 values of a row stand for x, and their sums and scales are right. */
static void check_quantized(const trial *t, int64_t row, const double *x, report *r) {
    const problem *p = t->p;
    int64_t B = p->s.block;
    for (int64_t b = 0; b < p->blocks; b++) {
        const int8_t *q = t->rows.values + (b * t->m + row) * B;
        double scale = t->rows.scales[b * t->m + row], greatest = 0.0;
        int32_t sum = 0, half = 0;
        for (int64_t j = 0; j < B; j++) {
            double value = b * B + j < p->s.k ? x[b * B + j] : 0.0, error = fabs(value - q[j] * scale);
            greatest = fmax(greatest, fabs(value));
            sum += q[j];
            half += j < 16 ? q[j] : 0;
            /* The sums of groups of 16 are exact because of this. */
            if (q[j] == -128) fail(r, p, "-128", row, b * B + j, q[j], -127);
            if (!(error <= scale * 0.50001 + fabs(value) * 3e-6 + 1.1e-35))
                fail(r, p, "int8", row, b * B + j, q[j], value / scale);
            if (p->kinds[row] == TIES && !p->s.norm && q[j] != (int)nearbyint(value))
                fail(r, p, "tie", row, b * B + j, q[j], value);
            if (b * B + j >= p->s.k && q[j]) fail(r, p, "padding", row, b * B + j, q[j], 0);
        }
        /* The normalisation is in float, and a block below 1e-35 counts as zero. */
        if (!(fabs(scale - greatest / 127) <= greatest * 3e-6 + 1e-36))
            fail(r, p, "scale", row, b, scale, greatest / 127);
        if (t->rows.halves && t->rows.halves[b * t->m + row] != half)
            fail(r, p, "sum of a half", row, b, t->rows.halves[b * t->m + row], half);
        if (t->rows.sums[b * t->m + row] != sum) fail(r, p, "sum", row, b, t->rows.sums[b * t->m + row], sum);
    }
}

/* A value that a kernel's result must be near, and how near. */
typedef struct {
    double value, slack;
} estimate;

/* One row of W times one of activations: over the int8 values, tightly, or over the exact ones, loosely. */
static estimate product(const trial *t, int64_t row, int64_t n, const double *x, int exact) {
    const problem *p = t->p;
    int64_t B = p->s.block;
    estimate e = {0.0, (double)p->blocks * 1e-37};
    for (int64_t b = 0; b < p->blocks; b++) {
        const int8_t *q = t->rows.values + (b * t->m + row) * B;
        const double *w = p->dense + n * p->s.k + b * B, scale = t->rows.scales[b * t->m + row];
        double sum = 0.0, weights = 0.0, greatest = 0.0;
        for (int64_t j = 0; j < B && b * B + j < p->s.k; j++) {
            sum += w[j] * (exact ? x[b * B + j] : q[j] * scale);
            weights += fabs(w[j]);
            greatest = fmax(greatest, fabs(x[b * B + j]));
            /* What is taken off again was first part of the sum. */
            if (p->minima) e.slack += 4e-7 * fabs(p->minima[(n * p->s.k + b * B + j) / 16] * q[j] * scale);
        }
        e.value += sum;
        /* Additions of blocks round; quantizing errs by half a step, and by the rounding of the normalisation. */
        e.slack += 1.3e-7 * (fabs(sum) + fabs(e.value));
        if (exact) e.slack += weights * (greatest * (0.50001 / 127 + 4e-6) + 1e-35);
    }
    if (p->s.bias) e.value += p->bias[n];
    return e;
}

static estimate expected(const trial *t, int64_t row, int64_t column, const double *x, int exact) {
    const problem *p = t->p;
    estimate e = product(t, row, column, x, exact);
    if (p->s.swiglu && !p->s.paired) {
        /* As below, with nothing to be multiplied by. */
        e.slack = 1.1 * e.slack + fabs(e.value) * 1e-38;
        e.value = e.value / (1.0 + exp(-e.value));
        e.slack += fabs(e.value) * 1e-6;
    } else if (p->s.swiglu) {
        estimate up = product(t, row, p->width + column, x, exact);
        double steep = p->s.swiglu == 2 ? 1.702 : 1.0, most = p->s.swiglu == 2 ? 7.0 : INFINITY;
        if (p->s.swiglu == 4) steep = 1.5957691216057308 * (1.0 + 0.044715 * e.value * e.value);
        double value = fmin(e.value, most), gate = value / (1.0 + exp(-value * steep));
        double factor = fmax(fmin(up.value, most), -most) + (p->s.swiglu == 2 ? 1.0 : 0.0);
        /* The slopes of silu and gelu are below 1.2. */
        e.slack = 1.2 * e.slack * (fabs(factor) + up.slack) + fabs(gate) * up.slack;
        /* Where exp(-gate) leaves the range of float the kernel divides by the greatest instead. */
        e.slack += fabs(e.value) * 1e-38 * fabs(factor);
        e.value = gate * factor;
        e.slack += fabs(e.value) * 1e-6;
    }
    if (p->s.residual) e.value += p->residual[row * p->width + column];
    e.slack += fabs(e.value) * 2.4e-7 + (p->s.bias || p->s.residual ? 1e-6 : 1e-37);
    return e;
}

static void check_row(const trial *t, int64_t row, double *x, report *r) {
    const problem *p = t->p;
    const float *y = t->y + row * p->width;
    int finite = p->kinds[row] < ONE_NAN;
    exact_row(p, row, x);
    if (finite) check_quantized(t, row, x, r);
    for (int64_t c = 0; c < p->width; c++) {
        if (!finite && !isnan(y[c])) fail(r, p, "not NaN", row, c, y[c], NAN);
        for (int exact = 0; exact < 2 && finite; exact++) {
            estimate e = expected(t, row, c, x, exact);
            int overflow = isinf(y[c]) && fabs(e.value) + e.slack > FLT_MAX;
            if (!overflow && !(fabs(y[c] - e.value) <= e.slack))
                fail(r, p, exact ? "far from exact activations" : "wrong product", row, c, y[c], e.value);
        }
    }
}

/* Single rows of W: integers of 9 bits times bfloat16 are exact in float; others are rounded once. */
static void check_weights(const problem *p, report *r) {
    float *row = take_floats(p->s.k);
    for (int64_t n = 0; n < p->s.n; n++) {
        lowbit_row(&p->w, n, row);
        for (int64_t k = 0; k < p->s.k; k++)
            if (row[k] != (float)p->dense[n * p->s.k + k]) fail(r, p, "lowbit_row", 0, k, row[k], p->dense[n * p->s.k + k]);
    }
}

/* ---- cases ---- */

static report reports[8];
static int report_count;

static void check_same_rows(const trial *t, const trial *base, report *r) {
    const problem *p = t->p;
    for (int64_t at = 0; at < p->blocks * t->m; at++) {
        int64_t row = at % t->m, B = p->s.block;
        if (p->kinds[row] >= ONE_NAN) continue;
        if (memcmp(t->rows.values + at * B, base->rows.values + at * B, (size_t)B) ||
            !same(t->rows.scales[at], base->rows.scales[at]) || t->rows.sums[at] != base->rows.sums[at] ||
            (base->rows.halves && t->rows.halves[at] != base->rows.halves[at]))
            fail(r, p, "quantizes differently", row, at / t->m, t->rows.scales[at], base->rows.scales[at]);
    }
}

static void test_path(const problem *p, const trial *base, report *r) {
    int64_t m = p->s.m, few = 1 + below(m < 12 ? m + 2 : 12), *some = take((size_t)few * 8, 16, 0), alone = below(m);
    for (int64_t i = 0; i < few; i++) some[i] = below(m);
    r->cases++;
    if (r->isa != base->isa) {
        trial whole = run(r->isa, p, base->index, m, 0, r);
        check_same_rows(&whole, base, r);
        check_rows(&whole, base, "other bits than the portable path", r);
    }
    trial cut = run(r->isa, p, base->index, m, 1, r);
    check_rows(&cut, base, "other bits in ranges of tiles and rows", r);
    trial single = run(r->isa, p, &alone, 1, chance(50), r);
    check_rows(&single, base, "other bits for a row alone", r);
    trial mixed = run(r->isa, p, some, few, chance(50), r);
    check_rows(&mixed, base, "other bits at other positions", r);
}

static void test(const shape *s) {
    problem p;
    make_problem(&p, s);
    report *portable = &reports[report_count - 1];
    int64_t *index = take((size_t)s->m * 8, 16, 0);
    for (int64_t i = 0; i < s->m; i++) index[i] = i;
    trial base = run(portable->isa, &p, index, s->m, 0, portable);
    double *x = take((size_t)s->k * sizeof(double), 16, 0);
    for (int64_t i = 0; i < s->m; i++) check_row(&base, i, x, portable);
    check_weights(&p, portable);
    for (int i = 0, keep = buffer_count; i < report_count; i++, release(keep)) test_path(&p, &base, &reports[i]);
    release(0);
}

/* One of 6 formats, 3 blocks, with or without zero points, plain, paired, with either swiglu, with gelu or with silu; half
 * of them have inline scales. */
static void try(int variant, int64_t n, int64_t k, int64_t m) {
    static const int BITS[] = {2, 4, 8, 8, 3, 2}, BLOCKS[] = {32, 64, 128};
    int format = variant % 6, pair = variant / 36 % 6;
    shape s = {.bits = BITS[format], .high_only = format == 3, .vectors = format == 5};
    s.block = BLOCKS[variant / 6 % 3];
    s.zeros = variant / 18 % 2 && !s.vectors, s.e2m1 = format == 1 && s.block == 32 && !s.zeros && chance(50);
    s.float16 = ((s.bits == 8 && s.block == 32) || (format == 0 && s.block > 32)) && chance(50);
    s.inline_scales = !s.e2m1 && !s.float16 && chance(50), s.paired = pair > 0 && pair != 4;
    s.swiglu = pair == 3 ? 2 : pair == 5 ? 4 : pair > 1;
    s.bias = chance(40), s.residual = chance(40), s.norm = chance(40);
    s.n = s.paired ? 2 * n : n, s.m = m;
    s.k = s.vectors ? (k + s.block - 1) / s.block * s.block : k;
    test(&s);
}

/* A kind, paired or not, at a K of whole groups. */
static void try_kind(int kind, int64_t n, int64_t k, int64_t m) {
    const int64_t whole = kinds[kind].whole, pair = below(4);
    shape s = {.bits = kinds[kind].bits, .kind = kind, .block = 32, .paired = pair > 1, .m = m};
    s.swiglu = pair == 3 ? 1 + (int)below(2) : 0;
    s.bias = chance(40), s.residual = chance(40), s.norm = chance(40);
    s.n = s.paired ? 2 * n : n, s.k = (k + whole - 1) / whole * whole;
    test(&s);
}

/* Sums of groups of 16 are whole numbers that a float holds exactly. */
static void check_bounds(report *r) {
    for (int kind = 1; kind < KINDS; kind++) {
        const kind_facts *f = &kinds[kind];
        const int code = f->zero > (1 << f->bits) / 2 ? f->zero : (1 << f->bits) - 1 - f->zero;
        const int weight = f->zero ? (code > f->zero ? code : f->zero) : (1 << f->bits) - 1;
        const int scale = kind == KIND_Q6_K ? 128 : kind == KIND_Q3_K ? 32 : 15;
        if (f->halves && kind != KIND_NVFP4 && 2 * 16 * 127 * weight * scale >= 1 << 24) r->failures++;
    }
}

enum { FORMATS = 18, VARIANTS = 216, ROUNDS = 10 };

static int any_of(int format) { return format + FORMATS * (int)below(VARIANTS / FORMATS); }

static void test_all(void) {
    static const int64_t N[] = {1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 97}, LARGE[] = {64, 65, 130};
    static const int64_t K[] = {1, 3, 4, 7, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 255, 257};
    static const int64_t M[] = {1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 33};
    for (int i = 0; i < VARIANTS * ROUNDS; i++) try(i, PICK(N), PICK(K), PICK(M));
    for (int i = 0; i < (KINDS - 1) * ROUNDS; i++) try_kind(1 + i % (KINDS - 1), PICK(N), 1 + below(900), PICK(M));
    for (int kind = 1; kind < KINDS; kind++) {
        for (int m = 1; m <= 17; m++) try_kind(kind, 33, 1 + below(300), m);
        for (int i = 0; i < 3; i++) try_kind(kind, 17, 1 + below(300), LARGE[i]);
        try_kind(kind, 20, 3000 + below(200), 3 + below(4));
    }
    for (int n = 1; n <= 66; n++) try((int)below(VARIANTS), n, 1 + below(140), 1 + below(6));
    for (int k = 1; k <= 260; k++) try((int)below(VARIANTS), 17, k, 1 + below(6));
    for (int format = 0; format < FORMATS; format++) {
        for (int m = 1; m <= 33; m++) try(any_of(format), 33, 1 + below(140), m);
        for (int i = 0; i < 3; i++) try(any_of(format), 17, 1 + below(200), LARGE[i]);
        try(any_of(format), 20, 3000 + below(100), 3 + below(4));
    }
}

int main(void) {
    const lowbit_isa *isa;
    for (size_t i = 0; (isa = lowbit_isa_at(i)) != NULL; i++)
        if (lowbit_usable(isa)) reports[report_count++].isa = isa;
    check_bounds(&reports[report_count - 1]);
    test_all();
    long failures = 0;
    for (int i = 0; i < report_count; i++) {
        printf("%s: %ld cases, %ld failures\n", reports[i].isa->name, reports[i].cases, reports[i].failures);
        failures += reports[i].failures;
    }
    return failures != 0;
}
