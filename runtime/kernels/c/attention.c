/* Attention of few new tokens over a cache of keys and values, and the products of heads with their own matrices, by which
 * a latent layer's queries and results go (runtime/dense/latent.py). A cache is BF16, or codes of 8 or 4 bits
 * (runtime/kv/rows.py), which are made BF16 a strip at a time.
 *
 * Queries that share a head of keys are rows of one product, so that each key is read once for all of them. Keys are taken
 * STRIP at a time, with a running softmax: memory does not grow with the length of the cache. A long cache of one token is
 * split into spans, which follow from its length alone; so results have the same bits on any number of threads.
 */
#include <math.h>

#include "gemm.h"

#define KEYS 16   /* keys that are widened to float32 at a time */
#define STRIP 128 /* keys of one step of the softmax */
#define ROWS 16   /* rows of one unit of work: queries of heads that share keys, or of successive tokens */
#define SPAN 1024 /* the least keys of a unit */
#define SPANS 8   /* the most spans */
#define ROWS_AHEAD 24 /* coded rows that are fetched ahead of the one that is made BF16 */

#define GROUP_8 64
#define GROUP_4 32

typedef struct {
    int64_t batch, group, row, rows, from, to;
} Unit;

/* An indexer's scores: out[t][j] = sum over h of weights[t][h] * max(0, q[t][h] . k[j]). */
typedef struct {
    const uint16_t *q, *k; /* [tokens][heads][cols]; rows of k are `row` numbers apart */
    const float *weights;  /* [tokens][heads] */
    float *out;            /* [tokens][length] */
    int64_t tokens, heads, cols, length, row;
} Index;

/* Write a token's scores of n keys from key `at` on, by its heads' products with them. */
static inline __attribute__((always_inline)) void weigh(const Index *m, int64_t token, int64_t at, int64_t n,
                                                        const float *products) {
    float sums[STRIP] = {0};
    for (int64_t h = 0; h < m->heads; h++, products += STRIP) {
        const float weight = m->weights[token * m->heads + h];
        for (int64_t j = 0; j < STRIP; j++) sums[j] += weight * (products[j] > 0 ? products[j] : 0);
    }
    memcpy(m->out + token * m->length + at, sums, (size_t)n * sizeof(float));
}

/* Give a row's scores of keys [at, at + n) that it does not see, and those past them, the value of no key. */
static inline __attribute__((always_inline)) void hide(const Attend *m, const Unit *u, int64_t r, int64_t at, int64_t n,
                                                       float *scores) {
    const int64_t i = (u->row + r) % m->tokens;
    int64_t seen = m->causal ? m->length - m->tokens + i + 1 - at : n;
    seen = seen < 0 ? 0 : least(seen, n);
    for (int64_t j = seen; j < STRIP; j++) scores[j] = -INFINITY;
    if (!m->mask) return;
    const uint8_t *mask = m->mask + u->batch * m->mask_at[0] + i * m->mask_at[1] + at;
    for (int64_t j = 0; j < seen; j++) scores[j] = mask[j] ? scores[j] : -INFINITY;
}

/* Whether one of a unit's rows sees one of keys [at, at + n). */
static int sees(const Attend *m, const Unit *u, int64_t at, int64_t n) {
    for (int64_t r = 0; r < u->rows; r++) {
        const int64_t i = (u->row + r) % m->tokens;
        if (m->causal && at > m->length - m->tokens + i) continue;
        if (!m->mask || memchr(m->mask + u->batch * m->mask_at[0] + i * m->mask_at[1] + at, 1, (size_t)n)) return 1;
    }
    return 0;
}

static inline int64_t wide_of(int64_t cols) { return (cols + 31) & -32; }

static inline const uint8_t *row_of(const Rows *rows, int64_t batch, int64_t head, int64_t token) {
    return rows->at + batch * rows->batch + head * rows->head + token * rows->token;
}

static inline uint16_t short_at(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return bits;
}

