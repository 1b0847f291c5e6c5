/* Operators for ONNX Runtime: products with weights as a GGUF file stores them, rows of such a table, norms, and
 * attention with keys and values in half precision; and a whole model without the runtime, in plan.h.
 *
 * Connects the runtime's values with the functions of the headers. Every size is checked against the available bytes
 * before it is used; a mismatch is an error of the session.
 */
#include "attention.h"
#include "check.h"
#include "plan.h"
#include "runtime.h"
#include "stored_product.h"

#define TRY(call)                                \
    do {                                         \
        Status *status_ = (call);                \
        if (status_) return status_;             \
    } while (0)

enum { MOST_RANK = 4 };

/* An input: its data, the number of elements, and its last two sizes. */
typedef struct {
    void *data;
    size_t elements, sizes[MOST_RANK], rank;
} Input;

static Status *read_input(Api api, const Context *context, size_t index, Input *out) {
    const Value *value;
    Shape *shape;
    int64_t sizes[MOST_RANK];
    TRY(input_value(api, context, index, &value));
    *out = (Input){.elements = 1};
    if (!value) return NULL;
    TRY(data_of(api, value, &out->data));
    TRY(shape_of(api, value, &shape));
    Status *failed = rank_of(api, shape, &out->rank);
    if (!failed && out->rank > MOST_RANK) failed = failure(api, "an input has more dimensions than any operator takes");
    if (!failed) failed = sizes_of(api, shape, sizes, out->rank);
    release_shape(api, shape);
    if (failed) return failed;
    for (size_t i = 0; i < out->rank; i++) {
        out->sizes[i] = (size_t)sizes[i];
        out->elements *= (size_t)sizes[i];
    }
    return NULL;
}

static Status *output(Api api, Context *context, size_t rows, size_t width, float **out) {
    Value *value;
    int64_t shape[3] = {1, (int64_t)rows, (int64_t)width};
    TRY(output_value(api, context, 0, shape, 3, &value));
    return data_of(api, value, (void **)out);
}

/* The threads of a session. */
typedef struct {
    Threads base;
    Api api;
    const Context *context;
    Status *failed;
} Runtime;

static void on_session_threads(Threads *threads, Work work, size_t count, void *data) {
    Runtime *runtime = (Runtime *)threads;
    if (!runtime->failed) runtime->failed = in_parallel(runtime->api, runtime->context, work, count, data);
}

INLINE Runtime threads_of(Api api, const Context *context) { return (Runtime){{on_session_threads}, api, context, NULL}; }

/* A copy of an operator's attributes, which the runtime passes to its runs and frees. */
static Status *keep_kernel(Api api, const void *made, size_t size, void **out) {
    *out = malloc(size);
    if (!*out) return failure(api, "no memory for an operator");
    memcpy(*out, made, size);
    return NULL;
}

/* StoredMatMul: x [1, rows, width], bias [height] or none, one to three tables of bytes [height, bytes a row], or packed by
 * `pack_table` -> [1, rows, sum of heights]. With `gated`, two tables: silu(first) * second. */

typedef struct {
    Api api;
    size_t parts;
    int64_t gated;
    const Format *formats[MOST_PARTS];
} StoredMatMul;

static Status *make_matmul(Api api, const KernelInfo *info, void **out) {
    int64_t types[MOST_PARTS] = {0}, gated = 0;
    size_t count = MOST_PARTS;
    TRY(attribute_ints(api, info, "types", types, &count));
    TRY(attribute_int(api, info, "gated", &gated));
    StoredMatMul *self = calloc(1, sizeof *self);
    if (!self) return failure(api, "no memory for an operator");
    *self = (StoredMatMul){.api = api, .parts = count, .gated = gated};
    for (size_t i = 0; i < count; i++) {
        self->formats[i] = format_of(types[i]);
        if (!self->formats[i]) {
            free(self);
            return failure(api, "StoredMatMul does not know this storage type");
        }
    }
    *out = self;
    return NULL;
}

/* The rows of a matrix that a row of its table holds: LANES if it is packed, which this notes in the part. */
static size_t unpacked_rows(Part *part, size_t row, size_t width) {
#if PACKS
    const Format *packed = packed_format(part->format, LANES, width);
    if (packed && row == LANES * row_bytes(packed, width)) {
        part->format = packed, part->height *= LANES, part->stride = row_bytes(packed, width);
        return LANES;
    }
#endif
    return (void)part, (void)row, (void)width, 1;
}

