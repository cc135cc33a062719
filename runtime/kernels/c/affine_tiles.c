/* Products of experts with many tokens, for processors that multiply BF16: with AVX-512 BF16, or with AMX's tiles.
 *
 * One step is 32 columns. It multiplies a tile A of 16 rows by 32 columns, row-major, by a tile B of 32 columns by 16,
 * in which a 32-bit word has the numbers of two columns, and adds the products to 16 x 16 float32 sums. For packed
 * weights, whose words have successive columns of 16 rows side by side, weights are unpacked straight into B, and
 * activations are A. Weights become codes, exact in BF16, whose sums over a group are scaled; or, if many tokens share
 * them, numbers rounded to BF16. BF16 weights are A as they lie in their extent, and activations are B; then the sums
 * are transposed. Sums are made in a fixed order, so neither threads nor other experts change a result's bits. tiles.h
 * fills the tiles. */
#include "gemm.h"

#define STEP 32 /* columns of a tile */
#define TILE 1024 /* bytes of a tile */
#define DEPTH 8 /* steps unpacked at a time: two blocks of rows take 16 KiB of the first-level cache */
#define BATCH 512 /* slots of one expert that share unpacked weights */
#define SCRATCH (2 * DEPTH * TILE + BATCH / 32 * 4 * TILE) /* a thread's tiles of weights and sums */

/* Bytes of one expert's activations in tiles (blocks of 16 slots), and of the sums of activations. */
static size_t arranged(const Gemm *m, int64_t slots) {
    return (size_t)(ceil_div(slots, 16) * ceil_div(m->cols, STEP) * (TILE + 64));
}

size_t moepack_tiles_kept(const Gemm *m, int64_t most) {
    const int64_t filled = m->slots + 15 * least(m->experts, m->slots); /* every expert's last block may be almost empty */
    size_t all = arranged(m, filled / 16 * 16), batch = arranged(m, least(most, BATCH));
    const size_t round = batch > ROUND ? batch : ROUND;
    return (size_t)m->threads * SCRATCH + (all < round ? all : round);
}

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

/* An expert batch: up to BATCH slots of one expert. `x` has their activations in tiles, [blocks of 16][steps], and
 * `sums` the sums of activations over each step's columns, [blocks][steps][16]. */
typedef struct {
    const Job *job;
    int64_t first, count;
    int64_t blocks; /* blocks of activations that the batch arranges: 0 if an earlier batch has the same */
    uint8_t *x;
    float *sums;
} Batch;

typedef struct {
    int64_t batch, from, to; /* panels [from, to) of 32 rows each */
} Task;

/* sums[2][2][16][16] (+)= A B over `steps`, for na blocks of A's rows and nb blocks of B's columns. Strides between
 * rows of A, between steps and between blocks are bytes. */
typedef struct {
    const uint8_t *a, *b, *ahead; /* ahead: the next 32 rows of BF16 weights, `ahead_row` apart, or 0 */
    int64_t a_row, a_step, a_block, b_step, b_block, ahead_row, steps;
    float *sums;
    int na, nb, add;
} Multiply;

typedef struct {
    const Gemm *m;
    const Batch *batches;
    const Task *tasks;
    const int64_t *order;
    uint8_t *scratch;
    int64_t n_tasks, n_batches, steps;
    atomic_llong next, next_block, seats;
} Run;

static int level = -1;

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

