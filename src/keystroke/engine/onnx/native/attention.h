/* Attention with keys and values in half precision.
 *
 * The result of a row depends only on that row and the keys and values before it. Keys are processed in chunks of
 * CHUNK at fixed positions, chunks in spans of SPAN; each span has its own maximum and sum, and spans are merged in
 * order. So the number of rows and threads never changes the bits of a result.
 *
 * Keys are stored in blocks of KEY_BLOCK tokens, each block transposed: one dimension of all its keys is contiguous,
 * so that the scores of several keys are computed without rearranging anything. Values are stored token by token.
 */
#pragma once
#include "threads.h"
#include "vector.h"
#include <stdlib.h>

enum {
    CHUNK = 4 * LANES, /* keys at once */
    KEY_BLOCK = 64,    /* keys stored together; a multiple of CHUNK that divides SPAN */
    SPAN = 1024,       /* keys that one thread goes through */
    MOST_QUERIES = 64, /* queries that share a chunk while it is unpacked */
    MOST_WIDTH = 576,  /* of a head; a multiple of LANES */
};

typedef struct {
    size_t rows, heads, kv_heads, width, capacity, first; /* `first`: the position of the first row */
    size_t window; /* how many keys back, its own included, a row sees; 0: all */
    const float *mixed; /* [rows][(heads + 2 * kv_heads) * width]: queries, keys, values */
    const float *cosines, *sines; /* [positions][rotary / 2] */
    size_t rotary;                /* dimensions of a head that are rotated; 0: all */
    const float *sinks;           /* [heads]: scores without a value; or NULL */
    float growth;                 /* queries grow by this times ln(1 + position / growth_every); 0: not at all */
    size_t growth_every;
    uint16_t *keys, *values; /* [kv_heads][capacity / KEY_BLOCK][width][KEY_BLOCK], [kv_heads][capacity][width] */
    float *out; /* [rows][heads * width] */
    float scale;
    /* intermediate results */
    size_t padded, group, tile_rows, tiles, spans; /* `padded`: the width in whole vectors */
    float *queries; /* [kv_heads][rows][group][padded], rotated and scaled */
    float *parts; /* [rows][heads][spans][padded + 2]: weighted values, then maximum and sum */
} Attention;

INLINE size_t part_size(const Attention *a) { return a->padded + 2; }

INLINE void rotated(const Attention *a, const float *head, size_t position, float scale, float *out) {
    size_t turned = a->rotary ? a->rotary : a->width, half = turned / 2;
    const float *cosine = a->cosines + position * half, *sine = a->sines + position * half;
    for (size_t i = 0; i < half; i++) {
        float x = head[i], y = head[half + i];
        out[i] = (x * cosine[i] - y * sine[i]) * scale;
        out[half + i] = (y * cosine[i] + x * sine[i]) * scale;
    }
    for (size_t i = turned; i < a->width; i++) out[i] = head[i] * scale;
}

/* The first dimension of the key at `position`; the next ones follow KEY_BLOCK apart. */
INLINE uint16_t *keys_at(const Attention *a, size_t kv_head, size_t position) {
    return a->keys + (kv_head * a->capacity + position / KEY_BLOCK * KEY_BLOCK) * a->width + position % KEY_BLOCK;
}

/* Rotates the queries of one row, and appends its key and value. */
static void take_in(void *data, size_t row) {
    Attention *a = data;
    const float *head = a->mixed + row * (a->heads + 2 * a->kv_heads) * a->width;
    size_t position = a->first + row;
    float key[MOST_WIDTH] = {0}, scale = a->scale;
    if (a->growth > 0) scale *= 1 + a->growth * logf(1 + (float)(position / a->growth_every));
    for (size_t h = 0; h < a->heads; h++, head += a->width) {
        float *out = a->queries + ((h / a->group * a->rows + row) * a->group + h % a->group) * a->padded;
        memset(out, 0, a->padded * sizeof *out);
        rotated(a, head, position, scale, out);
    }
    for (size_t h = 0; h < 2 * a->kv_heads; h++, head += a->width) {
        if (h < a->kv_heads) {
            uint16_t *column = keys_at(a, h, position);
            rotated(a, head, position, 1.0f, key);
            for (size_t i = 0; i < a->width; i++) column[i * KEY_BLOCK] = half_of(key[i]);
        } else {
            uint16_t *row = a->values + ((h - a->kv_heads) * a->capacity + position) * a->width;
            for (size_t i = 0; i < a->width; i++) row[i] = half_of(head[i]);
        }
    }
}