/* BF16 rows of one strip. */
typedef struct {
    const uint16_t *at;
    int64_t row;
} Strip;

static inline int64_t opened_numbers(const Attend *m) { /* of a strip that is made BF16 */
    const int64_t packed = (m->k.bits < 16) * m->k.cols + (m->k2.bits < 16) * m->k2.cols + (m->v.bits < 16) * m->v.cols;
    return STRIP * packed;
}

#define NAME(x) x##_plain
#define TARGET
#define LANES 4
#include "attend_rows.h"
#undef NAME
#undef TARGET
#undef LANES
#ifdef HAVE_X86
#define NAME(x) x##_avx2
#define TARGET AVX2
#define LANES 8
#include "attend_rows.h"
#undef NAME
#undef TARGET
#undef LANES
#define NAME(x) x##_avx512
#define TARGET AVX512
#define LANES 16
#include "attend_rows.h"
#undef NAME
#undef TARGET
#undef LANES
#include <immintrin.h>

/* ---- with BF16 products (AVX-512 BF16): keys and values are read as they are, and weights are rounded to BF16 */
#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define BF16_INLINE BF16 static inline __attribute__((always_inline))

/* Make one row BF16. */
BF16_INLINE void opened_row_bf16(const uint8_t *from, int64_t cols, int64_t bits, uint16_t *out) {
    if (cols % (bits == 8 ? GROUP_8 : GROUP_4)) {
        opened_row_avx512(from, cols, bits, out);
        return;
    }
    if (bits == 8) {
        const uint8_t *scales = from + cols;
        for (const uint8_t *end = from + cols; from < end; from += GROUP_8, scales += 2, out += GROUP_8) {
            const __m512 scale = _mm512_set1_ps(widen(short_at(scales)));
#pragma GCC unroll 2
            for (int i = 0; i < GROUP_8; i += 32) {
                const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
                const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + i + 16)));
                const __m512 first = _mm512_mul_ps(_mm512_cvtepi32_ps(low), scale);
                const __m512 second = _mm512_mul_ps(_mm512_cvtepi32_ps(high), scale);
                _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(second, first));
            }
        }
        return;
    }
    const __m512 levels = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    const __m128i mask = _mm_set1_epi8(15);
    const uint8_t *scales = from + cols / 2;
    for (const uint8_t *end = from + cols / 2; from < end; from += GROUP_4 / 2, scales += 2, out += GROUP_4) {
        const __m512 scaled = _mm512_mul_ps(levels, _mm512_set1_ps(widen(short_at(scales))));
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(scaled, scaled);
        const __m128i codes = _mm_loadu_si128((const __m128i *)from);
        const __m128i low = _mm_and_si128(codes, mask), high = _mm_and_si128(_mm_srli_epi16(codes, 4), mask);
        const __m512i at = _mm512_cvtepu8_epi16(_mm256_set_m128i(high, low));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(at, table));
    }
}

BF16_INLINE Strip strip_bf16(const Rows *rows, const Unit *u, int64_t at, int64_t n, uint16_t **room) {
    const uint8_t *from = row_of(rows, u->batch, u->group, at);
    if (rows->bits == 16) return (Strip){(const uint16_t *)from, rows->token / 2};
    const int64_t size = rows->cols * rows->bits / 8;
    uint16_t *made = *room;
    *room += STRIP * rows->cols;
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *row = from + i * rows->token;
        for (int64_t c = 0; c < size; c += 64) __builtin_prefetch(row + ROWS_AHEAD * rows->token + c, 0, 2);
        opened_row_bf16(row, rows->cols, rows->bits, made + i * rows->cols);
    }
    return (Strip){made, rows->cols};
}

BF16_INLINE __m512bh pairs_at(const uint16_t *at) { return (__m512bh)_mm512_loadu_si512(at); }

