/* Loads a built library of the kernel as Python and onnxruntime do, and calls it through what it exports: knows nothing
 * of how it was built.
 *
 * Prints the instruction sets that run here, best first, each with what differed from the portable path. Exits with 1
 * where anything did.
 */
#include <stdio.h>

#include "attention_check.h"
#include "ort_abi.h"
#include "problem.h"

#if defined(_WIN32)
#include <windows.h>
static void *find(void *library, const char *name) { return (void *)(uintptr_t)GetProcAddress(library, name); }
static void *load(const char *path) { return LoadLibraryA(path); }
static const char *reason(void) { return "LoadLibrary fails"; }
#else
#include <dlfcn.h>
static void *find(void *library, const char *name) { return dlsym(library, name); }
static void *load(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static const char *reason(void) { return dlerror(); }
#endif

typedef int32_t version_function(void);
typedef const char *name_function(int32_t index);
typedef int32_t usable_function(int32_t index);
typedef int32_t select_function(const char *name);
typedef int32_t multiply_function(const char *name, const lowbit_matrix *w, const lowbit_input *input, int64_t m,
                                  const lowbit_output *output, int64_t jobs);
typedef int32_t attend_function(const char *name, const attention *given, const attention_bounds *bounds,
                                const int64_t layout[4], int64_t jobs);
typedef int32_t row_function(const lowbit_matrix *w, int64_t n, float *out);
typedef int64_t dots_function(int64_t rounds);
typedef uint64_t read_function(const uint64_t *words, size_t count);
typedef OrtStatus *(ORT_CALL *register_function)(OrtSessionOptions *options, const OrtApiBase *base);

static void *library;

static void *function(const char *name) {
    void *found = find(library, name);
    if (!found) printf("%s is not exported\n", name), exit(1);
    return found;
}
#define CALL(type, name) ((type *)(uintptr_t)function(name))

enum { CASES = 200 };

static void product(const problem *p, const char *isa, int64_t jobs, float *y) {
    multiply_function *multiply = CALL(multiply_function, "edgeinfer_multiply");
    lowbit_input in = {p->x, p->s.norm ? p->weight : NULL, 1e-6f};
    lowbit_output out = {y, p->s.bias ? p->bias : NULL, p->s.residual ? p->residual : NULL, p->s.swiglu};
    if (!multiply(isa, &p->w, &in, p->s.m, &out, jobs)) printf("%s refuses a product\n", isa), exit(1);
}

/* Bits that differ from the portable path's, and rows from the matrix that was packed. */
static long differences(const char *isa) {
    row_function *row = CALL(row_function, "edgeinfer_row");
    long found = 0;
    state = 88172645463325252u;
    for (int i = 0; i < CASES; i++, release(0)) {
        static const int BITS[] = {2, 4, 8, 8}, BLOCKS[] = {32, 64, 128};
        shape s = {.bits = BITS[i % 4], .high_only = i % 4 == 3, .block = BLOCKS[i / 4 % 3], .zeros = i / 12 % 2};
        s.bias = chance(40), s.residual = chance(40), s.norm = chance(40), s.swiglu = s.paired = chance(30);
        s.n = 2 * (1 + below(60)), s.k = 1 + below(300), s.m = 1 + below(9);
        problem p;
        make_problem(&p, &s);
        float *wanted = take_floats(s.m * p.width), *got = take_floats(s.m * p.width), *dense = take_floats(s.k);
        product(&p, "portable", 1, wanted);
        product(&p, isa, 1 + below(4), got);
        for (int64_t at = 0; at < s.m * p.width; at++)
            found += memcmp(wanted + at, got + at, 4) && !(isnan(wanted[at]) && isnan(got[at]));
        int64_t n = below(s.n);
        if (!row(&p.w, n, dense)) found++;
        for (int64_t k = 0; k < s.k; k++) found += dense[k] != p.dense[n * s.k + k];
    }
    return found;
}

/* A chain of attention in one pass and a tree behind it, in a pool of two pages in the wrong order; 0 if refused. */
enum { CHAIN = 90, TREE = 3, PAGE_BYTES = 32768, HEADS = 4, KV_HEADS = 2, KEY = 20, VALUE = 12, WIDTH = 4 * 20 + 2 * 32 };

static int attend(const char *isa, int type, const float *qkv, uint8_t *pool, float *out) {
    static const int32_t PAGES[] = {1, 0}, EXTRAS[] = {92, 93};
    attend_function *call = CALL(attend_function, "edgeinfer_attend");
    int32_t rows[CHAIN + TREE][ATTENTION_ROW] = {{0}};
    int64_t positions[CHAIN + TREE] = {0}, layout[] = {type, type, PAGE_BYTES, 64};
    for (int32_t i = 0; i < CHAIN + TREE; i++) rows[i][ATTENTION_PREFIX] = i + 1;
    for (int32_t i = CHAIN + 1; i < CHAIN + TREE; i++) {
        int32_t row[] = {0, CHAIN, i - CHAIN - 1, 1};
        memcpy(rows[i], row, sizeof row);
    }
    attention a = {.heads = HEADS, .kv_heads = KV_HEADS, .key_size = KEY, .value_size = VALUE, .scale = 0.3f};
    attention_bounds bounds = {2 * PAGE_BYTES, 1, 2, 0};
    a.pool = pool, a.pages = PAGES, a.columns = 2, a.extras = EXTRAS, a.positions = positions;
    a.qkv = qkv, a.rows = rows[0], a.count = CHAIN, a.out = out;
    if (!call(isa, &a, &bounds, layout, 1)) return 0;
    a.qkv += CHAIN * WIDTH, a.rows = rows[CHAIN], a.count = TREE, a.out += CHAIN * HEADS * VALUE;
    if (!call(isa, &a, &bounds, layout, 4)) return 0;
    /* A page outside the pool is refused. */
    bounds.pool -= PAGE_BYTES;
    return !call(isa, &a, &bounds, layout, 1);
}

/* Types of caches whose results or pools are not the portable path's. */
static long attention_differences(const char *isa) {
    enum { RESULTS = (CHAIN + TREE) * HEADS * VALUE };
    long found = 0;
    for (int type = 0; type < ATTENTION_TYPES; type++, release(0)) {
        float *qkv = take_floats((CHAIN + TREE) * WIDTH), *results[2];
        uint8_t *pools[2];
        for (int i = 0; i < (CHAIN + TREE) * WIDTH; i++) qkv[i] = uniform(-2.0f, 2.0f);
        for (int i = 0; i < 2; i++) {
            pools[i] = take(2 * PAGE_BYTES, 64, 0), results[i] = take_floats(RESULTS);
            memset(pools[i], 0, 2 * PAGE_BYTES);
            if (!attend(i ? isa : "portable", type, qkv, pools[i], results[i])) return found + 1;
        }
        found += memcmp(results[0], results[1], RESULTS * sizeof(float)) || memcmp(pools[0], pools[1], 2 * PAGE_BYTES);
    }
    return found;
}

static const char *ORT_CALL too_old(void) { return "1.2.3"; }
static const OrtApi *ORT_CALL no_api(uint32_t version) { return (void)version, NULL; }

int main(int count, char **arguments) {
    if (count != 2) return 2;
    library = load(arguments[1]);
    if (!library) return printf("%s\n", reason()), 1;
    uint64_t words[16] = {0};
    for (uint64_t i = 0; i < 16; i++) words[i] = i;
    /* An onnxruntime that it does not know is refused, not crashed into. */
    OrtApiBase old = {no_api, too_old};
    register_function add = (register_function)(uintptr_t)function("RegisterCustomOps");
    long failures = add(NULL, &old) != NULL;
    failures += CALL(read_function, "edgeinfer_probe_read")(words, 16) != 120;
    printf("version %d\n", (int)CALL(version_function, "edgeinfer_version")());
    const char *name;
    for (int32_t i = 0; (name = CALL(name_function, "edgeinfer_isa_name")(i)) != NULL; i++) {
        if (!CALL(usable_function, "edgeinfer_isa_usable")(i)) continue;
        failures += !CALL(select_function, "edgeinfer_select")(name);
        failures += CALL(dots_function, "edgeinfer_probe_dots")(16) < 0;
        long found = differences(name) + attention_differences(name);
        printf("%s: %d cases, %ld failures\n", name, CASES + ATTENTION_TYPES, found);
        failures += found;
    }
    return failures != 0;
}