/* AMX's tiles 0 to 3 have sums, 4 and 5 have A, 6 and 7 have B. */
AMX static __attribute__((noinline)) void multiply_amx(const Multiply *q) {
    const uint8_t *a = q->a, *b = q->b;
    __asm__ volatile("" ::: "memory"); /* GCC does not know that its intrinsics read and write memory */
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

static void multiply(const Multiply *q) { level > 1 ? multiply_amx(q) : multiply_avx512(q); }

/* ---- results */
WIDE static void put_block(const Gemm *m, const Job *job, const int64_t *slot, int64_t n, int64_t row, const float *sums,
                           int turned) {
    const int64_t left = job->rows - row;
    const __mmask16 mask = left >= 16 ? 0xFFFF : (1u << left) - 1;
    __m512 bias = _mm512_setzero_ps();
    if (job->bias) {
        __m256i bits = _mm256_maskz_loadu_epi16(mask, job->bias + row);
        bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    __m512i v[16];
    UNROLL for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(sums + 16 * i);
    if (turned) turn(v);
    const int twice = job->form->outer >= 0;
    const __m512 outer = _mm512_set1_ps(twice ? outer_of(job->form, job->base, row) : 1.0f);
    float made[16][16];
    UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(made[i], v[i]);
    for (int i = 0; i < n; i++) {
        __m512 value = _mm512_loadu_ps(made[i]);
        if (twice) value = _mm512_mul_ps(value, outer);
        value = _mm512_add_ps(value, bias);
        int64_t at = slot[i] * job->rows + row;
        if (m->out_bf16)
            _mm256_mask_storeu_epi16((uint16_t *)job->out + at, mask, (__m256i)_mm512_cvtneps_pbh(value));
        else
            _mm512_mask_storeu_ps((float *)job->out + at, mask, value);
    }
}

/* ---- one panel (32 rows) of one batch: sums[blocks / 2][2][2][16][16], by blocks of A and B */
static void weight_panel(const Run *run, const Batch *batch, int64_t row, uint8_t *scratch, float *sums) {
    const Gemm *m = run->m;
    const Form *f = batch->job->form;
    const uint8_t *base = batch->job->base;
    const int64_t rows = batch->job->rows;
    const int plain = f->bits == 16, mine = row + BLOCK < rows ? 2 : 1;
    const int64_t blocks = ceil_div(batch->count, 16), steps = run->steps, x_block = steps * TILE;
    const uint16_t *weight = (const uint16_t *)(base + f->low);
    for (int64_t from = 0; from < steps; from += DEPTH) {
        const int64_t n = steps - from < DEPTH ? steps - from : DEPTH;
        /* BF16 weights are copied if a tile would pass their end, and for many tokens: reading rows that are a power of
         * two apart again and again misses the first-level cache. */
        const int whole = plain && row + 32 <= rows && (from + n) * STEP <= m->cols && blocks <= 4;
        if (!plain)
            weights_panel(m, f, base, rows, row, from, n, scratch);
        else if (!whole)
            copy_panel(m, weight, rows, row, from, n, scratch);
        for (int64_t b = 0; b < blocks; b += 2) {
            const int here = b + 1 < blocks ? 2 : 1;
            const uint8_t *x = batch->x + b * x_block + from * TILE;
            Multiply q = {.steps = n, .sums = sums + 512 * b, .add = from > 0};
            if (!plain) {
                q.a = x, q.a_row = 64, q.a_step = TILE, q.a_block = x_block, q.na = here;
                q.b = scratch, q.b_step = 2 * TILE, q.b_block = TILE, q.nb = mine;
                multiply(&q);
                continue;
            }
            q.b = x, q.b_step = TILE, q.b_block = x_block, q.nb = here, q.na = mine;
            if (whole)
                q.a = (const uint8_t *)(weight + row * m->cols + from * STEP), q.a_row = 2 * m->cols, q.a_step = 64,
                q.a_block = 32 * m->cols;
            else
                q.a = scratch, q.a_row = 64, q.a_step = 2 * TILE, q.a_block = TILE;
            if (!whole && !b) /* prefetch the next rows while these are multiplied: copying does not hide its reads */
                q.ahead_row = 2 * m->cols,
                q.ahead = (const uint8_t *)(from + n < steps ? weight + row * m->cols + (from + n) * STEP
                                                             : weight + (row + 32) * m->cols);
            multiply(&q);
        }
    }
}

/* sums += scale * (made - zero * sum of x), for one block of slots and one block of rows. */
INLINE void scale_in(const int stored, const float *made, __m512 scale, __m512 less, const float *of_x, int first,
                     float *sums) {
    UNROLL for (int t = 0; t < 16; t++) {
        __m512 a = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + 16 * t);
        a = _mm512_fmadd_ps(scale, _mm512_loadu_ps(made + 16 * t), a);
        if (stored) a = _mm512_fnmadd_ps(less, _mm512_set1_ps(of_x[t]), a);
        _mm512_storeu_ps(sums + 16 * t, a);
    }
}

static int64_t code_group(const Form *f) { return f->group ? f->group : 4 * STEP; } /* columns whose sums are scaled */

/* Goes through the groups, and in each through pairs of blocks: while the tiles multiply, the next group's codes are
 * unpacked, and the sums made before are scaled. */
WIDE static void code_panel(const Run *run, const Batch *batch, int64_t row, uint8_t *scratch, float *sums) {
    const Gemm *m = run->m;
    const Form *f = batch->job->form;
    const uint8_t *base = batch->job->base;
    const int64_t rows = batch->job->rows;
    const int64_t blocks = ceil_div(batch->count, 16), pairs = ceil_div(blocks, 2), steps = run->steps;
    const int64_t group = code_group(f), of = group / STEP, groups = ceil_div(m->cols, group), block = row / BLOCK;
    const int mine = row + BLOCK < rows ? 2 : 1, width = low_bits(codes_of(f)) + two_planes(codes_of(f));
    const __m512 unit = _mm512_set1_ps(1.0f / (1 << (8 - width)));
    const __m512 middle = _mm512_set1_ps(-(float)((1 << width) - 1) / 2);
    float made[2][1024], of_x[16];
    __m512 scale[2], less[2];
    for (int64_t k = -1; k < groups * pairs; k++) {
        const int64_t then = k + 1, g = k / pairs, b = 2 * (k % pairs);
        if (then < groups * pairs) {
            const int64_t from = then / pairs * of, n = steps - from < of ? steps - from : of, at = 2 * (then % pairs);
            uint8_t *unpacked = scratch + then / pairs % 2 * DEPTH * TILE;
            if (!at) codes_panel(m, f, base, rows, row, from, n, unpacked);
            Multiply q = {.steps = n, .sums = made[then % 2], .na = at + 1 < blocks ? 2 : 1, .nb = mine};
            q.a = batch->x + (at * steps + from) * TILE, q.a_row = 64, q.a_step = TILE, q.a_block = steps * TILE;
            q.b = unpacked, q.b_step = 2 * TILE, q.b_block = TILE;
            multiply(&q);
        }
        if (k < 0) continue;
        if (!b)
            for (int r = 0; r < mine; r++) {
                const int64_t at = ((block + r) * groups + g) * BLOCK;
                scale[r] = scale_row(f, base, block + r, groups, g);
                if (f->zeros == SYMMETRIC) less[r] = _mm512_mul_ps(scale[r], _mm512_set1_ps(0.5f));
                if (f->zeros == STORED)
                    less[r] = _mm512_mul_ps(scale[r], _mm512_fmadd_ps(BYTES(base + f->zero + at), unit, middle));
            }
        for (int i = 0; i < 2 && b + i < blocks; i++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t s = g * of; s < steps && s < (g + 1) * of; s++)
                sum = _mm512_add_ps(sum, _mm512_loadu_ps(batch->sums + ((b + i) * steps + s) * 16));
            _mm512_storeu_ps(of_x, sum);
            for (int r = 0; r < mine; r++) {
                const int at = 512 * i + 256 * r;
                if (f->zeros != MIDPOINT)
                    scale_in(1, made[k % 2] + at, scale[r], less[r], of_x, !g, sums + 512 * b + at);
                else
                    scale_in(0, made[k % 2] + at, scale[r], less[r], of_x, !g, sums + 512 * b + at);
            }
        }
    }
}