/* out[r * STRIP + j] = (row r of q) . (key j) for four keys; `q` has rows of wide numbers, multiples of 32. */
BF16_INLINE void dots_bf16(const Attend *m, const uint16_t *q, int64_t wide, int64_t rows, const uint16_t *const *k,
                           const uint16_t *const *k2, float *out) {
    for (int64_t r = 0; r < rows; r += 4) {
        __m512 s[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) s[i] = _mm512_setzero_ps();
        for (int part = 0; part < 2; part++) {
            const uint16_t *const *keys = part ? k2 : k;
            const uint16_t *x = q + r * wide + (part ? m->k.cols : 0);
            const int64_t cols = part ? m->k2.cols : m->k.cols;
            for (int64_t c = 0; c < cols; c += 32) {
                const __m512bh a = pairs_at(keys[0] + c), b = pairs_at(keys[1] + c);
                const __m512bh e = pairs_at(keys[2] + c), f = pairs_at(keys[3] + c);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const __m512bh by = pairs_at(x + i * wide + c);
                    s[4 * i] = _mm512_dpbf16_ps(s[4 * i], by, a);
                    s[4 * i + 1] = _mm512_dpbf16_ps(s[4 * i + 1], by, b);
                    s[4 * i + 2] = _mm512_dpbf16_ps(s[4 * i + 2], by, e);
                    s[4 * i + 3] = _mm512_dpbf16_ps(s[4 * i + 3], by, f);
                }
            }
        }
        Vector_avx512 sums[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sums[i] = (Vector_avx512)s[i];
        float made[16];
        store_avx512(made, totals_avx512(sums) * m->scale);
        for (int i = 0; i < 4; i++) memcpy(out + (r + i) * STRIP, made + 4 * i, 4 * sizeof(float));
    }
}

/* acc += p v over n keys, for R rows from `row` on. A vector of two keys' numbers side by side has 16 of 32 columns: those
 * of the first half of every 8, or of the second. Rows of the strip `next` are fetched meanwhile: of a long cache the
 * processor fetches too few ahead by itself, and attention takes 1.25 times as long. 0: none are. */
BF16_INLINE void sums_bf16(const int R, const uint16_t *p, const uint16_t *v, int64_t v_row, int64_t n, int64_t cols,
                           float *acc, const Strip *next) {
    for (int64_t c = 0; c < cols; c += 32) {
        __m512 s[2 * 8];
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            s[2 * i] = _mm512_loadu_ps(acc + i * cols + c);
            s[2 * i + 1] = _mm512_loadu_ps(acc + i * cols + c + 16);
        }
        for (int64_t j = 0; j < n; j += 2) {
            if (next) {
                __builtin_prefetch(next->at + j * next->row + c, 0, 2);
                __builtin_prefetch(next->at + (j + 1) * next->row + c, 0, 2);
            }
            const __m512i one = _mm512_loadu_si512(v + j * v_row + c);
            const __m512i two = _mm512_loadu_si512(v + (j + 1 < n ? j + 1 : j) * v_row + c);
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(one, two), high = (__m512bh)_mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 8
            for (int i = 0; i < R; i++) {
                int32_t both;
                memcpy(&both, p + i * STRIP + j, 4);
                const __m512bh by = (__m512bh)_mm512_set1_epi32(both);
                s[2 * i] = _mm512_dpbf16_ps(s[2 * i], by, low);
                s[2 * i + 1] = _mm512_dpbf16_ps(s[2 * i + 1], by, high);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            _mm512_storeu_ps(acc + i * cols + c, s[2 * i]);
            _mm512_storeu_ps(acc + i * cols + c + 16, s[2 * i + 1]);
        }
    }
}

