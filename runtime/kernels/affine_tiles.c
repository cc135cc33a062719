/* Products of experts with many tokens, for processors that multiply BF16: with AVX-512 BF16, or with AMX's tiles.
 *
 * One step is 32 columns: a tile A of 16 rows by 32 columns, row-major, times a tile B of 32 columns by 16, two columns'
 * numbers side by side in a 32-bit word, adds to 16 x 16 float32 sums. Packed weights, whose words hold following columns
 * of 16 rows side by side, unpack straight into B, rounded to BF16, and activations are A. BF16 weights are A as they lie
 * in their extent, and activations are B; the sums are then turned over. Each tile is 1 KiB and two of each are in use.
 * Sums are made in one order, so neither threads nor other experts change a result's bits.
 */
#include "affine.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define UNROLL _Pragma("GCC unroll 16")
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define INLINE WIDE static inline __attribute__((always_inline))
#define STEP 32 /* columns of a tile */
#define TILE 1024 /* bytes of one */
#define DEPTH 8 /* steps that weights are unpacked for at a time: two blocks of rows take 16 KiB of the first-level cache */
#define BATCH 512 /* slots of one expert that share unpacked weights */
#define CACHE (24 << 20) /* bytes of arranged activations at a time */
#define SCRATCH (2 * DEPTH * TILE + BATCH / 32 * 4 * TILE) /* a thread's tiles of weights and sums */

/* Up to 512 slots of one expert; `x` holds their activations in tiles: [blocks of 16][steps]. */
typedef struct {
    const uint8_t *base;
    const Form *form;
    int64_t first, count;
    uint8_t *x;
} Piece;

typedef struct {
    int64_t piece, from, to; /* panels: 32 rows each */
} Task;

/* sums[2][2][16][16] (+)= A B over `steps`, for na blocks of A's rows and nb of B's columns. Strides are bytes: between rows
 * of A, between steps, and between blocks. */
typedef struct {
    const uint8_t *a, *b, *ahead; /* ahead: where the next 32 rows of BF16 weights lie, `ahead_row` apart, or 0 */
    int64_t a_row, a_step, a_block, b_step, b_block, ahead_row, steps;
    float *sums;
    int na, nb, add;
} Multiply;

typedef struct {
    const Side *m;
    const Piece *pieces;
    const Task *tasks;
    const int64_t *order;
    uint8_t *scratch;
    int64_t n_tasks, n_pieces, steps;
    atomic_llong next, next_block, seats;
} Run;

static int level = -1;

/* ---- arranging */
INLINE __mmask32 of_step(int64_t cols, int64_t step) { /* which of a step's columns there are */
    int64_t left = cols - step * STEP;
    return left >= STEP ? 0xFFFFFFFF : left <= 0 ? 0 : (1u << left) - 1;
}

INLINE void turn(__m512i v[16]) { /* 16 x 16 words, transposed */
    __m512i w[16];
    UNROLL for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        w[i] = _mm512_unpacklo_epi64(a, c), w[i + 1] = _mm512_unpackhi_epi64(a, c);
        w[i + 2] = _mm512_unpacklo_epi64(b, d), w[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(w[i], w[i + 4], 0x88), b = _mm512_shuffle_i32x4(w[i], w[i + 4], 0xDD);
        __m512i c = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0x88), d = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0xDD);
        v[i] = _mm512_shuffle_i32x4(a, c, 0x88), v[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
        v[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), v[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
}

/* The activations of up to 16 slots: tiles B beside BF16 weights, else A. Rows and columns that are not there are 0. */
WIDE static void arrange(const Side *m, const int64_t *slot, int64_t n, int turned, int64_t steps, uint8_t *out) {
    const uint16_t *x[16];
    for (int i = 0; i < 16; i++) x[i] = (const uint16_t *)m->x + (i < n ? slot[i] / m->share * m->cols : 0);
    for (int64_t s = 0; s < steps; s++, out += TILE) {
        const __mmask32 mask = of_step(m->cols, s);
        __m512i v[16];
        UNROLL for (int i = 0; i < 16; i++) v[i] = _mm512_maskz_loadu_epi16(i < n ? mask : 0, x[i] + s * STEP);
        if (turned) turn(v);
        UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + 64 * i, v[i]);
    }
}

