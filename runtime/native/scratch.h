/* Working memory of one product, and quantized rows laid out in it; knows nothing of who multiplies. */
#ifndef EDGEINFER_SCRATCH_H
#define EDGEINFER_SCRATCH_H

#include <stddef.h>

#include "lowbit.h"

/* At least `bytes` of memory, 64-byte aligned, or NULL. Give it back with scratch_give. Safe from any thread. */
void *scratch_take(size_t bytes);
void scratch_give(void *memory);

/* Bytes that (m, k) rows take, quantized in blocks; a multiple of 64. */
size_t scratch_rows_bytes(int64_t m, int64_t k, int32_t block);
/* The rows in memory of that many bytes. */
lowbit_rows scratch_rows(void *memory, int64_t m, int64_t k, int32_t block);

#endif
