/* What our operators share in talking to ONNX Runtime: inputs, shapes, errors, jobs; knows nothing of products. */
#ifndef EDGEINFER_ORT_SUPPORT_H
#define EDGEINFER_ORT_SUPPORT_H

#include "behind.h"
#include "lowbit.h"
#include "ort_abi.h"

enum { ORT_MOST_INPUTS = 14, ORT_MOST_SIZES = 8 };

typedef struct {
    const char *name; /* for messages */
    int type;
    int characteristic;
} ort_operand;

/* An operator: the runtime is given the address of `base` and gives it back. */
typedef struct {
    OrtCustomOp base;
    const char *name;
    size_t input_count;
    ort_operand inputs[ORT_MOST_INPUTS];
} ort_operator;

/* An input of one node. Weights are constants: where the node lies in the same graph as they do, the runtime tells
 * where when the kernel is made, else with every call. */
typedef struct {
    int given;
    int64_t elements; /* of a constant */
    const void *data; /* of a constant, else NULL */
} ort_input;

/* What the kernel of every operator begins with. */
typedef struct {
    const OrtApi *api;
    const ort_operator *op;
    const lowbit_isa *isa;
    int64_t part; /* of the model, by which layer_mask decides whether it runs */
    ort_input inputs[ORT_MOST_INPUTS];
} ort_kernel;

typedef struct {
    size_t rank;
    int64_t sizes[ORT_MOST_SIZES];
    int64_t elements;
} ort_shape;

#define ORT_TRY(call)                   \
    do {                                \
        OrtStatus *status_ = (call);    \
        if (status_) return status_;    \
    } while (0)

#if defined(__GNUC__)
#define ORT_PRINTF(text, values) __attribute__((format(printf, text, values)))
#else
#define ORT_PRINTF(text, values)
#endif

/* An error with the operator's name before the message. */
OrtStatus *ort_fail(const ort_kernel *kernel, const char *format, ...) ORT_PRINTF(2, 3);

/* Fills in a new kernel: which inputs its node has, and which of them are constants. */
OrtStatus *ort_open(ort_kernel *kernel, const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info);
OrtStatus *ort_int(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name, int64_t *out);
/* The attribute; 0 where it is absent. */
int64_t ort_int_or_zero(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name);
float ort_float_or_zero(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name);
/* The attribute, which is 0 or 1; 0 where it is absent. */
OrtStatus *ort_flag(const ort_kernel *kernel, const OrtKernelInfo *info, const char *name, int32_t *out);
/* The attribute heads, which divides the N of a matrix; 1 where it is absent. */
OrtStatus *ort_heads(const ort_kernel *kernel, const OrtKernelInfo *info, int64_t n, int64_t *out);

/* An error unless the input, where it is a constant, has that many elements. */
OrtStatus *ort_expect(const ort_kernel *kernel, size_t index, int64_t elements);
/* Values of an input, NULL where it is absent; an error unless it has that many elements. */
OrtStatus *ort_read(const ort_kernel *kernel, const OrtKernelContext *context, size_t index, int64_t elements,
                    const void **out);
/* Values and shape of an input that is given. */
OrtStatus *ort_read_shaped(const ort_kernel *kernel, const OrtKernelContext *context, size_t index, ort_shape *shape,
                           const void **out);
/* Memory of the only output. */
OrtStatus *ort_write(const ort_kernel *kernel, OrtKernelContext *context, const ort_shape *shape, float **out);

/* Whether the node is left out: the input layer_mask, if there is one, is false at the node's attribute `part`. */
OrtStatus *ort_left_out(const ort_kernel *kernel, const OrtKernelContext *context, size_t index, int *out);
/* What a node gives that is left out: its residual, or zeros where that is NULL. */
OrtStatus *ort_pass_on(const ort_kernel *kernel, OrtKernelContext *context, const ort_shape *shape,
                       const float *residual);

/* A matrix whose rows are those of up to three, all in one array; of one alone where no GGUF type is given. */
enum { ORT_MOST_SEGMENTS = 3 };
typedef struct {
    int64_t n, k;
    int32_t count;
    lowbit_matrix of[ORT_MOST_SEGMENTS];
} ort_matrix;

/* Sizes of the matrix in inputs 1 to 4 (data, low, scales, zeros), from the attributes; constants are checked. Inline
 * scales are part of data. With the attribute kind, the number of a GGUF type, data is all, and the matrix has as many
 * rows of it as `rows` says, or all; kind_1, rows_1, kind_2 and rows_2 are of the rows behind. */
OrtStatus *ort_open_matrix(const ort_kernel *kernel, const OrtKernelInfo *info, ort_matrix *matrix);
/* The same matrix with its bytes. */
OrtStatus *ort_read_matrix(const ort_kernel *kernel, const OrtKernelContext *context, ort_matrix *matrix);

/* Drops the pages of some tiles of a matrix that were read, where they lie in the spans; `goes_on` as of behind_drop. */
void ort_drop_tiles(const behind_spans *behind, const lowbit_matrix *matrix, int64_t first, int64_t last, int goes_on);

/* Work in numbers of units that a thread takes at a time. */
typedef void (*ort_job)(void *data, size_t index);
/* Into how many jobs to split `pieces` that cost `bytes` of reading, or as much time, in all. */
int64_t ort_jobs(int64_t pieces, int64_t bytes);
/* Runs jobs 0..count-1 on the session's threads; one job runs where it is. */
OrtStatus *ort_parallel(const ort_kernel *kernel, const OrtKernelContext *context, ort_job job, int64_t count,
                        void *data);

/* What the operators register with. */
const char *ORT_CALL ort_op_name(const OrtCustomOp *op);
const char *ORT_CALL ort_op_provider(const OrtCustomOp *op);
int ORT_CALL ort_op_input_type(const OrtCustomOp *op, size_t index);
size_t ORT_CALL ort_op_input_count(const OrtCustomOp *op);
int ORT_CALL ort_op_input_characteristic(const OrtCustomOp *op, size_t index);
int ORT_CALL ort_op_output_type(const OrtCustomOp *op, size_t index);
size_t ORT_CALL ort_op_output_count(const OrtCustomOp *op);
int ORT_CALL ort_op_zero_at(const OrtCustomOp *op, size_t index);
int ORT_CALL ort_op_one(const OrtCustomOp *op);

#define ORT_BASE(create, compute, destroy)                                                                       \
    {                                                                                                            \
        .version = ORT_ABI_VERSION, .GetName = ort_op_name, .GetExecutionProviderType = ort_op_provider,         \
        .GetInputType = ort_op_input_type, .GetInputTypeCount = ort_op_input_count,                              \
        .GetOutputType = ort_op_output_type, .GetOutputTypeCount = ort_op_output_count,                          \
        .KernelDestroy = (destroy), .GetInputCharacteristic = ort_op_input_characteristic,                       \
        .GetOutputCharacteristic = ort_op_zero_at, .GetInputMemoryType = ort_op_zero_at,                         \
        .GetVariadicInputMinArity = ort_op_one, .GetVariadicInputHomogeneity = ort_op_one,                       \
        .GetVariadicOutputMinArity = ort_op_one, .GetVariadicOutputHomogeneity = ort_op_one,                     \
        .CreateKernelV2 = (create), .KernelComputeV2 = (compute), .GetStartVersion = ort_op_one,                 \
        .GetEndVersion = ort_op_one                                                                              \
    }

extern const ort_operator ort_attention, ort_linear, ort_embedding, ort_floats, ort_moe, ort_activation, ort_conv;
extern const ort_operator ort_delta, ort_mamba, ort_adapter;

#endif
