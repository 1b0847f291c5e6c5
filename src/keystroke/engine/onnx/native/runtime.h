/* The part of ONNX Runtime's C interface that custom operators need.
 *
 * Declares the stable parts of its ABI: the order of its function table and the layout of an operator's description.
 * The runtime's own headers are not included in its Python package.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct Status Status; /* NULL is success */
typedef struct KernelInfo KernelInfo;
typedef struct Context Context;
typedef struct Value Value;
typedef struct Shape Shape;
typedef struct SessionOptions SessionOptions;
typedef struct Domain Domain;
typedef void (*Function)(void);
typedef const Function *Api;

typedef struct {
    Api (*get_api)(uint32_t version);
    const char *(*version)(void);
} ApiBase;

enum { API_VERSION = 17, FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7, FLOAT16 = 10 };
enum { REQUIRED = 0, OPTIONAL = 1, VARIADIC = 2 };

/* The description of an operator up to API_VERSION. */
typedef struct Operator {
    uint32_t version;
    void *(*create)(const struct Operator *, Api, const KernelInfo *);
    const char *(*name)(const struct Operator *);
    const char *(*provider)(const struct Operator *);
    int (*input_type)(const struct Operator *, size_t);
    size_t (*input_count)(const struct Operator *);
    int (*output_type)(const struct Operator *, size_t);
    size_t (*output_count)(const struct Operator *);
    void (*compute)(void *, Context *);
    void (*destroy)(void *);
    int (*input_kind)(const struct Operator *, size_t);
    int (*output_kind)(const struct Operator *, size_t);
    int (*input_memory)(const struct Operator *, size_t);
    int (*least_inputs)(const struct Operator *);
    int (*same_inputs)(const struct Operator *);
    int (*least_outputs)(const struct Operator *);
    int (*same_outputs)(const struct Operator *);
    Status *(*create_checked)(const struct Operator *, Api, const KernelInfo *, void **);
    Status *(*compute_checked)(void *, Context *);
    Status *(*infer_shape)(const struct Operator *, void *);
    int (*first_version)(const struct Operator *);
    int (*last_version)(const struct Operator *);
    Function rest[8];
    /* our own field, after those of the runtime */
    const char *called;
    const int *inputs;
    size_t inputs_given;
    int variadic; /* 1: the second input may be missing, the last repeated; -1: all but the first may be missing */
    Status *(*make)(Api, const KernelInfo *, void **);
    Status *(*run)(void *, Context *);
} Operator;

#define CALL(api, index, type) ((type)(api)[index])

static inline Status *failure(Api api, const char *message) {
    return CALL(api, 0, Status *(*)(int, const char *))(1, message);
}
static inline Status *attribute_float(Api api, const KernelInfo *info, const char *name, float *out) {
    return CALL(api, 85, Status *(*)(const KernelInfo *, const char *, float *))(info, name, out);
}
static inline Status *attribute_int(Api api, const KernelInfo *info, const char *name, int64_t *out) {
    return CALL(api, 86, Status *(*)(const KernelInfo *, const char *, int64_t *))(info, name, out);
}
static inline Status *attribute_ints(Api api, const KernelInfo *info, const char *name, int64_t *out, size_t *size) {
    return CALL(api, 163, Status *(*)(const KernelInfo *, const char *, int64_t *, size_t *))(info, name, out, size);
}
static inline Status *input_value(Api api, const Context *context, size_t index, const Value **out) {
    return CALL(api, 90, Status *(*)(const Context *, size_t, const Value **))(context, index, out);
}
static inline Status *output_value(Api api, Context *context, size_t index, const int64_t *shape, size_t rank, Value **out) {
    return CALL(api, 91, Status *(*)(Context *, size_t, const int64_t *, size_t, Value **))(context, index, shape, rank, out);
}
static inline Status *data_of(Api api, const Value *value, void **out) {
    return CALL(api, 51, Status *(*)(const Value *, void **))(value, out);
}
static inline Status *shape_of(Api api, const Value *value, Shape **out) {
    return CALL(api, 65, Status *(*)(const Value *, Shape **))(value, out);
}
static inline Status *rank_of(Api api, const Shape *shape, size_t *out) {
    return CALL(api, 61, Status *(*)(const Shape *, size_t *))(shape, out);
}
static inline Status *sizes_of(Api api, const Shape *shape, int64_t *out, size_t rank) {
    return CALL(api, 62, Status *(*)(const Shape *, int64_t *, size_t))(shape, out, rank);
}
static inline void release_shape(Api api, Shape *shape) { CALL(api, 99, void (*)(Shape *))(shape); }
/* Calls `work(data, i)` for every i below `count` on the session's threads. */
static inline Status *in_parallel(Api api, const Context *context, void (*work)(void *, size_t), size_t count, void *data) {
    return CALL(api, 274, Status *(*)(const Context *, void (*)(void *, size_t), size_t, size_t, void *))(context, work, count, 0, data);
}
static inline Status *new_domain(Api api, const char *name, Domain **out) {
    return CALL(api, 26, Status *(*)(const char *, Domain **))(name, out);
}
static inline Status *add_operator(Api api, Domain *domain, const Operator *operator) {
    return CALL(api, 27, Status *(*)(Domain *, const Operator *))(domain, operator);
}
static inline Status *add_domain(Api api, SessionOptions *options, Domain *domain) {
    return CALL(api, 28, Status *(*)(SessionOptions *, Domain *))(options, domain);
}
