/* What Python calls through ctypes: which instruction sets there are, products, attention and
 * activation functions outside any session.
 *
 * Knows nothing of ONNX Runtime. edgeinfer.runtime.native.library holds the other side of these declarations.
 */
#include "exports.h"

#include <string.h>

#include "attention_check.h"
#include "exchange.h"
#include "matrix.h"
#include "scratch.h"

/* Raised when a function here, an operator's inputs or the layout of matrices change. */
enum { EDGEINFER_NATIVE_VERSION = 11 };

static void *selected;

const lowbit_isa *lowbit_selected(void) {
    if (!selected)
        for (size_t i = 0; !selected; i++)
            if (lowbit_usable(lowbit_isa_at(i))) exchange(&selected, (void *)(uintptr_t)lowbit_isa_at(i));
    return selected;
}

static const lowbit_isa *find_isa(const char *name) {
    for (size_t i = 0; lowbit_isa_at(i); i++)
        if (strcmp(lowbit_isa_at(i)->name, name) == 0) return lowbit_isa_at(i);
    return NULL;
}

EDGEINFER_EXPORT int32_t edgeinfer_version(void) { return EDGEINFER_NATIVE_VERSION; }

/* Name of an instruction set, best first; NULL past the end. */
EDGEINFER_EXPORT const char *edgeinfer_isa_name(int32_t index) {
    const lowbit_isa *isa = index >= 0 ? lowbit_isa_at((size_t)index) : NULL;
    return isa ? isa->name : NULL;
}

EDGEINFER_EXPORT int32_t edgeinfer_isa_usable(int32_t index) {
    const lowbit_isa *isa = index >= 0 ? lowbit_isa_at((size_t)index) : NULL;
    return isa && lowbit_usable(isa);
}

/* Sets the instruction set of kernels that are made from now on; 0 if this machine cannot run it. */
EDGEINFER_EXPORT int32_t edgeinfer_select(const char *name) {
    const lowbit_isa *isa = find_isa(name);
    if (!isa || !lowbit_usable(isa)) return 0;
    exchange(&selected, (void *)(uintptr_t)isa);
    return 1;
}

/* Quantizes m rows and multiplies them, in `jobs` pieces one after the other, with the instruction set of that name.
 * Returns 0 if it is not usable, the matrix is impossible or memory is short. */
EDGEINFER_EXPORT int32_t edgeinfer_multiply(const char *name, const lowbit_matrix *w, const lowbit_input *input,
                                            int64_t m, const lowbit_output *output, int64_t jobs) {
    const lowbit_isa *isa = find_isa(name);
    if (!isa || !lowbit_usable(isa) || matrix_fault(w) || m < 1 || jobs < 1) return 0;
    void *memory = scratch_take(scratch_rows_bytes(m, w->k, w->block));
    if (!memory) return 0;
    lowbit_rows rows = scratch_rows(memory, m, w->k, w->block);
    int64_t tiles = lowbit_tiles(w);
    for (int64_t job = 0; job < jobs; job++) isa->quantize(input, &rows, m * job / jobs, m * (job + 1) / jobs);
    for (int64_t job = 0; job < jobs; job++)
        isa->multiply(w, &rows, output, tiles * job / jobs, tiles * (job + 1) / jobs);
    scratch_give(memory);
    return 1;
}

/* One pass of attention in about `jobs` pieces one after the other, with the instruction set of that name. The layout is
 * that of the operator, of one layer. Returns 0 if the path is not usable, a size or a table is wrong or memory is
 * short; then nothing is written. */
EDGEINFER_EXPORT int32_t edgeinfer_attend(const char *name, const attention *given, const attention_bounds *bounds,
                                          const int64_t layout[4], int64_t jobs) {
    const lowbit_isa *isa = find_isa(name);
    attention a = *given;
    char message[ATTENTION_MESSAGE];
    if (!isa || !lowbit_usable(isa) || attention_sizes_fault(&a) || a.count < 1 || jobs < 1) return 0;
    if (attention_set_layout(&a, layout, 4, 0, bounds)) return 0;
    void *memory = scratch_take(attention_check_bytes(&a, bounds));
    int right = memory && attention_check(&a, bounds, memory, message);
    scratch_give(memory);
    if (!right) return 0;
    const attention_path *path = attention_path_of(isa);
    attention_plan plan = attention_plan_of(&a, jobs);
    memory = scratch_take(plan.bytes);
    if (!memory) return 0;
    attention_start(&a, &plan, memory);
    path->write(&a, &plan, 0, a.count);
    for (int64_t job = 0; job < plan.jobs; job++) path->attend(&a, &plan, job);
    for (int64_t job = 0; job < plan.merges; job++) path->merge(&a, &plan, job);
    scratch_give(memory);
    return 1;
}

/* Activation functions of n values; 0 if the path is not usable or there is no such kind. */
EDGEINFER_EXPORT int32_t edgeinfer_activate(const char *name, int32_t kind, const float *constants, const float *x,
                                            const float *times, int64_t n, float *y) {
    const lowbit_isa *isa = find_isa(name);
    if (!isa || !lowbit_usable(isa) || kind < 0 || kind >= ACTIVATION_KINDS || n < 1) return 0;
    activation a = {.kind = kind, .first = constants[0], .second = constants[1], .rows = 1, .width = n, .x = x,
                    .stride = n, .times = times, .repeat = 1, .times_stride = n, .y = y};
    attention_path_of(isa)->activate(&a, 0, activation_pieces(&a));
    return 1;
}

/* One row of a matrix, dequantized; 0 if there is no such row. */
EDGEINFER_EXPORT int32_t edgeinfer_row(const lowbit_matrix *w, int64_t n, float *out) {
    if (matrix_fault(w) || n < 0 || n >= w->n) return 0;
    lowbit_row(w, n, out);
    return 1;
}

/* Multiply-adds done in `rounds` rounds of the selected instruction set's own instruction; 0 where it has none. */
EDGEINFER_EXPORT int64_t edgeinfer_probe_dots(int64_t rounds) { return lowbit_probe_dots(lowbit_selected(), rounds); }

/* Reads `count` words and returns their sum. */
EDGEINFER_EXPORT uint64_t edgeinfer_probe_read(const uint64_t *words, size_t count) {
    return lowbit_probe_read(words, count);
}