/* ---- weights */
INLINE __m512 bf16_row(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* 16 rows of a packed version from `row` on, steps [from, from + n), into tiles B that lie `stride` bytes apart. */
INLINE void unpack(const int bits, const Side *m, const Form *f, const uint8_t *base, int64_t row, int64_t from, int64_t n,
                   uint8_t *out, int64_t stride) {
    const int p = bits == 3 ? 2 : bits, words = p; /* words of a step, and of 3 bits one more in the high plane */
    const int64_t all = ceil_div(m->cols, 32 / p), groups = ceil_div(m->cols, f->group), block = row / BLOCK;
    const uint32_t *low = (const uint32_t *)(base + f->low) + block * all * BLOCK;
    const uint32_t *high = (const uint32_t *)(base + f->high) + block * ceil_div(m->cols, 32) * BLOCK;
    const uint16_t *scale = (const uint16_t *)(base + f->scale) + block * groups * BLOCK;
    const uint8_t *zero = base + f->zero + block * groups * BLOCK;
    const __m512 codes = bits == 4 ? _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f,
                                                    3.5f, 4.5f, 5.5f, 6.5f, 7.5f)
                         : bits == 1 ? _mm512_setr4_ps(-.5f, .5f, -.5f, .5f)
                                     : _mm512_setr4_ps(-1.5f, -.5f, .5f, 1.5f);
    const __m512 far = _mm512_setr4_ps(-2.f, 2.f, -2.f, 2.f); /* of three bits the high plane's part */
    const __m512 unit = _mm512_set1_ps(1.0f / (1 << (8 - bits))), middle = _mm512_set1_ps(-(float)((1 << bits) - 1) / 2);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t s = from; s < from + n; s++, out += stride) {
        const int64_t g = s * STEP / f->group;
        const __m512 by = bf16_row(scale + g * BLOCK);
        __m512 less = _mm512_setzero_ps();
        if (f->stored) {
            __m512 z = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(zero + g * BLOCK))));
            less = _mm512_mul_ps(by, _mm512_fmadd_ps(z, unit, middle));
        }
        __m512i h = bits == 3 ? _mm512_loadu_si512(high + s * BLOCK) : _mm512_setzero_si512();
        UNROLL for (int k = 0; k < words; k++) {
            const int64_t word = s * words + k;
            __m512i w = word < all ? _mm512_loadu_si512(low + word * BLOCK) : _mm512_setzero_si512();
            _mm_prefetch((const char *)(low + (word + 24) * BLOCK), _MM_HINT_T0);
            UNROLL for (int i = 0; i < 16 / words; i++) {
                __m512 v[2];
                UNROLL for (int j = 0; j < 2; j++) {
                    __m512 code = _mm512_permutexvar_ps(w, codes);
                    if (bits == 3) code = _mm512_add_ps(code, _mm512_permutexvar_ps(h, far)), h = _mm512_srli_epi32(h, 1);
                    w = _mm512_srli_epi32(w, p);
                    v[j] = _mm512_fmsub_ps(by, code, less);
                }
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]);
                _mm512_storeu_si512(out + 64 * (k * (16 / words) + i), _mm512_permutexvar_epi16(pairs, both));
            }
        }
    }
}

/* 32 rows from `row` on, as many as there are: tiles B, those of the two blocks in turns; returns how many blocks. */
WIDE static int unpack_panel(const Side *m, const Form *f, const uint8_t *base, int64_t row, int64_t from, int64_t n,
                             uint8_t *out) {
    int blocks = row + BLOCK < m->rows ? 2 : 1;
    for (int k = 0; k < blocks; k++, row += BLOCK, out += TILE) switch (f->bits) {
        case 1: unpack(1, m, f, base, row, from, n, out, 2 * TILE); break;
        case 2: unpack(2, m, f, base, row, from, n, out, 2 * TILE); break;
        case 3: unpack(3, m, f, base, row, from, n, out, 2 * TILE); break;
        default: unpack(4, m, f, base, row, from, n, out, 2 * TILE); break;
        }
    return blocks;
}

/* 32 rows of a BF16 matrix into tiles A, those of the two blocks in turns; what is not there is 0. */
WIDE static void copy_panel(const Side *m, const uint16_t *weight, int64_t row, int64_t from, int64_t n, uint8_t *out) {
    for (int r = 0; r < 32; r++) {
        const uint16_t *at = weight + (row + r) * m->cols;
        uint8_t *to = out + r / 16 * TILE + r % 16 * 64;
        for (int64_t s = from; s < from + n; s++, to += 2 * TILE) {
            __mmask32 mask = row + r < m->rows ? of_step(m->cols, s) : 0;
            _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(mask, at + s * STEP));
        }
    }
}