static Status *run_matmul(void *kernel, Context *context) {
    const StoredMatMul *self = kernel;
    Api api = self->api;
    Input x, bias, table;
    TRY(read_input(api, context, 0, &x));
    TRY(read_input(api, context, 1, &bias));
    if (x.rank < 2 || x.sizes[x.rank - 1] % BLOCK) return failure(api, "StoredMatMul takes rows of whole blocks");
    Product p = {.count = self->parts, .width = x.sizes[x.rank - 1], .x = x.data, .bias = bias.data, .gated = (int)self->gated};
    size_t heights = 0;
    p.rows = x.elements / p.width;
    for (size_t i = 0; i < p.count; i++) {
        TRY(read_input(api, context, 2 + i, &table));
        Part *part = p.parts + i;
        *part = (Part){self->formats[i], table.data, table.sizes[0], row_bytes(self->formats[i], p.width), heights};
        size_t together = unpacked_rows(part, table.sizes[1], p.width);
        if (table.rank != 2 || table.sizes[1] != together * part->stride || p.width % (size_t)part->format->values || part->height < LANES)
            return failure(api, "a table of StoredMatMul does not have the rows its type and the input ask for");
        heights += part->height;
    }
    if (bias.data && bias.elements != heights) return failure(api, "the bias of StoredMatMul does not fit its tables");
    if (p.gated && (p.count != 2 || p.parts[0].height != p.parts[1].height)) return failure(api, "a gate needs two equal tables");
    p.stride = p.gated ? p.parts[0].height : heights;
    TRY(output(api, context, p.rows, p.stride, &p.out));
    Runtime runtime = threads_of(api, context);
    if (run_product(&p, &runtime.base)) return failure(api, "no memory for the activations of a product");
    return runtime.failed;
}

/* StoredRows: ids [1, rows], a table of bytes [height, bytes a row] -> [1, rows, width]. */

typedef struct {
    Api api;
    int64_t width;
    const Format *format;
} StoredRows;

static Status *make_rows(Api api, const KernelInfo *info, void **out) {
    int64_t type = 0, width = 0;
    TRY(attribute_int(api, info, "type", &type));
    TRY(attribute_int(api, info, "width", &width));
    if (!format_of(type) || width <= 0) return failure(api, "StoredRows does not know this storage type");
    StoredRows *self = calloc(1, sizeof *self);
    if (!self) return failure(api, "no memory for an operator");
    *self = (StoredRows){api, width, format_of(type)};
    *out = self;
    return NULL;
}

static Status *run_rows(void *kernel, Context *context) {
    const StoredRows *self = kernel;
    Api api = self->api;
    const Format *format = self->format;
    Input ids, table;
    size_t width = (size_t)self->width, stride = row_bytes(format, width);
    float *out;
    TRY(read_input(api, context, 0, &ids));
    TRY(read_input(api, context, 1, &table));
    if (table.rank != 2 || table.sizes[1] != stride || width % (size_t)format->values)
        return failure(api, "the table of StoredRows does not have rows of its type and width");
    TRY(output(api, context, ids.elements, width, &out));
    for (size_t row = 0; row < ids.elements; row++, out += width) {
        int64_t id = ((const int64_t *)ids.data)[row];
        if (id < 0 || (size_t)id >= table.sizes[0]) return failure(api, "a token lies outside of the vocabulary");
        widen_row(format, (const uint8_t *)table.data + (size_t)id * stride, width, out);
    }
    return NULL;
}

/* StoredNorm: x [1, rows, width], gain [width] -> the RMS norms of the rows times the gain. */

typedef struct {
    Api api;
    float epsilon;
} StoredNorm;

static Status *make_norm(Api api, const KernelInfo *info, void **out) {
    StoredNorm made = {.api = api};
    TRY(attribute_float(api, info, "epsilon", &made.epsilon));
    return keep_kernel(api, &made, sizeof made, out);
}

static Status *run_norm(void *kernel, Context *context) {
    const StoredNorm *self = kernel;
    Api api = self->api;
    Input x, gain;
    TRY(read_input(api, context, 0, &x));
    TRY(read_input(api, context, 1, &gain));
    if (x.rank != 3 || gain.elements != x.sizes[2]) return failure(api, "the gain of StoredNorm does not fit its rows");
    Norm norm = {.width = x.sizes[2], .epsilon = self->epsilon, .gain = gain.data, .rows = x.data};
    TRY(output(api, context, x.sizes[1], x.sizes[2], &norm.out));
    Runtime runtime = threads_of(api, context);
    for_each_row(&runtime.base, norm_row, x.sizes[1], &norm);
    return runtime.failed;
}

#include "family_operators.h"
#include "host_experts.h"

