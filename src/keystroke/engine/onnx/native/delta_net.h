/* Gated delta net: a short convolution over queries, keys and values, then a state for every value head that decays and
 * is corrected by each row.
 *
 * Rows are processed one after the other in the order of the recurrence, so that a row's result does not depend on how
 * rows are grouped into runs. A task is a part of a head's columns, which are independent: its state stays in the
 * cache for all rows of a run.
 *
 * The state cannot be cut back. So that rows can be taken back, a run may copy it after some of its rows (`mark`) and
 * write down the inputs of the others; a later run restores the copy and repeats the rows that were accepted.
 */
#pragma once
#include "heads.h"
#include <stdlib.h>

typedef struct {
    size_t rows, key_heads, value_heads, key_size, value_size, kernel, channels;
    int tiled; /* value head v reads key head v % key_heads, not v / (value_heads / key_heads) */
    float epsilon;
    const float *mixed; /* [rows][channels + values + 2 * value_heads]: q, k, v, then the gate z, b and a */
    const float *convolution, *decay, *step_bias, *norm; /* [channels][kernel], [value_heads] twice, [value_size] */
    float *state, *copy; /* [kernel - 1][channels] inputs, oldest first, then [value_heads][key_size][value_size] */
    float *log;          /* [..][channels + 2 * value_heads] */
    size_t repeated, log_at;
    long mark; /* rows of this run after which the state is copied; negative: it is not */
    float *out; /* [rows][values] */
    /* intermediate results, for repeated rows and then those of this run */
    size_t all;
    const float **inputs, **steps; /* [kernel - 1 + all] rows of channels, [all] rows of b and a */
    float *mixed_in; /* [all][channels]: after the convolution, queries and keys normalised */
    float *factors;  /* [all][2 * value_heads]: how much the state keeps, and takes */
} DeltaNet;

INLINE size_t delta_values(const DeltaNet *d) { return d->value_heads * d->value_size; }
INLINE size_t delta_logged(const DeltaNet *d) { return d->channels + 2 * d->value_heads; }
INLINE float *delta_states(const DeltaNet *d, float *state) { return state + (d->kernel - 1) * d->channels; }

INLINE void normalise_key(float *x, size_t width, float scale) {
    floats total = same(0);
    size_t i = 0;
    for (; i + LANES <= width; i += LANES) total = times_plus(floats_at(x + i), floats_at(x + i), total);
    float squares = sum(total);
    for (; i < width; i++) squares = fmaf(x[i], x[i], squares);
    scale /= sqrtf(squares + 1e-6f);
    for (i = 0; i < width; i++) x[i] *= scale;
}

/* The convolution of one row, its normalised queries and keys, and its factors. */
static void delta_row(void *data, size_t row) {
    const DeltaNet *d = data;
    float *out = d->mixed_in + row * d->channels;
    const float *const *inputs = d->inputs + row; /* the oldest that this row sees */
    for (size_t c = 0; c < d->channels; c++) {
        float total = 0;
        for (size_t k = 0; k < d->kernel; k++) total = fmaf(inputs[k][c], d->convolution[c * d->kernel + k], total);
        out[c] = total;
    }
    size_t c = 0;
    for (; c + LANES <= d->channels; c += LANES) {
        floats x = floats_at(out + c);
        put_floats(out + c, over(x, add(same(1), exponential(minus(same(0), x)))));
    }
    for (; c < d->channels; c++) out[c] *= sigmoid_of(out[c]);
    for (size_t h = 0; h < d->key_heads; h++) {
        normalise_key(out + h * d->key_size, d->key_size, 1.0f / sqrtf((float)d->key_size));
        normalise_key(out + (d->key_heads + h) * d->key_size, d->key_size, 1.0f);
    }
    const float *b = d->steps[row], *a = b + d->value_heads;
    for (size_t h = 0; h < d->value_heads; h++) {
        float x = a[h] + d->step_bias[h], soft = x > 20 ? x : log1pf(expf(x));
        d->factors[row * 2 * d->value_heads + h] = expf(d->decay[h] * soft);
        d->factors[(row * 2 + 1) * d->value_heads + h] = sigmoid_of(b[h]);
    }
}

enum { DELTA_COLUMNS = 4 }; /* vectors of columns that one task has */

