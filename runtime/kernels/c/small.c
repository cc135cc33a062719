/* The work of a decoding step between products: normalisations of BF16 rows, gates and rotations of experts' activations,
 * and attention of one new token.
 *
 * Sums are float32 in LANES parts, so results differ from torch's in the last bits. runtime/dense/ compares results
 * with a module's before it uses these loops. Loops are compiled for each instruction set, and product.c chooses.
 */
#include <math.h>

#include "lanes.h"
#ifdef HAVE_X86
#include <immintrin.h>
#endif

/* How a weight is applied: after rounding to BF16, before it, or as 1 + weight in float32. */
enum { ROUNDED, WIDE, PLUS_ONE };

/* The sums of four times LANES parts. */
SMALL void totals(float (*parts)[LANES], float *out) {
#ifdef HAVE_X86 /* with SSE, which every x86-64 processor has: the four sums are added at once */
    __m128 s[4];
    for (int r = 0; r < 4; r++) {
        const float *p = parts[r];
        s[r] = _mm_add_ps(_mm_add_ps(_mm_loadu_ps(p), _mm_loadu_ps(p + 8)), _mm_add_ps(_mm_loadu_ps(p + 4), _mm_loadu_ps(p + 12)));
    }
    _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3])));
#else
    for (int r = 0; r < 4; r++) out[r] = total(parts[r]);
#endif
}

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

/* One token's attention: out[b][h] = sum over j of softmax(scale * q . k_j) v_j, all BF16. Strides count numbers. Rows
 * of `cols` (q, k) and `out_cols` (v, out) have stride 1. `heads` heads of q share each of `groups` heads of k, v. */
typedef struct {
    const uint16_t *q, *k, *v;
    uint16_t *out; /* [batch][heads * groups][out_cols] */
    int64_t batch, groups, heads, length, cols, out_cols;
    int64_t q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row;
    float scale;
    float *room; /* attend_room() floats for each thread */
} Attend;

/* So many rows of k or v are multiplied in one step: a head's sums are loaded once for all of them. */
#define STEP 4 /* as many as `totals` adds up */

static int64_t attend_room(const Attend *m) {
    const int64_t scores = (m->length + LANES) & -LANES;
    return m->heads * (scores + m->cols + m->out_cols) + STEP * (m->cols + m->out_cols) + 64;
}

/* Rows [j, j + STEP) as float32; zeros after the last. */
SMALL void widened(float *out, const uint16_t *from, int64_t row, int64_t j, int64_t n, int64_t cols) {
    for (int64_t i = 0; i < STEP; i++, out += cols)
        if (j + i < n)
            for (int64_t c = 0; c < cols; c++) out[c] = widen(from[(j + i) * row + c]);
        else
            memset(out, 0, (size_t)cols * sizeof(float));
}

/* Softmax of n scores; zeros after them, up to a multiple of LANES. */
SMALL void softmax(float *scores, int64_t n) {
    const int64_t whole = (n + LANES - 1) & -LANES;
    float most[LANES], sums[LANES] = {0};
    for (int64_t j = n; j < whole; j++) scores[j] = -INFINITY;
    memcpy(most, scores, sizeof most);
    for (int64_t j = LANES; j < whole; j += LANES)
        for (int i = 0; i < LANES; i++) most[i] = scores[j + i] > most[i] ? scores[j + i] : most[i];
    for (int i = 1; i < LANES; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    const float top = most[0];
    for (int64_t j = 0; j < whole; j++) scores[j] = exponential(scores[j] - top);
    for (int64_t j = 0; j < whole; j += LANES)
        for (int i = 0; i < LANES; i++) sums[i] += scores[j + i];
    const float by = 1.0f / total(sums);
    for (int64_t j = 0; j < whole; j++) scores[j] *= by;
}

/* The attention of one head of k and v, with the heads of q that share it. */
SMALL void attend(const Attend *m, int64_t b, int64_t g, float *room) {
    const int64_t heads = m->heads, n = m->length, cols = m->cols, out_cols = m->out_cols, stride = (n + LANES) & -LANES;
    float *scores = room, *q = scores + heads * stride, *sums = q + heads * cols, *rows = sums + heads * out_cols;
    for (int64_t h = 0; h < heads; h++) {
        const uint16_t *from = m->q + b * m->q_batch + (g * heads + h) * m->q_head;
        for (int64_t c = 0; c < cols; c++) q[h * cols + c] = widen(from[c]) * m->scale;
    }
    for (int64_t j = 0; j < n; j += STEP) {
        widened(rows, m->k + b * m->k_batch + g * m->k_head, m->k_row, j, n, cols);
        for (int64_t h = 0; h < heads; h++) {
            const float *mine = q + h * cols;
            float parts[STEP][LANES] = {{0}};
            int64_t c = 0;
            for (; c + LANES <= cols; c += LANES)
                for (int r = 0; r < STEP; r++)
                    for (int i = 0; i < LANES; i++) parts[r][i] += mine[c + i] * rows[r * cols + c + i];
            for (; c < cols; c++)
                for (int r = 0; r < STEP; r++) parts[r][c % LANES] += mine[c] * rows[r * cols + c];
            totals(parts, scores + h * stride + j);
        }
    }
    for (int64_t h = 0; h < heads; h++) softmax(scores + h * stride, n);
    memset(sums, 0, (size_t)(heads * out_cols) * sizeof(float));
    for (int64_t j = 0; j < n; j += STEP) {
        widened(rows, m->v + b * m->v_batch + g * m->v_head, m->v_row, j, n, out_cols);
        for (int64_t h = 0; h < heads; h++) {
            const float *by = scores + h * stride + j;
            const float by0 = by[0], by1 = by[1], by2 = by[2], by3 = by[3];
            float *mine = sums + h * out_cols;
            for (int64_t c = 0; c < out_cols; c++)
                mine[c] = mine[c] + by0 * rows[c] + by1 * rows[out_cols + c] + by2 * rows[2 * out_cols + c] + by3 * rows[3 * out_cols + c];
        }
    }
    uint16_t *out = m->out + (b * m->groups + g) * heads * out_cols;
    for (int64_t i = 0; i < heads * out_cols; i++) out[i] = narrow(sums[i]);
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

SMALL void rotate(void *row, int64_t cols, int64_t block, const uint32_t *signs, int bf16) {
    const float by = (float)(1.0 / sqrt((double)block));
    float x[256];
    for (int64_t at = 0; at + block <= cols; at += block) {
        uint16_t *narrowed = (uint16_t *)row + at;
        uint32_t *words = (uint32_t *)row + at, turned[256];
        for (int64_t c = 0; c < block; c++) turned[c] = (bf16 ? (uint32_t)narrowed[c] << 16 : words[c]) ^ signs[at + c];
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
    void (*attend)(const Attend *, int64_t, int64_t, float *);
    void (*rope)(const Rope *);
    void (*silu_gate)(const uint16_t *, uint16_t *, int64_t, int64_t);
    void (*rotate)(void *, int64_t, int64_t, const uint32_t *, int);
} Small;

#define SET_OF(name, target) \
    target static void norm_##name(const Norm *m) { norm(m); } \
    target static void attend_##name(const Attend *m, int64_t b, int64_t g, float *room) { attend(m, b, g, room); } \
    target static void rope_##name(const Rope *m) { rope(m); } \
    target static void gate_##name(const uint16_t *x, uint16_t *out, int64_t rows, int64_t cols) { silu_gate(x, out, rows, cols); } \
    target static void rotate_##name(void *row, int64_t cols, int64_t block, const uint32_t *signs, int bf16) { \
        if (block == 256) rotate(row, cols, 256, signs, bf16); /* in a loop of known length, 0.6 of the time */ \
        else rotate(row, cols, block, signs, bf16); \
    } \
    static const Small small_##name = {norm_##name, attend_##name, rope_##name, gate_##name, rotate_##name};

SET_OF(plain, )
#ifdef HAVE_X86
SET_OF(avx2, __attribute__((target("avx2,fma"))))
SET_OF(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))))
#endif