/* LANES half-precision values of a row from `d` on, padded with zeros. */
INLINE floats kept_at(const uint16_t *row, size_t d, size_t width) {
    if (d + LANES <= width) return halves_at(row + d);
    uint16_t rest[LANES] = {0};
    memcpy(rest, row + d, (width - d) * sizeof *rest);
    return halves_at(rest);
}

/* A chunk of keys and values: as stored, and widened while they are first read, for more queries. */
typedef struct {
    const uint16_t *keys, *values; /* `keys`: dimensions KEY_BLOCK apart; `values`: tokens `width` apart */
    float *wide_keys, *wide_values; /* [width][CHUNK], [CHUNK][padded] */
    size_t count, width, padded;
} Chunk;

enum { NARROW, WIDENING, WIDE }; /* reads what is stored; also writes it widened; reads that */

enum {
    SCORED = REGISTERS / 8, /* queries whose scores stay in registers; at most 4 */
    MOST_NARROW = LANES == 4 ? SCORED : 16, /* queries for which keys and values are not widened once for all */
};

INLINE void score(const Chunk *chunk, const float *query, const int mode, const int count, float (*scores)[CHUNK]) {
    floats total[SCORED][4];
    for (int q = 0; q < count; q++) {
        for (int i = 0; i < 4; i++) total[q][i] = same(0);
    }
    for (size_t d = 0; d < chunk->width; d++) {
        floats key[4];
        if (mode != WIDE) __builtin_prefetch(chunk->keys + (chunk->width + d) * KEY_BLOCK, 0, FETCHED); /* the next block's */
        for (int i = 0; i < 4; i++) {
            float *widened = chunk->wide_keys + d * CHUNK + (size_t)i * LANES;
            key[i] = mode == WIDE ? floats_at(widened) : halves_at(chunk->keys + d * KEY_BLOCK + (size_t)i * LANES);
            if (mode == WIDENING) put_floats(widened, key[i]);
        }
        for (int q = 0; q < count; q++) {
            floats number = same(query[(size_t)q * chunk->padded + d]);
            for (int i = 0; i < 4; i++) total[q][i] = times_plus(number, key[i], total[q][i]);
        }
    }
    for (int q = 0; q < count; q++) {
        for (int i = 0; i < 4; i++) put_floats(scores[q] + i * LANES, total[q][i]);
    }
}

/* out[count] [padded] += weights [count][CHUNK] . values, `vectors` vectors of the width at a time. */
INLINE void weigh(const Chunk *chunk, const float (*weights)[CHUNK], const int mode, const int count,
                  const int vectors, size_t d, float *const *out) {
    floats total[SCORED][4];
    for (int q = 0; q < count; q++) {
        for (int i = 0; i < vectors; i++) total[q][i] = floats_at(out[q] + d + (size_t)i * LANES);
    }
    for (size_t k = 0; k < chunk->count; k++) {
        floats value[4];
        if (mode != WIDE) __builtin_prefetch(chunk->values + (k + 2 * CHUNK) * chunk->width + d, 0, FETCHED);
        for (int i = 0; i < vectors; i++) {
            size_t at = d + (size_t)i * LANES;
            float *widened = chunk->wide_values + k * chunk->padded + at;
            value[i] = mode == WIDE ? floats_at(widened)
                     : vectors == 4 ? halves_at(chunk->values + k * chunk->width + at)
                                    : kept_at(chunk->values + k * chunk->width, at, chunk->width);
            if (mode == WIDENING) put_floats(widened, value[i]);
        }
        for (int q = 0; q < count; q++) {
            floats weight = same(weights[q][k]);
            for (int i = 0; i < vectors; i++) total[q][i] = times_plus(weight, value[i], total[q][i]);
        }
    }
    for (int q = 0; q < count; q++) {
        for (int i = 0; i < vectors; i++) put_floats(out[q] + d + (size_t)i * LANES, total[q][i]);
    }
}