/* All rows for `vectors` vectors of a head's columns from `column` on. */
INLINE void delta_columns(const DeltaNet *d, size_t head, size_t column, const int vectors) {
    size_t ratio = d->value_heads / d->key_heads, key_head = d->tiled ? head % d->key_heads : head / ratio;
    size_t keys = d->key_heads * d->key_size, place = (head * d->key_size) * d->value_size + column;
    float *state = delta_states(d, d->state) + place;
    for (size_t row = 0; row < d->all; row++) {
        if (d->mark >= 0 && row == d->repeated + (size_t)d->mark) {
            float *copy = delta_states(d, d->copy) + place;
            for (size_t i = 0; i < d->key_size; i++)
                memcpy(copy + i * d->value_size, state + i * d->value_size, (size_t)vectors * LANES * sizeof *copy);
        }
        const float *mixed = d->mixed_in + row * d->channels, *query = mixed + key_head * d->key_size;
        const float *key = query + keys, *value = mixed + 2 * keys + head * d->value_size + column;
        floats keep = same(d->factors[row * 2 * d->value_heads + head]);
        floats take = same(d->factors[(row * 2 + 1) * d->value_heads + head]);
        floats known[DELTA_COLUMNS], change[DELTA_COLUMNS], read[DELTA_COLUMNS];
        for (int v = 0; v < vectors; v++) known[v] = read[v] = same(0);
        for (size_t i = 0; i < d->key_size; i++) {
            floats k = same(key[i]);
            for (int v = 0; v < vectors; v++)
                known[v] = times_plus(k, times(keep, floats_at(state + i * d->value_size + v * LANES)), known[v]);
        }
        for (int v = 0; v < vectors; v++) change[v] = times(take, minus(floats_at(value + v * LANES), known[v]));
        for (size_t i = 0; i < d->key_size; i++) {
            floats k = same(key[i]), q = same(query[i]);
            float *at = state + i * d->value_size;
            for (int v = 0; v < vectors; v++) {
                floats s = times_plus(k, change[v], times(keep, floats_at(at + v * LANES)));
                put_floats(at + v * LANES, s);
                read[v] = times_plus(q, s, read[v]);
            }
        }
        if (row < d->repeated) continue;
        float *out = d->out + (row - d->repeated) * delta_values(d) + head * d->value_size + column;
        for (int v = 0; v < vectors; v++) put_floats(out + v * LANES, read[v]);
    }
}

INLINE size_t delta_parts(const DeltaNet *d) { return (d->value_size + DELTA_COLUMNS * LANES - 1) / (DELTA_COLUMNS * LANES); }

static void delta_task(void *data, size_t task) {
    const DeltaNet *d = data;
    size_t parts = delta_parts(d), head = task / parts, column = task % parts * DELTA_COLUMNS * LANES;
    if (column + DELTA_COLUMNS * LANES <= d->value_size) {
        delta_columns(d, head, column, DELTA_COLUMNS);
        return;
    }
    for (; column < d->value_size; column += LANES) delta_columns(d, head, column, 1);
}

/* Normalises the result of a row's heads and multiplies it with its gates. */
static void delta_gate(void *data, size_t row) {
    const DeltaNet *d = data;
    const float *gate = d->mixed + row * (d->channels + delta_values(d) + 2 * d->value_heads) + d->channels;
    float *out = d->out + row * delta_values(d);
    for (size_t h = 0; h < d->value_heads; h++, out += d->value_size, gate += d->value_size) {
        floats scale = same(norm_scale(out, d->value_size, d->epsilon));
        for (size_t i = 0; i < d->value_size; i += LANES) {
            floats z = floats_at(gate + i), open = over(z, add(same(1), exponential(minus(same(0), z))));
            floats x = times(times(floats_at(out + i), scale), floats_at(d->norm + i));
            put_floats(out + i, times(x, open));
        }
    }
}

/* Where the inputs of each row lie: the log's and this run's, after those that the state remembers. */
static void delta_inputs(DeltaNet *d) {
    size_t before = d->kernel - 1, stride = d->channels + delta_values(d) + 2 * d->value_heads;
    for (size_t i = 0; i < before; i++) d->inputs[i] = d->state + i * d->channels;
    for (size_t i = 0; i < d->repeated; i++) {
        d->inputs[before + i] = d->log + i * delta_logged(d);
        d->steps[i] = d->inputs[before + i] + d->channels;
    }
    for (size_t i = 0; i < d->rows; i++) {
        d->inputs[before + d->repeated + i] = d->mixed + i * stride;
        d->steps[d->repeated + i] = d->mixed + i * stride + stride - 2 * d->value_heads;
    }
}

/* Remembers the last inputs before row `row`, and writes down those that may be repeated. */
static void remember_inputs(const DeltaNet *d, size_t row, float *state) {
    float *fresh = malloc((d->kernel - 1) * d->channels * sizeof *fresh);
    if (!fresh) abort(); /* a few kilobytes */
    for (size_t i = 0; i + 1 < d->kernel; i++)
        memcpy(fresh + i * d->channels, d->inputs[row + i], d->channels * sizeof *fresh);
    memcpy(state, fresh, (d->kernel - 1) * d->channels * sizeof *fresh);
    free(fresh);
}

static void log_inputs(const DeltaNet *d, size_t from, size_t at) {
    for (size_t row = from; row < d->all; row++, at++) {
        float *to = d->log + at * delta_logged(d);
        memcpy(to, d->inputs[d->kernel - 1 + row], d->channels * sizeof *to);
        memcpy(to + d->channels, d->steps[row], 2 * d->value_heads * sizeof *to);
    }
}
