/* What the files of the CPU kernels share: a product's description, BF16 numbers, threads. */
#ifndef MOEPACK_AFFINE_H
#define MOEPACK_AFFINE_H
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 16 /* rows whose words stand side by side */

/* One matrix in one version: where its parts begin in an extent. Of BF16 (`bits` 16) `low` is the matrix, row-major. */
typedef struct {
    int64_t bits, group, stored, low, high, scale, zero, bias; /* bias: -1 without one */
} Form;

/* One product. A handle is an extent's address, a multiple of 64, with the version's number in its low 6 bits. */
typedef struct {
    int64_t rows, cols, experts, slots, share; /* slot s reads activation s / share */
    int64_t x_bf16, out_bf16, tiles, threads;
    const void *x;
    const int64_t *index; /* the expert of every slot; one past the last adds nothing and leaves the output alone */
    void *out;            /* [slots, rows] */
    const uint64_t *handles;
    const Form *forms;
    const int64_t *limits; /* by version: an expert with more slots runs in tiles, or without `tiles` is left out */
} Side;

/* One expert's part of a product: `count` slots, those at `order[first]` and after. */
typedef struct {
    const uint8_t *base;
    const Form *form;
    int64_t first, count;
} Job;

/* Memory that is kept between calls and grows to what they need. */
typedef struct {
    uint8_t *at;
    size_t size;
} Arena;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline uint16_t narrow(float value) { /* to nearest, ties to even; NaN stays one */
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(word >> 16 | 0x40);
    return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

/* Room for `size` bytes, aligned to pages; returns 0, or 1 when memory is short. */
static inline int grow(Arena *arena, size_t size) {
    if (arena->size >= size) return 0;
    free(arena->at);
    arena->at = 0, arena->size = 0;
    void *at;
    if (posix_memalign(&at, 4096, size)) return 1;
    arena->at = at, arena->size = size;
    return 0;
}

/* `work` on `threads` threads at once; every call of it must be ready to find nothing left to do. */
void moepack_parallel(void (*work)(void *), void *argument, int threads);

/* The kinds of tiles (affine_tiles.c) this machine has: 0 none, 1 AVX-512 BF16, 2 AMX. */
int moepack_tiles_level(int limit);

/* Jobs of many slots, BF16 activations: weights unpacked into tiles as they are needed. Returns 0, or 1 without memory. */
int moepack_tiles_product(const Side *m, const Job *jobs, int64_t n, const int64_t *order, Arena *arena);
#endif
