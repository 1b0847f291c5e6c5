/* The self-check of a compiled library: every format and attention once, compared with plain arithmetic.
 *
 * Runs in another process right after compiling. If it crashes because of an unsupported instruction, or computes
 * wrong results, the library is deleted.
 */
#pragma once
#include "attention.h"
#include "product.h"

enum { CHECKED_ROWS = 9, CHECKED_WIDTH = 2 * UNIT, CHECKED_BYTES = LANES * CHECKED_WIDTH * 2 };

static int near(float a, double b) { return fabs((double)a - b) <= 1e-3 * (1 + fabs(b)); }

/* Pseudo-random bytes, with small half-precision scales in each stored block. */
static void fill(const Format *format, uint8_t *bytes) {
    size_t size = row_bytes(format, CHECKED_WIDTH) * LANES, each = (size_t)format->bytes;
    for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)((i * 2654435761u) >> 13);
    for (size_t at = 0; at < size; at += each) {
        size_t scale = format->halves == 2 ? at + each - 2 : at;
        bytes[scale] = 0x11, bytes[scale + 1] = 0x20;
        if (format->type == 39) bytes[at] = 120; /* an exponent alone */
        if (format->type == 10) bytes[at + 80] = 0x11, bytes[at + 81] = 0x20, bytes[at + 82] = 0x21, bytes[at + 83] = 0x1c;
        else if (format->has_minimum) bytes[at + 2] = 0x21, bytes[at + 3] = 0x1c;
    }
}

static int product_is_right(const Format *format, const Activations *a, uint8_t *bytes) {
    static float total[CHECKED_ROWS][LANES] __attribute__((aligned(64)));
    static double expected[CHECKED_ROWS][LANES];
    static Tile tile;
    Rows rows = {bytes, row_bytes(format, CHECKED_WIDTH)};
    fill(format, bytes);
    multiply(format, rows, a, 0, CHECKED_ROWS, total);
    memset(expected, 0, sizeof expected);
    for (size_t unit = 0; unit * UNIT < CHECKED_WIDTH; unit++) {
        format->unpack(rows, unit, BLOCKS, &tile);
        for (size_t i = 0; i < UNIT; i++) {
            for (size_t lane = 0; lane < LANES; lane++) {
                double weight = tile.codes[i / 4][4 * lane + i % 4] - (format->zero < 0 ? 0 : 1 << format->zero);
                weight = weight * (double)scale_at(format, &tile, i, lane) + (double)minimum_at(format, &tile, i, lane);
                for (size_t r = 0; r < CHECKED_ROWS; r++) {
                    size_t at = unit * UNIT + i;
                    double x = a->codes[r * a->width + at] * (double)a->scales[r * a->blocks + at / BLOCK];
                    expected[r][lane] += weight * x;
                }
            }
        }
    }
    for (size_t r = 0; r < CHECKED_ROWS; r++) {
        for (size_t lane = 0; lane < LANES; lane++) {
            if (!near(total[r][lane], expected[r][lane])) return 0;
        }
    }
    return 1;
}

/* Packed weights must give the bits of stored ones, for any number of rows. */
static int packing_is_right(const Format *format, const Activations *a, uint8_t *bytes) {
#if PACKS
    static float expected[CHECKED_ROWS][LANES], total[CHECKED_ROWS][LANES];
    static uint8_t packed[CHECKED_BYTES];
    const Format *other = packed_format(format, LANES, CHECKED_WIDTH);
    Rows rows = {bytes, row_bytes(format, CHECKED_WIDTH)};
    if (!other) return 1;
    fill(format, bytes);
    pack_rows(format, rows, CHECKED_WIDTH, packed);
    multiply(format, rows, a, 0, CHECKED_ROWS, expected);
    for (size_t count = 1; count <= CHECKED_ROWS; count++) {
        multiply(other, (Rows){packed, row_bytes(other, CHECKED_WIDTH)}, a, 0, count, total);
        if (memcmp(total, expected, count * sizeof *total)) return 0;
    }
#else
    (void)format, (void)a, (void)bytes;
#endif
    return 1;
}

/* Attention over a single value must return it. */
static int attention_is_right(void) {
    enum { WIDTH = 64, CAPACITY = KEY_BLOCK };
    static float mixed[CHECKED_ROWS][3 * WIDTH], out[CHECKED_ROWS][WIDTH], queries[CHECKED_ROWS * WIDTH];
    static float parts[CHECKED_ROWS * (WIDTH + 2)], cosines[CAPACITY * WIDTH / 2], sines[CAPACITY * WIDTH / 2];
    static uint16_t keys[CAPACITY * WIDTH], values[CAPACITY * WIDTH];
    Attention a = {.rows = 4, .heads = 1, .kv_heads = 1, .width = WIDTH, .capacity = CAPACITY, .scale = 0.125f};
    a.mixed = mixed[0], a.cosines = cosines, a.sines = sines, a.keys = keys, a.values = values, a.out = out[0];
    a.padded = WIDTH, a.group = 1, a.tile_rows = 4, a.tiles = 1, a.spans = 1, a.queries = queries, a.parts = parts;
    for (size_t i = 0; i < CAPACITY * WIDTH / 2; i++) cosines[i] = 0.6f, sines[i] = 0.8f;
    for (size_t r = 0; r < a.rows; r++) {
        for (size_t i = 0; i < 2 * WIDTH; i++) mixed[r][i] = (float)((r * 31 + i * 7) % 19) - 9;
        for (size_t i = 2 * WIDTH; i < 3 * WIDTH; i++) mixed[r][i] = 1.5f;
        take_in(&a, r);
    }
    attend(&a, 0);
    for (size_t r = 0; r < a.rows; r++) {
        merge(&a, r);
        for (size_t i = 0; i < WIDTH; i++) {
            if (!near(out[r][i], 1.5)) return 0;
        }
    }
    return 1;
}

/* Returns 0 on success. */
__attribute__((visibility("default"))) int self_check(void) {
    static float x[CHECKED_ROWS][CHECKED_WIDTH];
    uint8_t *bytes = malloc(CHECKED_BYTES + 64);
    void *memory = malloc(activations_bytes(CHECKED_ROWS, CHECKED_WIDTH));
    int wrong = !bytes || !memory;
    if (!wrong) {
        for (size_t r = 0; r < CHECKED_ROWS; r++) {
            for (size_t i = 0; i < CHECKED_WIDTH; i++) x[r][i] = (float)((r * 131 + i * 29) % 63) / 16 - 2;
        }
        for (size_t i = 0; i < sizeof FORMATS / sizeof *FORMATS; i++) {
            Activations a = activations_in(memory, CHECKED_ROWS, CHECKED_WIDTH, is_large(FORMATS + i));
            for (size_t r = 0; r < CHECKED_ROWS; r++) round_row(x[r], r, &a);
            wrong |= !product_is_right(FORMATS + i, &a, bytes) || !packing_is_right(FORMATS + i, &a, bytes);
        }
        wrong |= !attention_is_right();
    }
    free(bytes), free(memory);
    return wrong;
}
