/* Latent attention, before and after the attention itself: products with one matrix per head, and the single key-value
 * head that all heads share. Rows are computed separately.
 */
#pragma once
#include "experts.h"

typedef struct {
    size_t rows, heads, width, height, given, skipped, strips, run; /* `given`: numbers of a head, `skipped` ahead of its row */
    const float *x;
    Table table; /* [heads * height][width] */
    float *gathered, *out; /* [heads][rows][width]; [rows][heads][height] */
    RoundedRows in;
} HeadProducts;

static void gather_head(void *data, size_t index) {
    const HeadProducts *p = data;
    const float *from = p->x + (index % p->rows * p->heads + index / p->rows) * p->given + p->skipped;
    memcpy(p->gathered + index * p->width, from, p->width * sizeof *from);
}

/* Some strips of one head's matrix with all rows. */
static void multiply_head(void *data, size_t task) {
    const HeadProducts *p = data;
    size_t tasks = (p->strips + p->run - 1) / p->run, head = task / tasks, strip = task % tasks * p->run;
    float total[MOST_ROWS][LANES] __attribute__((aligned(64)));
    size_t from = head * p->rows, to = from + p->rows;
    for (size_t last = strip + p->run < p->strips ? strip + p->run : p->strips; strip < last; strip++) {
        size_t first = strip_from(p->height, strip);
        for (size_t row = from, end; row < to; row = end) {
            end = rows_at_once(&p->in, row, to);
            multiply_table(&p->table, head * p->height + first, &p->in, row, end, total);
            for (size_t i = row; i < end; i++)
                memcpy(p->out + ((i - from) * p->heads + head) * p->height + first, total[i - row], sizeof *total);
        }
    }
}

typedef struct {
    size_t heads, rank, unrotated, rotated;
    int interleaved; /* neighbours are rotated together; attention.h rotates a half with the other */
    float epsilon;
    const float *queries, *absorbed, *mixed, *norm; /* [rows][heads][unrotated + rotated], [heads][rank], [rank + rotated] */
    float *out; /* [rows][heads + 2][rotated + rank]: queries, key, value */
} LatentHeads;

INLINE void put_apart(const LatentHeads *l, const float *from, float *out) {
    size_t half = l->rotated / 2;
    for (size_t i = 0; i < half; i++) {
        out[i] = from[l->interleaved ? 2 * i : i];
        out[half + i] = from[l->interleaved ? 2 * i + 1 : half + i];
    }
}

static void join_latent(void *data, size_t row) {
    const LatentHeads *l = data;
    size_t width = l->rank + l->rotated, given = l->unrotated + l->rotated;
    float *out = l->out + row * (l->heads + 2) * width;
    for (size_t h = 0; h < l->heads; h++, out += width) {
        put_apart(l, l->queries + (row * l->heads + h) * given + l->unrotated, out);
        memcpy(out + l->rotated, l->absorbed + (row * l->heads + h) * l->rank, l->rank * sizeof *out);
    }
    const float *latent = l->mixed + row * width;
    float scale = norm_scale(latent, l->rank, l->epsilon), *value = out + width;
    put_apart(l, latent + l->rank, out);
    memset(value, 0, l->rotated * sizeof *value);
    for (size_t i = 0; i < l->rank; i++) out[l->rotated + i] = value[l->rotated + i] = latent[i] * scale * l->norm[i];
}