BF16 static void attend_bf16(const Attend *m, const Unit *u, float *room, float *most, float *sum, float *acc) {
    const int64_t wide = m->k.cols + m->k2.cols, cols = m->v.cols, rows = u->rows, whole = (rows + 3) & -4;
    if (m->k.cols % 32 || m->k2.cols % 32 || cols % 32) {
        attend_avx512(m, u, room, most, sum, acc);
        return;
    }
    float *scores = room;
    uint16_t *p = (uint16_t *)(scores + ROWS * STRIP), *q = p + ROWS * STRIP, *opened = q + ROWS * wide_of(wide);
    memset(q, 0, (size_t)(whole * wide) * sizeof(uint16_t));
    memset(acc, 0, (size_t)(whole * cols) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t h = u->group * m->heads + (u->row + r) / m->tokens, i = (u->row + r) % m->tokens;
        memcpy(q + r * wide, row_of(&m->q, u->batch, h, i), (size_t)m->q.cols * 2);
        if (m->q2.cols) memcpy(q + r * wide + m->q.cols, row_of(&m->q2, u->batch, h, i), (size_t)m->q2.cols * 2);
        most[r] = -INFINITY, sum[r] = 0;
    }
    for (int64_t at = u->from; at < u->to; at += STRIP) {
        const int64_t n = least(STRIP, u->to - at);
        if (!sees(m, u, at, n)) continue;
        uint16_t *left = opened;
        const Strip keys = strip_bf16(&m->k, u, at, n, &left);
        const Strip keys2 = m->k2.cols ? strip_bf16(&m->k2, u, at, n, &left) : keys;
        const Strip values = m->v.at != m->k.at ? strip_bf16(&m->v, u, at, n, &left) : keys;
        const int apart = m->v.bits == 16 && m->v.at != m->k.at;
        for (int64_t j = 0; j < n; j += 4) {
            const uint16_t *k[4], *k2[4];
            for (int i = 0; i < 4; i++) {
                const int64_t row = least(j + i, n - 1); /* a score past the last key is not used */
                k[i] = keys.at + row * keys.row, k2[i] = keys2.at + row * keys2.row;
                if (apart) /* they are read by columns: too far apart for the processor to fetch ahead */
                    for (int64_t c = 0; c < cols; c += 32) __builtin_prefetch(values.at + row * values.row + c, 0, 2);
            }
            dots_bf16(m, q, wide, whole, k, k2, scores + j);
        }
        for (int64_t r = 0; r < rows; r++) {
            hide(m, u, r, at, n, scores + r * STRIP);
            const float before = soften_avx512(scores + r * STRIP, most + r, sum + r);
            for (int64_t j = 0; j < STRIP; j += 16)
                _mm256_storeu_si256((__m256i *)(p + r * STRIP + j),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(scores + r * STRIP + j)));
            if (before != 1.0f)
                for (int64_t c = 0; c < cols; c++) acc[r * cols + c] *= before;
        }
        memset(p + rows * STRIP, 0, (size_t)((whole - rows) * STRIP) * sizeof(uint16_t));
        int64_t r = 0;
        const Strip behind_keys = {keys.at + STRIP * keys.row, keys.row};
        const Strip *next = m->k.bits == 16 ? &behind_keys : 0;
        for (; r + 8 <= whole; r += 8, next = 0)
            sums_bf16(8, p + r * STRIP, values.at, values.row, n, cols, acc + r * cols, next);
        for (; r < whole; r += 4, next = 0)
            sums_bf16(4, p + r * STRIP, values.at, values.row, n, cols, acc + r * cols, next);
    }
    for (int64_t i = 0; i < rows * cols; i += 32) {
        float apart[32];
        memcpy(apart, acc + i, sizeof apart);
        for (int c = 0; c < 32; c++) acc[i + c] = apart[c / 8 * 4 + c % 4 + (c & 4) * 4];
    }
}
#endif

static void (*const attends[])(const Attend *, const Unit *, float *, float *, float *, float *) = LEVELS_OF(attend);
static void (*const indexes[])(const Index *, int64_t, int64_t, float *) = LEVELS_OF(index);
static void (*const heads[])(const Heads *, int64_t, const uint16_t *, const float *, int64_t, float *) = LEVELS_OF(head);
static uint16_t (*const code_groups[])(const float *, int64_t, int64_t, uint8_t *) = LEVELS_OF(code_group);
static void (*const opened_rows[])(const uint8_t *, int64_t, int64_t, uint16_t *) = LEVELS_OF(opened_row);

