/* The instruction set in use, chosen once for the process; knows nothing of products. */
#ifndef EDGEINFER_EXPORTS_H
#define EDGEINFER_EXPORTS_H

#include "lowbit.h"

#if defined(_WIN32)
#define EDGEINFER_EXPORT __declspec(dllexport)
#else
#define EDGEINFER_EXPORT __attribute__((visibility("default")))
#endif

/* The one selected by edgeinfer_select, else the best that this machine can run. */
const lowbit_isa *lowbit_selected(void);

#endif
