/* Random numbers and memory for the drivers; knows nothing of kernels. */
#ifndef EDGEINFER_TEST_RANDOM_H
#define EDGEINFER_TEST_RANDOM_H

#include <stdint.h>
#if defined(_WIN32)
#include <malloc.h>
#endif
#include <stdlib.h>

enum { MAX_BUFFERS = 256 };

static uint64_t state = 88172645463325252u;

static uint32_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
static int chance(int percent) { return below(100) < percent; }
static float uniform(float low, float high) { return low + (high - low) * (float)(next() >> 8) * 0x1p-24f; }
#define PICK(list) ((list)[below((int64_t)(sizeof(list) / sizeof((list)[0])))])

static void *buffers[MAX_BUFFERS];
static int buffer_count;

#if defined(_WIN32)
static void *aligned(size_t bytes, size_t alignment) { return _aligned_malloc(bytes, alignment); }
static void unaligned(void *memory) { _aligned_free(memory); }
#else
static void *aligned(size_t bytes, size_t alignment) {
    void *memory;
    return posix_memalign(&memory, alignment, bytes) ? NULL : memory;
}
static void unaligned(void *memory) { free(memory); }
#endif

/* Memory of exactly `bytes` after `offset`, so that a sanitizer sees the first byte past either end. */
static void *take(size_t bytes, size_t alignment, size_t offset) {
    void *memory = buffer_count == MAX_BUFFERS ? NULL : aligned(bytes + offset, alignment);
    if (!memory) abort();
    buffers[buffer_count++] = memory;
    return (char *)memory + offset;
}

static float *take_floats(int64_t count) { return take((size_t)count * 4, 16, 4); }

static void release(int keep) {
    while (buffer_count > keep) unaligned(buffers[--buffer_count]);
}

#endif