/* ---- products */
INLINE void multiply_rows(const int nb, const Multiply *q, const uint8_t *a, float *sums) { /* 8 rows of A */
    __m512 acc[8][2];
    UNROLL for (int r = 0; r < 8; r++) UNROLL for (int j = 0; j < nb; j++)
        acc[r][j] = q->add ? _mm512_loadu_ps(sums + 256 * j + 16 * r) : _mm512_setzero_ps();
    const uint8_t *b = q->b;
    for (int64_t s = 0; s < q->steps; s++, a += q->a_step, b += q->b_step)
        for (int p = 0; p < 16; p++) {
            __m512bh v[2];
            UNROLL for (int j = 0; j < nb; j++) v[j] = (__m512bh)_mm512_loadu_si512(b + j * q->b_block + 64 * p);
            UNROLL for (int r = 0; r < 8; r++) {
                int word;
                memcpy(&word, a + r * q->a_row + 4 * p, 4);
                UNROLL for (int j = 0; j < nb; j++)
                    acc[r][j] = _mm512_dpbf16_ps(acc[r][j], (__m512bh)_mm512_set1_epi32(word), v[j]);
            }
        }
    UNROLL for (int r = 0; r < 8; r++) UNROLL for (int j = 0; j < nb; j++)
        _mm512_storeu_ps(sums + 256 * j + 16 * r, acc[r][j]);
}

WIDE static void multiply_avx512(const Multiply *q) {
    for (int i = 0; i < q->na; i++)
        for (int half = 0; half < 2; half++) {
            const uint8_t *a = q->a + i * q->a_block + 8 * half * q->a_row;
            float *sums = q->sums + 512 * i + 128 * half;
            q->nb > 1 ? multiply_rows(2, q, a, sums) : multiply_rows(1, q, a, sums);
        }
}