/* HalfAttention: mixed queries, keys and values [1, rows, ...], cosines, sines [positions, width / 2], keys,
 * values [1, kv heads, capacity, width] (half precision; appended in place, keys as attention.h stores them), last
 * [1] (the last row's position)
 * -> [1, rows, heads * width]. */

typedef struct {
    Api api;
    int64_t heads, kv_heads, window;
    float scale;
    int64_t rotary, growth_every; /* only of FamilyAttention, as what follows */
    float growth;
    int has_sinks;
} HalfAttention;

static Status *make_attention(Api api, const KernelInfo *info, void **out) {
    HalfAttention made = {.api = api};
    TRY(attribute_int(api, info, "heads", &made.heads));
    TRY(attribute_int(api, info, "kv_heads", &made.kv_heads));
    TRY(attribute_int(api, info, "window", &made.window));
    TRY(attribute_float(api, info, "scale", &made.scale));
    if (made.kv_heads <= 0 || made.window < 0 || made.heads % made.kv_heads || made.heads / made.kv_heads > MOST_QUERIES)
        return failure(api, "these heads cannot share their keys");
    return keep_kernel(api, &made, sizeof made, out);
}

/* FamilyAttention: HalfAttention with heads that are rotated in part, queries that grow with their position, and sinks
 * [heads] as a seventh input or none. Without heads, rows are only keys and values, and the result is empty. */
static Status *make_family_attention(Api api, const KernelInfo *info, void **out) {
    TRY(make_attention(api, info, out));
    HalfAttention *self = *out;
    Status *failed = attribute_int(api, info, "rotary", &self->rotary);
    if (!failed) failed = attribute_int(api, info, "growth_every", &self->growth_every);
    if (!failed) failed = attribute_float(api, info, "growth", &self->growth);
    if (!failed && (self->rotary < 0 || (self->growth > 0 && self->growth_every <= 0)))
        failed = failure(api, "FamilyAttention has sizes that cannot be");
    self->has_sinks = 1;
    if (failed) free(self);
    return failed;
}

static Status *run_attention(void *kernel, Context *context) {
    const HalfAttention *self = kernel;
    Api api = self->api;
    Input mixed, cosines, sines, keys, values, last;
    TRY(read_input(api, context, 0, &mixed));
    TRY(read_input(api, context, 1, &cosines));
    TRY(read_input(api, context, 2, &sines));
    TRY(read_input(api, context, 3, &keys));
    TRY(read_input(api, context, 4, &values));
    TRY(read_input(api, context, 5, &last));
    Attention a = {.heads = (size_t)self->heads, .kv_heads = (size_t)self->kv_heads, .scale = self->scale, .window = (size_t)self->window};
    if (mixed.rank != 3 || keys.rank != 4 || values.elements != keys.elements || last.elements != 1)
        return failure(api, "attention needs mixed rows, keys and values of one shape, and a position");
    a.rows = mixed.sizes[1], a.capacity = keys.sizes[2], a.width = keys.sizes[3];
    a.rotary = (size_t)self->rotary, a.growth = self->growth, a.growth_every = (size_t)self->growth_every;
    if (self->has_sinks) {
        Input sinks;
        TRY(read_input(api, context, 6, &sinks));
        if ((sinks.data && sinks.elements != a.heads) || a.rotary > a.width)
            return failure(api, "FamilyAttention does not have a sink for every head");
        a.sinks = sinks.data;
    }
    int64_t end = (int64_t)*(const int32_t *)last.data + 1;
    if (a.capacity % KEY_BLOCK) return failure(api, "the memory of attention does not hold whole blocks of keys");
    if (keys.sizes[1] != a.kv_heads || mixed.sizes[2] != (a.heads + 2 * a.kv_heads) * a.width || a.width % 2 || a.width > MOST_WIDTH)
        return failure(api, "the heads of attention do not have the sizes of its keys");
    if (end < (int64_t)a.rows || (size_t)end > a.capacity || (size_t)end * (a.rotary ? a.rotary : a.width) / 2 > cosines.elements || sines.elements != cosines.elements)
        return failure(api, "attention was asked for positions outside of its memory");
    a.first = (size_t)end - a.rows;
    a.mixed = mixed.data, a.cosines = cosines.data, a.sines = sines.data, a.keys = keys.data, a.values = values.data;
    TRY(output(api, context, a.heads ? a.rows : 0, a.heads * a.width, &a.out));
    if (!a.rows || !a.heads) return for_rows(api, context, take_in, a.rows, &a); /* only keys and values */
    Runtime runtime = threads_of(api, context);
    if (run_attend(&a, &runtime.base)) return failure(api, "no memory for attention");
    return runtime.failed;
}