INLINE void weigh_all(const Chunk *chunk, const float (*weights)[CHUNK], const int mode, const int count, float *const *out) {
    size_t d = 0;
    for (; d + 4 * LANES <= chunk->width; d += 4 * LANES) weigh(chunk, weights, mode, count, 4, d, out);
    for (; d < chunk->padded; d += LANES) weigh(chunk, weights, mode, count, 1, d, out);
}

/* Calls `work` with a constant number of queries, at most SCORED, until all are done: they share their loads. */
#define BY_QUERIES_IN(mode, count, work)                                      \
    for (; q + SCORED <= (count); q += SCORED) work(mode, SCORED);            \
    if (SCORED > 3 && (count) - q == 3) work(mode, 3);                        \
    else if (SCORED > 2 && (count) - q == 2) work(mode, 2);                   \
    else if ((count) - q == 1) work(mode, 1);
#define BY_QUERIES(count, work)               \
    size_t q = 0;                             \
    if ((count) > MOST_NARROW) {              \
        work(WIDENING, SCORED);               \
        q = SCORED;                           \
        BY_QUERIES_IN(WIDE, count, work)      \
    } else {                                  \
        BY_QUERIES_IN(NARROW, count, work)    \
    }

INLINE void score_queries(const Chunk *chunk, const float *queries, size_t count, float (*scores)[CHUNK]) {
#define SCORE(mode, some) score(chunk, queries + q * chunk->padded, mode, some, scores + q)
    BY_QUERIES(count, SCORE)
}

INLINE void weigh_queries(const Chunk *chunk, const float (*weights)[CHUNK], size_t count, float *const *out) {
#define WEIGH(mode, some) weigh_all(chunk, weights + q, mode, some, out + q)
    BY_QUERIES(count, WEIGH)
}

/* Processes one span for the queries of some rows and one key-value head. Compiled as a part of its own (attention.c), beside
 * the rest. */
void attend(void *data, size_t task);

#ifdef ATTENDING
/* Turns the scores of a chunk into weights, relative to the largest score of the span so far, and adds to the sums. A
 * function of its own, so that constants stay in registers. */
static __attribute__((noinline)) void soften(float (*scores)[CHUNK], size_t count, float *const *parts, size_t padded) {
    for (size_t q = 0; q < count; q++) {
        float *part = parts[q];
        floats most = floats_at(scores[q]);
        for (int i = 1; i < 4; i++) most = greater(most, floats_at(scores[q] + i * LANES));
        float maximum = greatest(most), before = part[padded];
        if (before > maximum) maximum = before;
        floats total = same(0);
        for (int i = 0; i < 4; i++) {
            floats weight = exponential(minus(floats_at(scores[q] + i * LANES), same(maximum)));
            put_floats(scores[q] + i * LANES, weight);
            total = add(total, weight);
        }
        float shrink = 0;
        if (before > -INFINITY && before < maximum) {
            float lanes[LANES];
            put_floats(lanes, exponential(same(before - maximum)));
            shrink = lanes[0];
        } else if (before == maximum) shrink = 1;
        if (shrink != 1) {
            for (size_t d = 0; d < padded; d += LANES) put_floats(part + d, times(floats_at(part + d), same(shrink)));
        }
        part[padded] = maximum;
        part[padded + 1] = part[padded + 1] * shrink + sum(total);
    }
}