static void panel(const Run *run, const Batch *batch, int64_t row, uint8_t *scratch) {
    const Gemm *m = run->m;
    const Job *job = batch->job;
    const int plain = job->form->bits == 16;
    const int64_t blocks = ceil_div(batch->count, 16);
    float *sums = (float *)(scratch + 2 * DEPTH * TILE);
    /* Measured: scaling sums is faster up to some 100 tokens in groups of 128, 50 in groups of 64. */
    const int exact = job->form->bits >= 16 && job->form->bits <= MXFP8; /* in BF16, scales and all but an outer one */
    const int few = !exact && !is_trellis(codes_of(job->form)) && 2 * blocks * STEP <= 3 * code_group(job->form);
    (few ? code_panel : weight_panel)(run, batch, row, scratch, sums);
    for (int64_t b = 0; b < blocks; b++)
        for (int r = 0; r < 2 && row + 16 * r < job->rows; r++) {
            const int64_t at = plain ? 2 * r + b % 2 : 2 * (b % 2) + r, first = 16 * b;
            const int64_t n = batch->count - first < 16 ? batch->count - first : 16;
            put_block(m, job, run->order + batch->first + first, n, row + 16 * r,
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
            panel(run, run->batches + run->tasks[i].batch, 32 * u, scratch);
    if (level > 1) release();
}

static void arrange_all(void *argument) {
    Run *run = argument;
    int64_t i, before = 0, batch = 0;
    while (1) { /* blocks of all batches, one after another */
        i = atomic_fetch_add_explicit(&run->next_block, 1, memory_order_relaxed);
        for (; batch < run->n_batches && i >= before + run->batches[batch].blocks; batch++)
            before += run->batches[batch].blocks;
        if (batch == run->n_batches) return;
        const Batch *p = run->batches + batch;
        const int64_t first = 16 * (i - before), n = p->count - first < 16 ? p->count - first : 16;
        arrange(run->m, run->order + p->first + first, n, p->job->form->bits == 16, run->steps,
                p->x + (i - before) * run->steps * TILE, p->sums + (i - before) * run->steps * 16);
    }
}

int moepack_tiles_level(int limit) {
    level = limit;
    if (level > 1 && syscall(SYS_arch_prctl, 0x1023, 18)) level = 1; /* Linux enables AMX's state on request */
    return level;
}

/* Finds an earlier batch, of another matrix, that has arranged the same slots' activations; else returns 0. */
static const Batch *arranged_by(const Batch *batches, int64_t n, const Job *job, int64_t first, int64_t count) {
    while (n-- && batches[n].job->first == job->first)
        if (batches[n].first == first && batches[n].count == count &&
            (batches[n].job->form->bits == 16) == (job->form->bits == 16))
            return batches + n;
    return 0;
}

int moepack_tiles_product(const Gemm *m, const Job *jobs, int64_t n, const int64_t *order, Arena *arena) {
    const int64_t steps = ceil_div(m->cols, STEP);
    int64_t batches_of = 0, tasks_of = 0;
    for (int64_t j = 0; j < n; j++) {
        batches_of += ceil_div(jobs[j].count, BATCH);
        tasks_of += ceil_div(jobs[j].count, BATCH) * ceil_div(jobs[j].rows, 32);
    }
    Batch *batches = malloc((size_t)batches_of * sizeof(Batch) + (size_t)tasks_of * sizeof(Task));
    if (!batches) return 1;
    Task *tasks = (Task *)(batches + batches_of);
    int failed = 0;
    for (int64_t j = 0, done = 0; j < n && !failed;) { /* one round: all slots for which there is room */
        int64_t n_batches = 0, n_tasks = 0, cost = 0;
        const size_t scratch = (size_t)m->threads * SCRATCH;
        size_t at = scratch;
        while (j < n) {
            const Job *job = jobs + j;
            int64_t count = least(job->count - done, BATCH);
            const Batch *same = arranged_by(batches, n_batches, job, job->first + done, count);
            if (n_batches && !same && at + arranged(m, count) > scratch + ROUND) break;
            batches[n_batches++] = (Batch){job, job->first + done, count, same ? 0 : ceil_div(count, 16),
                                           same ? same->x : (uint8_t *)at, 0};
            at += same ? 0 : arranged(m, count);
            cost += (ceil_div(count, 32) + 4) * ceil_div(job->rows, 32); /* unpacking takes as long as some products */
            done += count;
            if (done == job->count) j++, done = 0;
        }
        failed = grow(arena, at);
        if (failed) break;
        const int64_t share = cost / (m->threads * 8) + 1;
        for (int64_t i = 0; i < n_batches; i++) {
            batches[i].x += (uintptr_t)arena->at;
            batches[i].sums = (float *)(batches[i].x + ceil_div(batches[i].count, 16) * steps * TILE);
            const int64_t panels = ceil_div(batches[i].job->rows, 32);
            const int64_t step = m->threads < 2 ? panels : share / (ceil_div(batches[i].count, 32) + 4) + 1;
            for (int64_t u = 0; u < panels; u += step)
                tasks[n_tasks++] = (Task){i, u, u + step < panels ? u + step : panels};
        }
        Run run = {.m = m, .batches = batches, .tasks = tasks, .order = order, .scratch = arena->at};
        run.n_tasks = n_tasks, run.n_batches = n_batches, run.steps = steps;
        atomic_init(&run.next, 0);
        atomic_init(&run.next_block, 0);
        atomic_init(&run.seats, 0);
        moepack_parallel(arrange_all, &run, (int)m->threads);
        moepack_parallel(run_tasks, &run, n_tasks < m->threads ? (int)n_tasks : (int)m->threads);
    }
    free(batches);
    return failed;
}
#else
int moepack_tiles_level(int limit) { return limit * 0; }

int moepack_tiles_product(const Gemm *m, const Job *jobs, int64_t n, const int64_t *order, Arena *arena) {
    (void)m, (void)jobs, (void)n, (void)order, (void)arena;
    return 1;
}
#endif
