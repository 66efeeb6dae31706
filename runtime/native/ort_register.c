/* Makes our operators known to ONNX Runtime, if it is one whose interface we know; knows nothing of what they do. */
#include <stdio.h>
#include <stdlib.h>

#include "exchange.h"
#include "exports.h"
#include "ort_support.h"

static OrtStatus *add_operators(const OrtApi *api, OrtCustomOpDomain *domain) {
    const ort_operator *const operators[] = {&ort_linear, &ort_embedding, &ort_floats, &ort_moe, &ort_attention,
                                            &ort_activation, &ort_conv, &ort_delta, &ort_mamba, &ort_adapter};
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        ORT_TRY(api->CustomOpDomain_Add(domain, &operators[i]->base));
    return NULL;
}

/* The version's two first numbers, 1.17 as 1017; 0 where it is not written like that. */
static long version_number(const char *text) {
    char *end;
    long major = strtol(text, &end, 10);
    if (end == text || *end != '.') return 0;
    const char *rest = end + 1;
    long minor = strtol(rest, &end, 10);
    return end == rest || major < 0 || minor < 0 || minor > 999 ? 0 : major * 1000 + minor;
}

/* NULL where the table does not do what its first functions are for. */
static const OrtApi *checked(const OrtApi *api) {
    OrtStatus *status = api ? api->CreateStatus(ORT_INVALID_ARGUMENT, "") : NULL;
    if (!status) return NULL;
    int code = api->GetErrorCode(status);
    api->ReleaseStatus(status);
    return code == ORT_INVALID_ARGUMENT ? api : NULL;
}

/* The runtime's functions; else NULL with an error, or without one if not even errors can be made. */
static const OrtApi *find_api(const OrtApiBase *base, OrtStatus **error) {
    const char *version = base->GetVersionString();
    long number = version_number(version);
    /* The table may be rearranged only with a new major version. Older runtimes complain aloud when asked. */
    const OrtApi *api = number / 1000 == 1 && number % 1000 >= ORT_ABI_VERSION ? base->GetApi(ORT_ABI_VERSION) : NULL;
    api = checked(api);
    *error = NULL;
    if (api) return api;
    const OrtApi *first = base->GetApi(1);
    char message[160];
    snprintf(message, sizeof message,
             "onnxruntime %.32s is not a version that edgeinfer's kernel works with: 1.%d to 1.x", version,
             ORT_ABI_VERSION);
    if (first) *error = first->CreateStatus(ORT_FAIL, message);
    return NULL;
}

typedef struct {
    const OrtApi *api;
    OrtCustomOpDomain *domain;
} home;

/* The domain lives as long as any session that uses it, and nobody tells when the last one ends: it is made once, and
 * once more for another runtime in the same process. */
static OrtStatus *shared_domain(const OrtApi *api, OrtCustomOpDomain **out) {
    static void *made;
    home *mine = exchange(&made, NULL);
    if (!mine || mine->api != api) {
        mine = calloc(1, sizeof *mine);
        if (!mine) return api->CreateStatus(ORT_FAIL, "out of memory for edgeinfer's operators");
        mine->api = api;
        OrtStatus *status = api->CreateCustomOpDomain("edgeinfer", &mine->domain);
        if (!status && (status = add_operators(api, mine->domain))) api->ReleaseCustomOpDomain(mine->domain);
        if (status) return free(mine), status;
    }
    *out = mine->domain;
    exchange(&made, mine);
    return NULL;
}

/* What SessionOptions.register_custom_ops_library looks for. */
EDGEINFER_EXPORT OrtStatus *ORT_CALL RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
    OrtStatus *error;
    const OrtApi *api = find_api(base, &error);
    if (!api) return error;
    OrtCustomOpDomain *domain = NULL;
    ORT_TRY(shared_domain(api, &domain));
    return api->AddCustomOpDomain(options, domain);
}