void attend(void *data, size_t task) {
    const Attention *a = data;
    size_t span = task % a->spans, tile = task / a->spans % a->tiles, kv_head = task / a->spans / a->tiles;
    size_t row = tile * a->tile_rows, rows = a->rows - row < a->tile_rows ? a->rows - row : a->tile_rows;
    size_t count = rows * a->group, last = a->first + row + rows - 1, from = span * SPAN;
    if (from > last) return;
    size_t end = last + 1 < from + SPAN ? last + 1 : from + SPAN;
    static _Thread_local float keys[MOST_WIDTH * CHUNK] __attribute__((aligned(64)));
    static _Thread_local float values[CHUNK * MOST_WIDTH] __attribute__((aligned(64)));
    float scores[MOST_QUERIES][CHUNK] __attribute__((aligned(64)));
    const float *queries = a->queries + (kv_head * a->rows + row) * a->group * a->padded;
    float *parts[MOST_QUERIES]; /* of all queries; the heads of a group are adjacent */
    for (size_t q = 0; q < count; q++) {
        size_t head = (row + q / a->group) * a->heads + kv_head * a->group + q % a->group;
        parts[q] = a->parts + (head * a->spans + span) * part_size(a);
        memset(parts[q], 0, a->padded * sizeof(float));
        parts[q][a->padded] = -INFINITY, parts[q][a->padded + 1] = 0;
    }
    for (size_t at = from; at < end; at += CHUNK) {
        size_t present = end - at < CHUNK ? end - at : CHUNK;
        int unseen = a->window && at + present + a->window <= a->first + row + 1; /* by the first row, so by all */
        if (unseen) continue;
        Chunk chunk = {keys_at(a, kv_head, at), a->values + (kv_head * a->capacity + at) * a->width, keys, values,
                       present, a->width, a->padded};
        score_queries(&chunk, queries, count, scores);
        for (size_t q = 0; q < count; q += a->group) { /* of one row */
            size_t end_of_row = a->first + row + q / a->group + 1, seen = end_of_row > at ? end_of_row - at : 0;
            size_t past = a->window && end_of_row > at + a->window ? end_of_row - at - a->window : 0;
            if (past >= CHUNK) seen = 0;
            for (size_t i = q; i < q + a->group && (past || seen < CHUNK); i++) {
                for (size_t k = 0; k < past && k < CHUNK; k++) scores[i][k] = -INFINITY;
                for (size_t k = seen; k < CHUNK; k++) scores[i][k] = -INFINITY;
            }
            if (seen) soften(scores + q, a->group, parts + q, a->padded);
            else memset(scores + q, 0, a->group * sizeof *scores);
        }
        weigh_queries(&chunk, (const float(*)[CHUNK])scores, count, parts);
    }
}
#endif

/* Merges the spans of one row in order. */
static void merge(void *data, size_t row) {
    const Attention *a = data;
    size_t spans = (a->first + row) / SPAN + 1;
    for (size_t h = 0; h < a->heads; h++) {
        const float *parts = a->parts + (row * a->heads + h) * a->spans * part_size(a);
        float *out = a->out + (row * a->heads + h) * a->width;
        float total[MOST_WIDTH] = {0}, maximum = -INFINITY, weight = 0;
        for (size_t s = 0; s < spans; s++) {
            float most = parts[s * part_size(a) + a->padded];
            if (most > maximum) maximum = most;
        }
        if (a->sinks && a->sinks[h] > maximum) maximum = a->sinks[h];
        if (a->sinks) {
            float lanes[LANES];
            put_floats(lanes, exponential(same(a->sinks[h] - maximum)));
            weight = lanes[0];
        }
        for (size_t s = 0; s < spans; s++) {
            const float *part = parts + s * part_size(a);
            float lanes[LANES], shrink = 1;
            if (part[a->padded] < maximum) {
                put_floats(lanes, exponential(same(part[a->padded] - maximum)));
                shrink = lanes[0];
            }
            weight += part[a->padded + 1] * shrink;
            for (size_t d = 0; d < a->padded; d += LANES)
                put_floats(total + d, times_plus(floats_at(part + d), same(shrink), floats_at(total + d)));
        }
        for (size_t d = 0; d < a->width; d++) out[d] = total[d] / weight;
    }
}

/* Appends the keys and values of all rows and computes their results. Returns 0, or 1 without memory. */
static int run_attend(Attention *a, Threads *threads) {
    a->group = a->heads / a->kv_heads;
    a->padded = (a->width + LANES - 1) / LANES * LANES;
    a->tile_rows = MOST_QUERIES / a->group;
    a->tiles = (a->rows + a->tile_rows - 1) / a->tile_rows;
    a->spans = (a->first + a->rows - 1) / SPAN + 1;
    size_t queries = a->rows * a->heads * a->padded;
    a->queries = malloc((queries + a->rows * a->heads * a->spans * part_size(a)) * sizeof(float));
    if (!a->queries) return 1;
    a->parts = a->queries + queries;
    for_each_row(threads, take_in, a->rows, a);
    for_tasks(threads, attend, a->kv_heads * a->tiles * a->spans, a);
    for_each_row(threads, merge, a->rows, a);
    free(a->queries);
    return 0;
}