#define AMX __attribute__((target("amx-tile,amx-bf16")))
typedef struct {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Tiles;

static const Tiles tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

AMX static void configure(void) { _tile_loadconfig(&tiles); }

AMX static void release(void) { _tile_release(); }

/* Tiles 0 to 3 are sums, 4 and 5 A, 6 and 7 B. */
AMX static __attribute__((noinline)) void multiply_amx(const Multiply *q) {
    const uint8_t *a = q->a, *b = q->b;
    __asm__ volatile("" ::: "memory"); /* GCC's intrinsics do not say that they read and write memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (q->add) {
        _tile_loadd(0, q->sums, 64);
        _tile_loadd(1, q->sums + 256, 64);
        _tile_loadd(2, q->sums + 512, 64);
        _tile_loadd(3, q->sums + 768, 64);
    }
#define STEPS(both_a, both_b) \
    for (int64_t s = 0; s < q->steps; s++, a += q->a_step, b += q->b_step) { \
        if (q->ahead) \
            for (int r = 0; r < 32; r++) _mm_prefetch((const char *)(q->ahead + r * q->ahead_row + 64 * s), _MM_HINT_T1); \
        _tile_loadd(6, b, 64); \
        _tile_loadd(4, a, q->a_row); \
        _tile_dpbf16ps(0, 4, 6); \
        if (both_b) { \
            _tile_loadd(7, b + q->b_block, 64); \
            _tile_dpbf16ps(1, 4, 7); \
        } \
        if (both_a) { \
            _tile_loadd(5, a + q->a_block, q->a_row); \
            _tile_dpbf16ps(2, 5, 6); \
            if (both_b) _tile_dpbf16ps(3, 5, 7); \
        } \
    }
    if (q->na > 1 && q->nb > 1)
        STEPS(1, 1)
    else if (q->na > 1)
        STEPS(1, 0)
    else if (q->nb > 1)
        STEPS(0, 1)
    else
        STEPS(0, 0)
    _tile_stored(0, q->sums, 64);
    _tile_stored(1, q->sums + 256, 64);
    _tile_stored(2, q->sums + 512, 64);
    _tile_stored(3, q->sums + 768, 64);
    __asm__ volatile("" ::: "memory");
}

/* ---- results */
WIDE static void put_block(const Side *m, const Form *f, const uint8_t *base, const int64_t *slot, int64_t n, int64_t row,
                           const float *sums, int turned) {
    const int64_t left = m->rows - row;
    const __mmask16 mask = left >= 16 ? 0xFFFF : (1u << left) - 1;
    __m512 bias = _mm512_setzero_ps();
    if (f->bias >= 0) {
        const uint16_t *at = (const uint16_t *)(base + f->bias) + row;
        __m256i bits = _mm256_maskz_loadu_epi16(mask, at);
        bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    __m512i v[16];
    UNROLL for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(sums + 16 * i);
    if (turned) turn(v);
    float made[16][16];
    UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(made[i], v[i]);
    for (int i = 0; i < n; i++) {
        __m512 value = _mm512_add_ps(_mm512_loadu_ps(made[i]), bias);
        int64_t at = slot[i] * m->rows + row;
        if (m->out_bf16)
            _mm256_mask_storeu_epi16((uint16_t *)m->out + at, mask, (__m256i)_mm512_cvtneps_pbh(value));
        else
            _mm512_mask_storeu_ps((float *)m->out + at, mask, value);
    }
}

/* ---- one panel of one piece */
static void panel(const Run *run, const Piece *piece, int64_t row, uint8_t *scratch) {
    const Side *m = run->m;
    const Form *f = piece->form;
    const int plain = f->bits == 16;
    const int64_t blocks = ceil_div(piece->count, 16), steps = run->steps, x_block = steps * TILE;
    const uint16_t *weight = (const uint16_t *)(piece->base + f->low);
    float *sums = (float *)(scratch + 2 * DEPTH * TILE);
    int mine = row + BLOCK < m->rows ? 2 : 1;
    for (int64_t from = 0; from < steps; from += DEPTH) {
        const int64_t n = steps - from < DEPTH ? steps - from : DEPTH;
        /* BF16 weights are copied where a tile would pass their end; and for many tokens, whose repeated reading of rows
         * a power of two apart misses the first-level cache. */
        const int whole = row + 32 <= m->rows && (from + n) * STEP <= m->cols && blocks <= 4;
        if (!plain)
            unpack_panel(m, f, piece->base, row, from, n, scratch);
        else if (!whole)
            copy_panel(m, weight, row, from, n, scratch);
        for (int64_t b = 0; b < blocks; b += 2) {
            const uint8_t *x = piece->x + b * x_block + from * TILE;
            const int here = b + 1 < blocks ? 2 : 1;
            Multiply q = {.steps = n, .sums = sums + 512 * b, .add = from > 0};
            if (!plain) {
                q.a = x, q.a_row = 64, q.a_step = TILE, q.a_block = x_block, q.na = here;
                q.b = scratch, q.b_step = 2 * TILE, q.b_block = TILE, q.nb = mine;
            } else {
                q.b = x, q.b_step = TILE, q.b_block = x_block, q.nb = here, q.na = mine;
                if (whole)
                    q.a = (const uint8_t *)(weight + row * m->cols + from * STEP), q.a_row = 2 * m->cols, q.a_step = 64,
                    q.a_block = 32 * m->cols;
                else
                    q.a = scratch, q.a_row = 64, q.a_step = 2 * TILE, q.a_block = TILE;
                if (!whole && !b) /* copying does not hide its reads: the next rows come while these are multiplied */
                    q.ahead_row = 2 * m->cols,
                    q.ahead = (const uint8_t *)(from + n < steps ? weight + row * m->cols + (from + n) * STEP
                                                                 : weight + (row + 32) * m->cols);
            }
            level > 1 ? multiply_amx(&q) : multiply_avx512(&q);
        }
    }
    for (int64_t b = 0; b < blocks; b++)
        for (int r = 0; r < mine; r++) {
            const int64_t at = plain ? 2 * r + b % 2 : 2 * (b % 2) + r, first = 16 * b;
            const int64_t n = piece->count - first < 16 ? piece->count - first : 16;
            put_block(m, f, piece->base, run->order + piece->first + first, n, row + 16 * r,
                      sums + 1024 * (b / 2) + 256 * at, plain);
        }
}

static void run_tasks(void *argument) {
    Run *run = argument;
    uint8_t *scratch = run->scratch + SCRATCH * atomic_fetch_add_explicit(&run->seats, 1, memory_order_relaxed);
    int64_t i;
    if (level > 1) configure();
    while ((i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < run->n_tasks)
        for (int64_t u = run->tasks[i].from; u < run->tasks[i].to; u++)
            panel(run, run->pieces + run->tasks[i].piece, 32 * u, scratch);
    if (level > 1) release();
}

static void arrange_all(void *argument) {
    Run *run = argument;
    int64_t i, before = 0, piece = 0;
    while (1) { /* blocks of all pieces, one after another */
        i = atomic_fetch_add_explicit(&run->next_block, 1, memory_order_relaxed);
        for (; piece < run->n_pieces && i >= before + ceil_div(run->pieces[piece].count, 16); piece++)
            before += ceil_div(run->pieces[piece].count, 16);
        if (piece == run->n_pieces) return;
        const Piece *p = run->pieces + piece;
        const int64_t first = 16 * (i - before), n = p->count - first < 16 ? p->count - first : 16;
        arrange(run->m, run->order + p->first + first, n, p->form->bits == 16, run->steps,
                p->x + (i - before) * run->steps * TILE);
    }
}

int moepack_tiles_level(int limit) {
    unsigned a, b, c, d;
    level = 0;
    if (limit < 1 || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return level;
    level = 1;
    /* cpuid 7: AMX-TILE and AMX-BF16; the system lends the tiles' state (XFEATURE 18) to a process that asks */
    if (limit > 1 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && d >> 22 & 1 &&
        !syscall(SYS_arch_prctl, 0x1023, 18))
        level = 2;
    return level;
}

int moepack_tiles_product(const Side *m, const Job *jobs, int64_t n, const int64_t *order, Arena *arena) {
    const int64_t steps = ceil_div(m->cols, STEP), panels = ceil_div(m->rows, 32);
    int64_t pieces_of = 0;
    for (int64_t j = 0; j < n; j++) pieces_of += ceil_div(jobs[j].count, BATCH);
    Piece *pieces = malloc((size_t)pieces_of * sizeof(Piece) + (size_t)(pieces_of * panels) * sizeof(Task));
    if (!pieces) return 1;
    Task *tasks = (Task *)(pieces + pieces_of);
    int failed = 0;
    for (int64_t j = 0, done = 0; j < n && !failed;) { /* as many slots at a time as their activations have room */
        int64_t n_pieces = 0, n_tasks = 0, cost = 0;
        size_t at = (size_t)m->threads * SCRATCH;
        while (j < n && (!n_pieces || at < CACHE)) {
            const Job *job = jobs + j;
            int64_t count = job->count - done < BATCH ? job->count - done : BATCH;
            pieces[n_pieces++] = (Piece){job->base, job->form, job->first + done, count, (uint8_t *)at};
            at += (size_t)(ceil_div(count, 16) * steps * TILE);
            cost += (ceil_div(count, 32) + 4) * panels; /* unpacking takes as long as some products */
            done += count;
            if (done == job->count) j++, done = 0;
        }
        failed = grow(arena, at);
        if (failed) break;
        const int64_t share = cost / (m->threads * 8) + 1;
        for (int64_t i = 0; i < n_pieces; i++) {
            pieces[i].x += (uintptr_t)arena->at;
            const int64_t step = m->threads < 2 ? panels : share / (ceil_div(pieces[i].count, 32) + 4) + 1;
            for (int64_t u = 0; u < panels; u += step)
                tasks[n_tasks++] = (Task){i, u, u + step < panels ? u + step : panels};
        }
        Run run = {.m = m, .pieces = pieces, .tasks = tasks, .order = order, .scratch = arena->at};
        run.n_tasks = n_tasks, run.n_pieces = n_pieces, run.steps = steps;
        atomic_init(&run.next, 0);
        atomic_init(&run.next_block, 0);
        atomic_init(&run.seats, 0);
        moepack_parallel(arrange_all, &run, (int)m->threads);
        moepack_parallel(run_tasks, &run, n_tasks < m->threads ? (int)n_tasks : (int)m->threads);
    }
    free(pieces);
    return failed;
}
#else
int moepack_tiles_level(int limit) { return limit * 0; }

int moepack_tiles_product(const Side *m, const Job *jobs, int64_t n, const int64_t *order, Arena *arena) {
    (void)m, (void)jobs, (void)n, (void)order, (void)arena;
    return 1;
}
#endif
