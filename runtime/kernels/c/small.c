/* The work of a decoding step between products: normalisations of BF16 rows, gates of experts' activations, rotations of
 * rows of KV caches.
 *
 * Sums are float32 in LANES parts, so results differ from torch's in the last bits. runtime/dense/ compares results
 * with a module's before it uses these loops. Loops are compiled for each instruction set, and product.c chooses.
 */
#include <math.h>

#include "lanes.h"

/* How a weight is applied: after rounding to BF16, before it, or as 1 + weight in float32. */
enum { ROUNDED, WIDE, PLUS_ONE };

typedef struct {
    const uint16_t *x, *weight; /* [rows][cols], [cols] */
    uint16_t *out;
    int64_t rows, cols, form;
    float epsilon;
} Norm;

SMALL void norm(const Norm *m) {
    const uint16_t *x = m->x, *weight = m->weight;
    uint16_t *out = m->out;
    const int64_t cols = m->cols;
    for (int64_t r = 0; r < m->rows; r++, x += cols, out += cols) {
        float sums[LANES] = {0};
        int64_t c = 0;
        for (; c + LANES <= cols; c += LANES)
            for (int i = 0; i < LANES; i++) {
                float v = widen(x[c + i]);
                sums[i] += v * v;
            }
        for (; c < cols; c++) sums[c % LANES] += widen(x[c]) * widen(x[c]);
        const float sum = total(sums);
        const float by = 1.0f / sqrtf(sum / (float)cols + m->epsilon);
        if (m->form == ROUNDED)
            for (c = 0; c < cols; c++) out[c] = narrow(widen(weight[c]) * widen(narrow(widen(x[c]) * by)));
        else if (m->form == WIDE)
            for (c = 0; c < cols; c++) out[c] = narrow(widen(weight[c]) * (widen(x[c]) * by));
        else
            for (c = 0; c < cols; c++) out[c] = narrow((1.0f + widen(weight[c])) * (widen(x[c]) * by));
    }
}

SMALL void rope(const Rope *m) {
    const int64_t half = m->turned / 2, other = m->angles - half;
    uint16_t *x = m->x;
    for (int64_t r = 0; r < m->rows; r++) {
        const uint16_t *cos = m->cos + r * m->angles, *sin = m->sin + r * m->angles;
        for (int64_t h = 0; h < m->heads; h++, x += m->cols)
            for (int64_t c = 0; c < half; c++) {
                const float a = widen(x[c]), b = widen(x[c + half]);
                const float a_cos = widen(narrow(a * widen(cos[c]))), b_sin = widen(narrow(b * widen(sin[c])));
                const float b_cos = widen(narrow(b * widen(cos[c + other]))), a_sin = widen(narrow(a * widen(sin[c + other])));
                x[c] = narrow(a_cos - b_sin), x[c + half] = narrow(b_cos + a_sin);
            }
    }
}

SMALL void silu_gate(const uint16_t *x, uint16_t *out, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++, x += 2 * cols, out += cols)
        for (int64_t c = 0; c < cols; c++) {
            const float v = widen(x[c]), e = exponential(v < 0 ? v : -v); /* e^-|v| */
            const float gate = v * (v < 0 ? e : 1.0f) / (1.0f + e);
            out[c] = narrow(widen(narrow(gate)) * widen(x[cols + c]));
        }
}

/* gpt-oss' gate of pairs of neighbours: (up + 1) * gate * sigmoid(alpha * gate), both cut at `limit`, rounded as torch does. */
SMALL void pair_gate(const uint16_t *x, uint16_t *out, int64_t n, float limit, float alpha) {
    for (int64_t i = 0; i < n; i++) {
        float gate = widen(x[2 * i]), up = widen(x[2 * i + 1]);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        const float v = widen(narrow(gate * alpha)), e = exponential(v < 0 ? v : -v); /* e^-|v| */
        const float weight = widen(narrow((v < 0 ? e : 1.0f) / (1.0f + e)));
        out[i] = narrow(widen(narrow(up + 1.0f)) * widen(narrow(gate * weight)));
    }
}

/* out[r] = weight[r] x, in float32. */
SMALL void rows_by(const float *weight, const float *x, float *out, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++, weight += cols) {
        float sums[LANES] = {0};
        int64_t c = 0;
        for (; c + LANES <= cols; c += LANES)
            for (int i = 0; i < LANES; i++) sums[i] += weight[c + i] * x[c + i];
        for (; c < cols; c++) sums[c % LANES] += weight[c] * x[c];
        out[r] = total(sums);
    }
}

/* Hadamard's matrix of n numbers: sums and differences of neighbours, then of pairs, and so on. Every instruction set
 * adds in this order, so that results have the same bits. */
