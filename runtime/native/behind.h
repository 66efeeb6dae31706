/* Mapped files whose pages are dropped as soon as an operator has read them; knows nothing of what they hold. */
#ifndef EDGEINFER_BEHIND_H
#define EDGEINFER_BEHIND_H

#include <stddef.h>
#include <stdint.h>

/* Addresses of whole pages, mapped from a file and never written to. */
typedef struct {
    const char *start;
    int64_t bytes;
} behind_span;

/* What operators that run on a thread drop; none if count is 0. */
typedef struct {
    const behind_span *spans;
    int64_t count;
} behind_spans;

/* Those of this thread. */
behind_spans behind_of_thread(void);
/* Drops the pages of these bytes, and what the system mapped around them, as far as they lie in the spans. From any
 * thread: who still reads one of them gets it from the file again.
 *
 * goes_on: what lies behind them is read next, so a piece of 2 MB that both share stays until that is dropped.
 */
void behind_drop(const behind_spans *behind, const void *first, int64_t bytes, int goes_on);

#endif