static void attend_rows(const Attend *m, const Unit *u, float *room, float *most, float *sum, float *acc) {
#ifdef HAVE_X86
    if (moepack_bf16) {
        attend_bf16(m, u, room, most, sum, acc);
        return;
    }
#endif
    attends[moepack_vectors](m, u, room, most, sum, acc);
}

typedef struct {
    const Attend *m;
    int64_t blocks, spans, span, each, room; /* room: floats of a thread; each: floats of a unit's results */
    float *results; /* of all units, if there are several spans */
} AttendRun;

static Unit unit_of(const AttendRun *run, int64_t number) {
    const Attend *m = run->m;
    const int64_t block = number / run->spans % run->blocks, place = number / run->spans / run->blocks;
    const int64_t row = block * ROWS, from = number % run->spans * run->span;
    return (Unit){place / m->groups, place % m->groups, row, least(ROWS, m->heads * m->tokens - row), from,
                  least(from + run->span, m->length)};
}

/* Add up the results of a unit's spans, and write its rows. */
static void finish(const AttendRun *run, const Unit *u, float *parts) {
    const Attend *m = run->m;
    const int64_t wide = wide_of(m->v.cols);
    for (int64_t r = 0; r < u->rows; r++) {
        float top = -INFINITY, sum = 0;
        for (int64_t s = 0; s < run->spans; s++) {
            const float most = parts[s * run->each + r];
            top = most > top ? most : top;
        }
        const int64_t h = u->group * m->heads + (u->row + r) / m->tokens, i = (u->row + r) % m->tokens;
        if (m->sinks) {
            top = m->sinks[h] > top ? m->sinks[h] : top;
            sum = exponential(m->sinks[h] - top);
        }
        float *acc = parts + 2 * ROWS + r * wide;
        for (int64_t s = 0; s < run->spans; s++) {
            const float *part = parts + s * run->each;
            const float by = top == -INFINITY ? 0.0f : exponential(part[r] - top);
            sum += part[ROWS + r] * by;
            const float *other = part + 2 * ROWS + r * wide;
            for (int64_t c = 0; c < m->v.cols; c++) acc[c] = s ? acc[c] + other[c] * by : other[c] * by;
        }
        const float by = sum == 0.0f ? 0.0f : 1.0f / sum; /* a row that sees no key is zero */
        uint16_t *out = m->out + ((u->batch * m->tokens + i) * m->groups * m->heads + h) * m->v.cols;
        for (int64_t c = 0; c < m->v.cols; c++) out[c] = narrow(acc[c] * by);
    }
}

static void attend_unit(const void *of, int64_t number, void *room) {
    const AttendRun *run = of;
    const Unit u = unit_of(run, number);
    float *result = run->spans > 1 ? run->results + number * run->each : room;
    attend_rows(run->m, &u, (float *)room + run->each, result, result + ROWS, result + 2 * ROWS);
    if (run->spans == 1) finish(run, &u, result);
}

static void finish_unit(const void *of, int64_t number, void *room) {
    const AttendRun *run = of;
    const Unit u = unit_of(run, number * run->spans);
    (void)room;
    finish(run, &u, run->results + number * run->spans * run->each);
}

