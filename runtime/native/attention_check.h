/* Whether a pass of attention can be computed: sizes, layout of pages, tables; knows nothing of values. */
#ifndef EDGEINFER_ATTENTION_CHECK_H
#define EDGEINFER_ATTENTION_CHECK_H

#include "attention.h"

enum { ATTENTION_MESSAGE = 128 };

/* How long the arrays of a pass are. */
typedef struct {
    int64_t pool;      /* bytes */
    int64_t sequences; /* rows of pages */
    int64_t extras;
    int64_t positions; /* rows of cosines and sines */
} attention_bounds;

/* What is wrong with the sizes of heads, rotation and window, for people; NULL if nothing. */
const char *attention_sizes_fault(const attention *a);
/* Takes types, page_bytes and offset from a layout of `count` numbers: both types, page_bytes, the offset of each layer.
 * Returns what is wrong with it or with the pool, NULL if nothing. */
const char *attention_set_layout(attention *a, const int64_t *layout, int64_t count, int64_t layer,
                                 const attention_bounds *bounds);

/* Working memory of attention_check, which needs sizes and a layout that are right. */
size_t attention_check_bytes(const attention *a, const attention_bounds *bounds);
/* Whether every row reads and writes slots that are there, and writes what nobody else does. Else 0, with what is
 * wrong in `message`. Nothing is written to the pool. */
int attention_check(const attention *a, const attention_bounds *bounds, void *memory, char message[ATTENTION_MESSAGE]);

#endif
