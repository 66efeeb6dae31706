/* The part of ONNX Runtime's C interface that this library uses, declared from its append-only tables.
 *
 * Knows nothing of our operators. The runtime hands out a table of functions whose order never changes, only its end
 * moves; a slot keeps its meaning in every later version. Slots that are not called are counted, not named. The order
 * is that of version 17 (onnxruntime 1.17), the first with KernelContext_ParallelFor; the assertions below hold every
 * slot in its place.
 */
#ifndef EDGEINFER_ORT_ABI_H
#define EDGEINFER_ORT_ABI_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ORT_CALL __stdcall
#else
#define ORT_CALL
#endif

enum { ORT_ABI_VERSION = 17 };

/* Error codes, element types, and whether an operator's input may be absent. */
enum { ORT_OK = 0, ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum { ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_UINT16 = 4, ORT_INT32 = 6, ORT_INT64 = 7, ORT_BOOL = 9 };
enum { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };

typedef struct OrtStatus OrtStatus;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtValue OrtValue;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtShapeInferContext OrtShapeInferContext;
typedef struct OrtCustomOp OrtCustomOp;

typedef void (*OrtSlot)(void);
/* Slots first..last of the table. */
#define ORT_SLOTS(first, last) OrtSlot slots_##first##_to_##last[(last) - (first) + 1]

typedef struct {
    OrtStatus *(ORT_CALL *CreateStatus)(int code, const char *message);
    int(ORT_CALL *GetErrorCode)(const OrtStatus *status);
    ORT_SLOTS(2, 25);
    OrtStatus *(ORT_CALL *CreateCustomOpDomain)(const char *domain, OrtCustomOpDomain **out);
    OrtStatus *(ORT_CALL *CustomOpDomain_Add)(OrtCustomOpDomain *domain, const OrtCustomOp *op);
    OrtStatus *(ORT_CALL *AddCustomOpDomain)(OrtSessionOptions *options, OrtCustomOpDomain *domain);
    ORT_SLOTS(29, 50);
    OrtStatus *(ORT_CALL *GetTensorMutableData)(OrtValue *value, void **out);
    ORT_SLOTS(52, 60);
    OrtStatus *(ORT_CALL *GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *info, size_t *out);
    OrtStatus *(ORT_CALL *GetDimensions)(const OrtTensorTypeAndShapeInfo *info, int64_t *sizes, size_t count);
    ORT_SLOTS(63, 63);
    OrtStatus *(ORT_CALL *GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo *info, size_t *out);
    OrtStatus *(ORT_CALL *GetTensorTypeAndShape)(const OrtValue *value, OrtTensorTypeAndShapeInfo **out);
    ORT_SLOTS(66, 84);
    OrtStatus *(ORT_CALL *KernelInfoGetAttribute_float)(const OrtKernelInfo *info, const char *name, float *out);
    OrtStatus *(ORT_CALL *KernelInfoGetAttribute_int64)(const OrtKernelInfo *info, const char *name, int64_t *out);
    ORT_SLOTS(87, 89);
    OrtStatus *(ORT_CALL *KernelContext_GetInput)(const OrtKernelContext *context, size_t index, const OrtValue **out);
    OrtStatus *(ORT_CALL *KernelContext_GetOutput)(OrtKernelContext *context, size_t index, const int64_t *sizes,
                                                   size_t count, OrtValue **out);
    ORT_SLOTS(92, 92);
    void(ORT_CALL *ReleaseStatus)(OrtStatus *status);
    ORT_SLOTS(94, 98);
    void(ORT_CALL *ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *info);
    ORT_SLOTS(100, 100);
    void(ORT_CALL *ReleaseCustomOpDomain)(OrtCustomOpDomain *domain);
    ORT_SLOTS(102, 229);
    OrtStatus *(ORT_CALL *KernelInfo_GetInputCount)(const OrtKernelInfo *info, size_t *out);
    ORT_SLOTS(231, 231);
    OrtStatus *(ORT_CALL *KernelInfo_GetInputName)(const OrtKernelInfo *info, size_t index, char *out, size_t *size);
    ORT_SLOTS(233, 248);
    OrtStatus *(ORT_CALL *KernelInfoGetConstantInput_tensor)(const OrtKernelInfo *info, size_t index, int *is_constant,
                                                             const OrtValue **out);
    ORT_SLOTS(250, 273);
    OrtStatus *(ORT_CALL *KernelContext_ParallelFor)(const OrtKernelContext *context, void (*job)(void *, size_t),
                                                     size_t total, size_t batches, void *data);
} OrtApi;

#define ORT_AT(member, slot) static_assert(offsetof(OrtApi, member) == (slot) * sizeof(OrtSlot), "OrtApi." #member)
ORT_AT(GetErrorCode, 1);
ORT_AT(CreateCustomOpDomain, 26);
ORT_AT(CustomOpDomain_Add, 27);
ORT_AT(AddCustomOpDomain, 28);
ORT_AT(GetTensorMutableData, 51);
ORT_AT(GetDimensionsCount, 61);
ORT_AT(GetDimensions, 62);
ORT_AT(GetTensorShapeElementCount, 64);
ORT_AT(GetTensorTypeAndShape, 65);
ORT_AT(KernelInfoGetAttribute_float, 85);
ORT_AT(KernelInfoGetAttribute_int64, 86);
ORT_AT(KernelContext_GetInput, 90);
ORT_AT(KernelContext_GetOutput, 91);
ORT_AT(ReleaseStatus, 93);
ORT_AT(ReleaseTensorTypeAndShapeInfo, 99);
ORT_AT(ReleaseCustomOpDomain, 101);
ORT_AT(KernelInfo_GetInputCount, 230);
ORT_AT(KernelInfo_GetInputName, 232);
ORT_AT(KernelInfoGetConstantInput_tensor, 249);
ORT_AT(KernelContext_ParallelFor, 274);
#undef ORT_AT

typedef struct {
    /* NULL where the runtime is older than the version asked for. */
    const OrtApi *(ORT_CALL *GetApi)(uint32_t version);
    const char *(ORT_CALL *GetVersionString)(void);
} OrtApiBase;

/* What an operator tells the runtime; a runtime of any later version reads the fields of the version given first. */
struct OrtCustomOp {
    uint32_t version;
    void *(ORT_CALL *CreateKernel)(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info);
    const char *(ORT_CALL *GetName)(const OrtCustomOp *op);
    const char *(ORT_CALL *GetExecutionProviderType)(const OrtCustomOp *op);
    int(ORT_CALL *GetInputType)(const OrtCustomOp *op, size_t index);
    size_t(ORT_CALL *GetInputTypeCount)(const OrtCustomOp *op);
    int(ORT_CALL *GetOutputType)(const OrtCustomOp *op, size_t index);
    size_t(ORT_CALL *GetOutputTypeCount)(const OrtCustomOp *op);
    void(ORT_CALL *KernelCompute)(void *kernel, OrtKernelContext *context);
    void(ORT_CALL *KernelDestroy)(void *kernel);
    int(ORT_CALL *GetInputCharacteristic)(const OrtCustomOp *op, size_t index);
    int(ORT_CALL *GetOutputCharacteristic)(const OrtCustomOp *op, size_t index);
    int(ORT_CALL *GetInputMemoryType)(const OrtCustomOp *op, size_t index);
    int(ORT_CALL *GetVariadicInputMinArity)(const OrtCustomOp *op);
    int(ORT_CALL *GetVariadicInputHomogeneity)(const OrtCustomOp *op);
    int(ORT_CALL *GetVariadicOutputMinArity)(const OrtCustomOp *op);
    int(ORT_CALL *GetVariadicOutputHomogeneity)(const OrtCustomOp *op);
    OrtStatus *(ORT_CALL *CreateKernelV2)(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info,
                                          void **kernel);
    OrtStatus *(ORT_CALL *KernelComputeV2)(void *kernel, OrtKernelContext *context);
    OrtStatus *(ORT_CALL *InferOutputShapeFn)(const OrtCustomOp *op, OrtShapeInferContext *context);
    int(ORT_CALL *GetStartVersion)(const OrtCustomOp *op);
    int(ORT_CALL *GetEndVersion)(const OrtCustomOp *op);
};

#endif