/* Returns 0, or 1 when memory is short. */
int moepack_affine_attend(const Attend *m, int64_t threads) {
    const int64_t places = m->batch * m->groups, q_wide = wide_of(m->k.cols + m->k2.cols), v_wide = wide_of(m->v.cols);
    AttendRun run = {.m = m, .blocks = ceil_div(m->heads * m->tokens, ROWS), .spans = 1};
    if (m->tokens == 1) run.spans = least(SPANS, ceil_div(m->length, SPAN));
    run.span = ceil_div(ceil_div(m->length, run.spans), STRIP) * STRIP;
    run.spans = ceil_div(m->length, run.span);
    run.each = ROWS * (2 + v_wide);
    run.room = run.each + ROWS * (q_wide + 2 * STRIP) + KEYS * (q_wide > v_wide ? q_wide : v_wide) + opened_numbers(m) / 2;
    const int64_t units = places * run.blocks * run.spans;
    threads = least(threads, units);
    if (places * m->length * m->k.cols < 65536) threads = 1; /* waking others would take longer */
    const int64_t results = run.spans > 1 ? units * run.each : 0;
    float *memory = malloc(sizeof(float) * (size_t)(run.room * threads + results));
    if (!memory) return 1;
    run.results = memory + run.room * threads;
    moepack_pieces(attend_unit, &run, units, threads, memory, sizeof(float) * (size_t)run.room);
    if (run.spans > 1) moepack_pieces(finish_unit, &run, units / run.spans, threads, 0, 0);
    free(memory);
    return 0;
}

static void index_strip(const void *of, int64_t number, void *room) {
    const Index *m = of;
    indexes[moepack_vectors](m, STRIP * number, least(STRIP, m->length - STRIP * number), room);
}

/* Returns 0, or 1 when memory is short. */
int moepack_affine_index(const Index *m, int64_t threads) {
    const int64_t rows = (m->heads + 3) & -4, wide = wide_of(m->cols);
    const int64_t strips = ceil_div(m->length, STRIP);
    const size_t room = sizeof(float) * (size_t)(rows * (wide + STRIP) + KEYS * wide);
    threads = m->length * m->cols * m->tokens < 65536 ? 1 : least(threads, strips);
    void *memory = calloc((size_t)threads, room);
    if (!memory) return 1;
    moepack_pieces(index_strip, m, strips, threads, memory, room);
    free(memory);
    return 0;
}

typedef struct {
    const Heads *m;
    int64_t tile, ld; /* floats of an unpacked matrix, and of one of its rows */
} HeadsRun;

/* A thread's room begins with the tile, because vectors are stored at multiples of their size. */
static void one_head(const void *of, int64_t h, void *room) {
    const HeadsRun *run = of;
    const Heads *m = run->m;
    float *tile = room, *rest = tile + run->tile;
    if (!m->base) {
        heads[moepack_vectors](m, h, m->matrix + h * m->matrix_at[0], 0, m->matrix_at[1], rest);
        return;
    }
    const int64_t rows = m->sums ? m->out_cols : m->in, cols = m->sums ? m->in : m->out_cols;
    const int64_t from = m->first + h * m->matrix_at[0];
    const Unpack unpack = {cols, from, from + rows, run->ld, 0, 1, m->base, m->form, tile};
    for (int64_t r = 0; r < rows; r += UNIT)
        moepack_unpacking(&unpack, from + r, least(UNIT, rows - r), (uint8_t *)(tile + r));
    heads[moepack_vectors](m, h, 0, tile, run->ld, rest);
}

int moepack_affine_heads(const Heads *m, int64_t threads) {
    if (m->base && (!known(m->form) || m->form->bits == 16)) return 2;
    const int64_t n = m->sums ? m->in : m->out_cols, cols = m->sums ? m->out_cols : m->in;
    const int64_t ld = ceil_div(n, KEYS) * KEYS, wide = m->base ? ceil_div(cols, UNIT) * UNIT : wide_of(cols);
    HeadsRun run = {.m = m};
    if (m->base) run.ld = wide, run.tile = ld * wide;
    const int64_t room = (ROWS * (wide + ld) + KEYS * wide + run.tile + 15) & -16;
    threads = m->heads * m->in * m->out_cols < 65536 ? 1 : least(threads, m->heads);
    float *memory;
    if (posix_memalign((void **)&memory, 64, sizeof(float) * (size_t)(room * threads))) return 1;
    for (int64_t i = 0; i < threads && m->base; i++) /* what no block of rows fills in a tile */
        for (int64_t c = 0; c < ld; c++) {
            const int64_t made = c < n ? cols : 0;
            memset(memory + i * room + c * wide + made, 0, sizeof(float) * (size_t)(wide - made));
        }
    moepack_pieces(one_head, &run, m->heads, threads, memory, sizeof(float) * (size_t)room);
    free(memory);
    return 0;
}

