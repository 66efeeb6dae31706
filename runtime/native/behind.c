/* Drops pages of mapped files behind the operators of a thread; knows nothing of matrices.
 *
 * A model whose weights are larger than its memory reads them once a pass. Without this, all that one operator reads
 * would be in memory together, as whoever calls it can drop nothing before it returns.
 */
#if defined(__linux__)
#define _DEFAULT_SOURCE /* madvise is in no standard */
#endif
#include "behind.h"

#include "exports.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

static THREAD_LOCAL behind_spans chosen;

/* From now on operators that run on this thread drop what they have read of these spans, which stay the caller's. */
EDGEINFER_EXPORT void edgeinfer_drop_behind(const behind_span *spans, int64_t count) {
    chosen = (behind_spans){spans, count};
}

behind_spans behind_of_thread(void) { return chosen; }

#if defined(__linux__)
/* Around a page that is touched, Linux maps the piece of the file that it has in one: since 6.18 up to 2 MB. Where a piece
 * lies as the processor can map it in one step, dropping a part of it drops all, and it is mapped again for the rest. */
enum { AROUND = 2 * 1024 * 1024 };

void behind_drop(const behind_spans *behind, const void *first, int64_t bytes, int goes_on) {
    if (!behind->count) return;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)first, after = at + (uintptr_t)bytes;
    const uintptr_t piece = at / AROUND * AROUND, last = after / AROUND * AROUND;
    if (goes_on && piece == last) return;
    const uintptr_t begin = piece < AROUND ? 0 : piece - AROUND;
    const uintptr_t end = goes_on ? last : (after + AROUND + page - 1) / page * page;
    for (int64_t i = 0; i < behind->count; i++) {
        const uintptr_t start = (uintptr_t)behind->spans[i].start, stop = start + (uintptr_t)behind->spans[i].bytes;
        const uintptr_t from = begin > start ? begin : start, to = end < stop ? end : stop;
        if (from < to) madvise((void *)from, to - from, MADV_DONTNEED);
    }
}
#else
void behind_drop(const behind_spans *behind, const void *first, int64_t bytes, int goes_on) {
    (void)behind, (void)first, (void)bytes, (void)goes_on;
}
#endif