static const Small *small = &small_plain;

void moepack_small_level(int level) {
    small = &small_plain;
#ifdef HAVE_X86
    if (level > 0) small = &small_avx2;
    if (level > 1) small = &small_avx512;
#endif
}

void moepack_affine_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t cols, int64_t form,
                         double epsilon) {
    const Norm m = {x, weight, out, rows, cols, form, (float)epsilon};
    small->norm(&m);
}

void moepack_rope(const Rope *m) { small->rope(m); }

void moepack_silu_gate(const uint16_t *x, uint16_t *out, int64_t rows, int64_t cols) { small->silu_gate(x, out, rows, cols); }

typedef struct {
    const Rotate *m;
    atomic_llong next;
} RotateRun;

#define ROTATED 16 /* slots that a thread takes at a time */

static void rotate_some(void *argument) {
    RotateRun *run = argument;
    const Rotate *m = run->m;
    const size_t each = (size_t)m->cols * (m->bf16 ? 2 : 4);
    int64_t first;
    while ((first = ROTATED * atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < m->slots)
        for (int64_t s = first; s < least(first + ROTATED, m->slots); s++) {
            const int64_t e = m->index[s];
            const int64_t version = e < 0 || e >= m->experts ? m->versions : (int64_t)(m->handles[e] & 63);
            if (version < m->versions && m->blocks[version])
                small->rotate((uint8_t *)m->x + (size_t)s * each, m->cols, m->blocks[version], m->signs[version], (int)m->bf16);
        }
}

void moepack_rotate(const Rotate *m) {
    RotateRun run = {.m = m};
    atomic_init(&run.next, 0);
    moepack_parallel(rotate_some, &run, (int)least(m->threads, ceil_div(m->slots, 4 * ROTATED)));
}

typedef struct {
    const Attend *m;
    int64_t room;
    atomic_llong next, seats;
} AttendRun;

static void attend_some(void *argument) {
    AttendRun *run = argument;
    const Attend *m = run->m;
    float *room = m->room + run->room * atomic_fetch_add_explicit(&run->seats, 1, memory_order_relaxed);
    int64_t i;
    while ((i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < m->batch * m->groups)
        small->attend(m, i / m->groups, i % m->groups, room);
}

/* Returns 0, or 1 when memory is short. */
int moepack_affine_attend(Attend *m, int64_t threads) {
    AttendRun run = {.m = m, .room = attend_room(m)};
    if (threads > m->batch * m->groups) threads = m->batch * m->groups;
    if (m->batch * m->groups * m->length * m->cols < 65536) threads = 1; /* waking others would take longer */
    m->room = malloc(sizeof(float) * (size_t)(run.room * threads));
    if (!m->room) return 1;
    atomic_init(&run.next, 0);
    atomic_init(&run.seats, 0);
    moepack_parallel(attend_some, &run, (int)threads);
    free(m->room);
    return 0;
}
