/* Working memory that is kept from one product to the next; knows nothing of what it holds.
 *
 * Rows of a prompt take more than the size from which the C library maps memory anew for every allocation, which
 * costs as many page faults as it has pages. So the block given back last is kept, up to a bound.
 */
#include "scratch.h"

#include <stdint.h>
#include <stdlib.h>

#include "exchange.h"

enum { LINE = 64 };
/* 64 rows of the widest layer of a model of 8 billion weights. */
static const size_t MOST_KEPT = (size_t)1 << 20;

typedef struct {
    void *allocation;
    size_t bytes; /* after the header */
} header;

static void *kept;

static header *header_of(void *memory) { return (header *)((char *)memory - LINE); }

static void release(void *memory) {
    if (memory) free(header_of(memory)->allocation);
}

void *scratch_take(size_t bytes) {
    void *memory = exchange(&kept, NULL);
    if (memory && header_of(memory)->bytes >= bytes) return memory;
    release(memory);
    char *allocation = bytes < SIZE_MAX - 2 * LINE ? malloc(bytes + 2 * LINE) : NULL;
    if (!allocation) return NULL;
    /* The first line boundary with a whole line before it, which holds the header. */
    memory = allocation + LINE + (LINE - (uintptr_t)allocation % LINE) % LINE;
    header_of(memory)->allocation = allocation;
    header_of(memory)->bytes = bytes;
    return memory;
}

void scratch_give(void *memory) {
    if (memory && header_of(memory)->bytes <= MOST_KEPT) memory = exchange(&kept, memory);
    release(memory);
}

static size_t padded(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

size_t scratch_rows_bytes(int64_t m, int64_t k, int32_t block) {
    size_t cells = (size_t)(lowbit_blocks(k, block) * m);
    const size_t halves = block == SPAN_BLOCK ? padded(cells * sizeof(int32_t)) : 0;
    return padded(cells * (size_t)block) + padded(cells * sizeof(float)) + padded(cells * sizeof(int32_t)) + halves;
}

lowbit_rows scratch_rows(void *memory, int64_t m, int64_t k, int32_t block) {
    size_t cells = (size_t)(lowbit_blocks(k, block) * m);
    char *scales = (char *)memory + padded(cells * (size_t)block);
    char *sums = scales + padded(cells * sizeof(float));
    lowbit_rows rows = {m, k, block, memory, (float *)(void *)scales, (int32_t *)(void *)sums, NULL};
    if (block == SPAN_BLOCK) rows.halves = (int32_t *)(void *)(sums + padded(cells * sizeof(int32_t)));
    return rows;
}