#define WIDEST 8192 /* the most numbers of a row */

static void widen_row(const void *x, int64_t bf16, int64_t at, int64_t cols, float *row) {
    for (int64_t i = 0; i < cols; i++) row[i] = bf16 ? widen(((const uint16_t *)x)[at + i]) : ((const float *)x)[at + i];
}

static void put_row(void *out, int64_t bf16, int64_t at, int64_t cols, const float *row) {
    if (bf16)
        for (int64_t i = 0; i < cols; i++) ((uint16_t *)out)[at + i] = narrow(row[i]);
    else
        memcpy((float *)out + at, row, (size_t)cols * sizeof(float));
}

/* Rotate `rows` rows of `cols` numbers, BF16 or float32, where they are. */
void moepack_kv_rotate(void *x, int64_t bf16, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++) moepack_hadamard((uint8_t *)x + r * cols * (bf16 ? 2 : 4), cols, (int)bf16);
}

/* Code `rows` rows of `cols` numbers, BF16 or float32, into rows of `Rows`. Returns 1 for rows that are too wide. */
int moepack_kv_code(const void *x, int64_t bf16, int64_t rows, int64_t cols, int64_t bits, uint8_t *out) {
    const int64_t group = bits == 8 ? GROUP_8 : GROUP_4, each = cols * bits / 8 + 2 * ceil_div(cols, group);
    if (cols > WIDEST) return 1;
    for (int64_t r = 0; r < rows; r++, out += each) {
        float row[WIDEST];
        widen_row(x, bf16, r * cols, cols, row);
        if (bits == 4) moepack_hadamard(row, cols, 0);
        for (int64_t c = 0; c < cols; c += group) {
            const uint16_t scale = code_groups[moepack_vectors](row + c, least(group, cols - c), bits, out + c * bits / 8);
            memcpy(out + cols * bits / 8 + c / group * 2, &scale, 2);
        }
    }
    return 0;
}

/* Make rows of `Rows`, one after another, BF16 or float32. Returns 1 for rows that are too wide. */
int moepack_kv_open(const uint8_t *from, int64_t rows, int64_t cols, int64_t bits, int64_t bf16, void *out) {
    const int64_t group = bits == 8 ? GROUP_8 : GROUP_4, each = cols * bits / 8 + 2 * ceil_div(cols, group);
    if (cols > WIDEST) return 1;
    for (int64_t r = 0; r < rows; r++, from += each) {
        if (bits == 8 && bf16) {
            opened_rows[moepack_vectors](from, cols, bits, (uint16_t *)out + r * cols);
            continue;
        }
        float row[WIDEST];
        for (int64_t c = 0; c < cols; c += group) {
            const float scale = widen(short_at(from + cols * bits / 8 + c / group * 2));
            const int64_t n = least(group, cols - c);
            for (int64_t i = 0; bits == 8 && i < n; i++) row[c + i] = (float)(int8_t)from[c + i] * scale;
            for (int64_t i = 0; bits == 4 && i < n / 2; i++) {
                const uint8_t byte = from[c / 2 + i];
                row[c + i] = (float)((byte & 15) - 8) * scale;
                row[c + n / 2 + i] = (float)((byte >> 4) - 8) * scale;
            }
        }
        if (bits == 4) moepack_hadamard(row, cols, 0);
        put_row(out, bf16, r * cols, cols, row);
    }
    return 0;
}