/* The callbacks of an operator. */

static const char *name(const Operator *self) { return self->called; }
static const char *provider(const Operator *self) { return (void)self, NULL; }
static size_t input_count(const Operator *self) { return self->inputs_given; }
static size_t one(const Operator *self) { return (void)self, 1; }
static int input_type(const Operator *self, size_t i) { return self->inputs[i < self->inputs_given ? i : self->inputs_given - 1]; }
static int output_type(const Operator *self, size_t i) { return (void)self, (void)i, FLOAT; }
static int input_kind(const Operator *self, size_t i) {
    if (self->variadic < 0) return i == 0 ? REQUIRED : OPTIONAL;
    if (self->variadic && i + 1 == self->inputs_given) return VARIADIC;
    return self->variadic && i == 1 ? OPTIONAL : REQUIRED;
}
static int output_kind(const Operator *self, size_t i) { return (void)self, (void)i, REQUIRED; }
static int memory_kind(const Operator *self, size_t i) { return (void)self, (void)i, 0; }
static int at_least_one(const Operator *self) { return (void)self, 1; }
static Status *create(const Operator *self, Api api, const KernelInfo *info, void **out) { return self->make(api, info, out); }
static int first_version(const Operator *self) { return (void)self, 1; }
static int last_version(const Operator *self) { return (void)self, 0x7fffffff; }

#define OPERATOR(title, types, many, maker, runner)                                                              \
    {.version = API_VERSION, .name = name, .provider = provider, .input_type = input_type,                       \
     .input_count = input_count, .output_type = output_type, .output_count = one, .destroy = free,               \
     .input_kind = input_kind, .output_kind = output_kind, .input_memory = memory_kind,                          \
     .least_inputs = at_least_one, .same_inputs = at_least_one, .least_outputs = at_least_one,                   \
     .same_outputs = at_least_one, .create_checked = create, .compute_checked = runner,                          \
     .first_version = first_version, .last_version = last_version, .called = title, .inputs = types,             \
     .inputs_given = sizeof types / sizeof *types, .variadic = many, .make = maker}

static const int MATMUL_INPUTS[] = {FLOAT, FLOAT, UINT8}, ROWS_INPUTS[] = {INT64, UINT8}, NORM_INPUTS[] = {FLOAT, FLOAT};
static const int ATTENTION_INPUTS[] = {FLOAT, FLOAT, FLOAT, FLOAT16, FLOAT16, INT32};
static const int FAMILY_ATTENTION_INPUTS[] = {FLOAT, FLOAT, FLOAT, FLOAT16, FLOAT16, INT32, FLOAT};
static const Operator OPERATORS[] = {
    OPERATOR("StoredMatMul", MATMUL_INPUTS, 1, make_matmul, run_matmul),
    OPERATOR("StoredRows", ROWS_INPUTS, 0, make_rows, run_rows),
    OPERATOR("StoredNorm", NORM_INPUTS, 0, make_norm, run_norm),
    OPERATOR("HalfAttention", ATTENTION_INPUTS, 0, make_attention, run_attention),
    OPERATOR("FamilyAttention", FAMILY_ATTENTION_INPUTS, -1, make_family_attention, run_attention),
    OPERATOR("PlainMatMul", PLAIN_INPUTS, -1, make_plain, run_plain),
    OPERATOR("PlainRows", PLAIN_ROWS_INPUTS, 0, make_plain, run_plain_rows),
    OPERATOR("Experts", EXPERTS_INPUTS, -1, make_experts, run_experts),
    OPERATOR("SplitHeads", HEADS_INPUTS, -1, make_heads, run_split_heads),
    OPERATOR("DeltaNet", DELTA_INPUTS, 0, make_delta, run_delta),
    OPERATOR("HeadsMatMul", HEADS_MATMUL_INPUTS, 0, make_heads_matmul, run_heads_matmul),
    OPERATOR("JoinLatent", LATENT_INPUTS, 0, make_join_latent, run_join_latent),
    OPERATOR("GateHeads", GATES_INPUTS, 0, make_heads, run_gate_heads),
};

/* Called by the runtime when a session registers this library. */
__attribute__((visibility("default"))) Status *RegisterCustomOps(SessionOptions *options, const ApiBase *base) {
    Api api = base->get_api(API_VERSION);
    Domain *domain;
    if (!api) return NULL;
    TRY(new_domain(api, "keystroke", &domain));
    for (size_t i = 0; i < sizeof OPERATORS / sizeof *OPERATORS; i++) TRY(add_operator(api, domain, OPERATORS + i));
    return add_domain(api, options, domain);
}
