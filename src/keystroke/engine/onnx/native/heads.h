/* Heads before and after attention: their norms, and the gates of their results. Rows are computed separately. */
#pragma once
#include "vector.h"

/* The scale of an RMS norm over `width` numbers. */
INLINE float norm_scale(const float *x, size_t width, float epsilon) {
    floats total = same(0);
    size_t i = 0;
    for (; i + LANES <= width; i += LANES) total = times_plus(floats_at(x + i), floats_at(x + i), total);
    float squares = sum(total);
    for (; i < width; i++) squares = fmaf(x[i], x[i], squares);
    return 1.0f / sqrtf(squares / (float)width + epsilon);
}

typedef struct {
    size_t heads, kv_heads, width;
    int gated; /* every query head is followed by its gate */
    float epsilon;
    const float *mixed, *query_norm, *key_norm; /* norms may be NULL */
    float *out; /* [rows][heads + 2 * kv_heads][width] */
} Heads;

/* Normalises the queries and keys of a row and leaves its gates out. */
static void split_heads(void *data, size_t row) {
    const Heads *h = data;
    size_t wide = h->gated ? 2 * h->width : h->width, keys = h->heads, values = h->heads + h->kv_heads;
    const float *from = h->mixed + row * (h->heads * wide + 2 * h->kv_heads * h->width);
    float *out = h->out + row * (h->heads + 2 * h->kv_heads) * h->width;
    for (size_t head = 0; head < h->heads + 2 * h->kv_heads; head++, out += h->width) {
        const float *norm = head < keys ? h->query_norm : head < values ? h->key_norm : NULL;
        float scale = norm ? norm_scale(from, h->width, h->epsilon) : 1;
        for (size_t i = 0; i < h->width; i++) out[i] = norm ? from[i] * scale * norm[i] : from[i];
        from += head < keys ? wide : h->width;
    }
}

typedef struct {
    size_t heads, width, stride; /* `stride` of a row of `mixed` */
    const float *x, *mixed;
    float *out;
} Gates;

INLINE float sigmoid_of(float x) {
    float lanes[LANES];
    put_floats(lanes, exponential(same(-x)));
    return 1.0f / (1.0f + lanes[0]);
}

/* x times the sigmoids of the gates that follow each query head. */
static void gate_row(void *data, size_t row) {
    const Gates *g = data;
    for (size_t head = 0; head < g->heads; head++) {
        const float *x = g->x + (row * g->heads + head) * g->width;
        const float *gate = g->mixed + row * g->stride + (2 * head + 1) * g->width;
        float *out = g->out + (row * g->heads + head) * g->width;
        size_t i = 0;
        for (; i + LANES <= g->width; i += LANES) {
            floats open = over(same(1), add(same(1), exponential(minus(same(0), floats_at(gate + i)))));
            put_floats(out + i, times(floats_at(x + i), open));
        }
        for (; i < g->width; i++) out[i] = x[i] * sigmoid_of(gate[i]);
    }
}