SMALL void hadamard(float *x, int64_t n) {
    for (int64_t c = 0; c < n; c += 4) {
        const float a = x[c] + x[c + 1], b = x[c] - x[c + 1], p = x[c + 2] + x[c + 3], q = x[c + 2] - x[c + 3];
        x[c] = a + p, x[c + 1] = b + q, x[c + 2] = a - p, x[c + 3] = b - q;
    }
#define PAIRS(h, from) \
    for (int64_t i = 0; i < (h); i++) { \
        const float a = (from)[i], b = (from)[i + (h)]; \
        (from)[i] = a + b, (from)[i + (h)] = a - b; \
    }
    for (int64_t c = 0; c < n; c += 8) PAIRS(4, x + c)
    for (int64_t c = 0; c < n; c += 16) PAIRS(8, x + c)
    for (int64_t h = 16; h < n; h *= 2)
        for (int64_t c = 0; c < n; c += 2 * h)
            for (int64_t k = 0; k < h; k += 16) {
                float *one = x + c + k, *other = one + h;
                for (int i = 0; i < 16; i++) {
                    const float a = one[i], b = other[i];
                    one[i] = a + b, other[i] = a - b;
                }
            }
}

SMALL void rotate(void *row, int64_t cols, int64_t block, int bf16) {
    const float by = (float)(1.0 / sqrt((double)block));
    float x[256];
    for (int64_t at = 0; at + block <= cols; at += block) {
        uint16_t *narrowed = (uint16_t *)row + at;
        uint32_t *words = (uint32_t *)row + at, turned[256];
        for (int64_t c = 0; c < block; c++) turned[c] = bf16 ? (uint32_t)narrowed[c] << 16 : words[c];
        memcpy(x, turned, sizeof(float) * (size_t)block);
        hadamard(x, block);
        for (int64_t c = 0; c < block; c++) x[c] *= by;
        if (bf16)
            for (int64_t c = 0; c < block; c++) narrowed[c] = narrow(x[c]);
        else
            memcpy(words, x, sizeof(float) * (size_t)block);
    }
}

typedef struct {
    void (*norm)(const Norm *);
    void (*rope)(const Rope *);
    void (*silu_gate)(const uint16_t *, uint16_t *, int64_t, int64_t);
    void (*pair_gate)(const uint16_t *, uint16_t *, int64_t, float, float);
    void (*rows_by)(const float *, const float *, float *, int64_t, int64_t);
    void (*rotate)(void *, int64_t, int64_t, int);
} Small;

#define SET_OF(name, target) \
    target static void norm_##name(const Norm *m) { norm(m); } \
    target static void rope_##name(const Rope *m) { rope(m); } \
    target static void gate_##name(const uint16_t *x, uint16_t *out, int64_t rows, int64_t cols) { silu_gate(x, out, rows, cols); } \
    target static void pairs_##name(const uint16_t *x, uint16_t *out, int64_t n, float limit, float alpha) { \
        pair_gate(x, out, n, limit, alpha); \
    } \
    target static void rows_##name(const float *weight, const float *x, float *out, int64_t rows, int64_t cols) { \
        rows_by(weight, x, out, rows, cols); \
    } \
    target static void rotate_##name(void *row, int64_t cols, int64_t block, int bf16) { \
        if (block == 256) rotate(row, cols, 256, bf16); /* in a loop of known length, 0.6 of the time */ \
        else rotate(row, cols, block, bf16); \
    } \
    static const Small small_##name = {norm_##name, rope_##name, gate_##name, pairs_##name, rows_##name, rotate_##name};

SET_OF(plain, )
#ifdef HAVE_X86
SET_OF(avx2, AVX2)
SET_OF(avx512, AVX512)
#endif

static const Small *small(void) {
    static const Small *const levels[] = LEVELS_OF(&small);
    return levels[moepack_vectors];
}

void moepack_hadamard(void *row, int64_t cols, int bf16) {
    const int64_t block = least(cols & -cols, 256);
    if (block >= 16) small()->rotate(row, cols, block, bf16);
}

void moepack_affine_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t cols, int64_t form,
                         double epsilon) {
    const Norm m = {x, weight, out, rows, cols, form, (float)epsilon};
    small()->norm(&m);
}

void moepack_rope(const Rope *m) { small()->rope(m); }

void moepack_silu_gate(const uint16_t *x, uint16_t *out, int64_t rows, int64_t cols) { small()->silu_gate(x, out, rows, cols); }

void moepack_pair_gate(const uint16_t *x, uint16_t *out, int64_t n, float limit, float alpha) { small()->pair_gate(x, out, n, limit, alpha); }

enum { PART = 16 }; /* rows of a unit of work */
typedef struct {
    const float *weight, *x;
    float *out;
    int64_t tokens, rows, cols;
} Product;

static void some_rows(const void *of, int64_t number, void *room) {
    const Product *m = of;
    const int64_t first = PART * number, rows = m->rows, cols = m->cols;
    (void)room;
    for (int64_t t = 0; t < m->tokens; t++)
        small()->rows_by(m->weight + first * cols, m->x + t * cols, m->out + t * rows + first, least(PART, rows - first), cols);
}

/* out [tokens][rows] = x [tokens][cols] times weight [rows][cols], in float32. */
void moepack_rows(const float *weight, const float *x, float *out, int64_t tokens, int64_t rows, int64_t cols, int64_t threads) {
    const Product m = {weight, x, out, tokens, rows, cols};
    moepack_pieces(some_rows, &m, ceil_div(rows, PART), threads, 0, 0);
}
