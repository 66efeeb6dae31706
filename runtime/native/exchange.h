/* Swapping a shared pointer in one step, with every compiler; knows nothing of what is pointed to. */
#ifndef EDGEINFER_EXCHANGE_H
#define EDGEINFER_EXCHANGE_H

#if defined(_MSC_VER)
#include <intrin.h>
#endif

/* Puts `value` into the slot and returns what was there. */
static inline void *exchange(void **slot, void *value) {
#if defined(_MSC_VER)
    return _InterlockedExchangePointer((void *volatile *)slot, value);
#else
    return __atomic_exchange_n(slot, value, __ATOMIC_ACQ_REL);
#endif
}

#endif
