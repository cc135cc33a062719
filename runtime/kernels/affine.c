/* Experts' products on a CPU, straight from their extents: y = W x + b for all (expert, activations) pairs of one matrix
 * of a layer, whatever versions its experts are in, in one call on some threads. FORMAT.md, "Affine extents".
 *
 * The caller vouches for every address and size. Sums are float32 and made in one order, so neither threads nor the
 * experts beside it change a result's bits. The loops are in affine_rows.h, for AVX-512, for AVX2 and in plain C; which of
 * them runs is chosen at the first call. A thread pool is kept here, or the caller's (OpenMP's) is used.
 */
#include <pthread.h>

#include "affine.h"

#define UNIT 64 /* rows that one step of work makes */
#define QUAD 4.0f /* tables of four one-bit codes are for codes worth 4: the high plane of three bits */
#define CACHE (24 << 20) /* bytes of prepared activations at a time */
#define LEAD 24 /* lines that are fetched ahead of their use, in each of the streams that are read at once */
#define UNROLL _Pragma("GCC unroll 16")

/* Weights of rows [from, to) of one matrix of an affine version, transposed: out[c * ld + row - from]. `from` is a multiple
 * of 16; whole blocks are written. */
typedef struct {
    int64_t cols, from, to, ld, out_bf16, threads;
    const uint8_t *base;
    const Form *form;
    void *out;
} Unpack;

/* One activation, widened; its sums over 32, 64 and 128 columns; its tables, where a version at hand reads them. */
typedef struct {
    float *x, *sums[3], *quads, *pairs;
} Prepared;

/* What a thread reads after the rows it is at. The processor's own prefetching loses a stream where a block of rows ends and
 * another begins, so the kernels fetch LEAD lines ahead, across that edge: one token's product of 1536 x 2048 then takes
 * 1.1 times what reading takes, at every width; it was 1.3 at 4 bits and 1.8 at 1 bit with hints inside a block only. */
typedef struct {
    const Form *form;
    const uint8_t *base;
    int64_t row;
} Next;

typedef struct {
    const uint8_t *low, *high, *scale, *zero;
} Ahead;

static inline Ahead look_ahead(const Side *m, const Form *f, const uint8_t *base, int64_t row) {
    if (f->bits == 16) {
        const uint8_t *at = base + f->low + 2 * row * m->cols;
        return (Ahead){at, at, at, at};
    }
    const int64_t groups = ceil_div(m->cols, f->group), block = row / BLOCK, lane = row % BLOCK;
    const int64_t words = ceil_div(m->cols * (f->bits == 3 ? 2 : f->bits), 32);
    return (Ahead){base + f->low + 4 * (block * words * BLOCK + lane),
                   base + f->high + 4 * (block * ceil_div(m->cols, 32) * BLOCK + lane),
                   base + f->scale + 2 * (block * groups * BLOCK + lane), base + f->zero + block * groups * BLOCK + lane};
}

/* n results for one slot from row `row` on, `stride` apart: bias added, stored. */
static inline void put(const Side *m, const Form *f, const uint8_t *base, int64_t slot, int64_t row, int64_t n,
                       const float *from, int stride) {
    const uint16_t *bias = f->bias < 0 ? 0 : (const uint16_t *)(base + f->bias) + row;
    int64_t at = slot * m->rows + row;
    for (int64_t i = 0; i < n; i++) {
        float value = bias ? from[i * stride] + widen(bias[i]) : from[i * stride];
        if (m->out_bf16)
            ((uint16_t *)m->out)[at + i] = narrow(value);
        else
            ((float *)m->out)[at + i] = value;
    }
}

static const float quad_of[4][16] = {
#define Q(a, b) QUAD * a / 2, QUAD * b / 2
    {Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1)},
    {Q(-1, -1), Q(1, 1), Q(-1, -1), Q(1, 1), Q(-1, -1), Q(1, 1), Q(-1, -1), Q(1, 1)},
    {Q(-1, -1), Q(-1, -1), Q(1, 1), Q(1, 1), Q(-1, -1), Q(-1, -1), Q(1, 1), Q(1, 1)},
    {Q(-1, -1), Q(-1, -1), Q(-1, -1), Q(-1, -1), Q(1, 1), Q(1, 1), Q(1, 1), Q(1, 1)},
};
static const float pair_of[2][16] = {
    {-1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f},
    {-1.5f, -1.5f, -1.5f, -1.5f, -.5f, -.5f, -.5f, -.5f, .5f, .5f, .5f, .5f, 1.5f, 1.5f, 1.5f, 1.5f},
};

static const float two_bits[16] = {-1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f,
                                   -1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f};
static const float one_bit[16] = {-.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f};

/* ---- plain C */
#define NAME(x) x##_c
#define INLINE static inline __attribute__((always_inline))
#define CALLED static
#define L 1
#define RB 4
#define TB 2
#define R2 4
#define R4 4
#define F float
#define I uint32_t
#define T16 const float *
#define LOADI(p) (*(p))
#define LOADF(p) (*(p))
#define STOREF(p, v) (*(p) = (v))
#define LOADT(p) (p)
#define SET(v) (v)
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define FMA(a, b, c) ((a) * (b) + (c))
#define NFMA(a, b, c) ((c) - (a) * (b))
#define SUM(a) (a)
#define DROP(w, n) ((w) >> (n))
#define LOOKUP(t, w) ((t)[(w) & 15])
#define CODE4(w) ((float)(int)((w) & 15) - 7.5f)
#define BF16(p) widen(*(p))
#define STOREB(p, v) (*(p) = narrow(v))
#define STOREB2(p, v, w) (STOREB(p, v), STOREB((p) + 1, w))
#define BYTES(p) ((float)*(p))
#define STREAM(p) (void)(p)
#include "affine_rows.h"
#include "affine_undefine.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>

/* ---- AVX2 */
typedef struct {
    __m256 low, high;
} Table8;
#define NAME(x) x##_avx2
#define INLINE __attribute__((target("avx2,fma"))) static inline __attribute__((always_inline))
#define CALLED __attribute__((target("avx2,fma"))) static
#define L 8
#define RB 4
#define TB 2
#define R2 4
#define R4 4
#define F __m256
#define I __m256i
#define T16 Table8
#define LOADI(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOADF(p) _mm256_loadu_ps(p)
#define STOREF(p, v) _mm256_storeu_ps(p, v)
#define LOADT(p) ((Table8){_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8)})
#define SET(v) _mm256_set1_ps(v)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define NFMA(a, b, c) _mm256_fnmadd_ps(a, b, c)
#define SUM(a) sum_avx2(a)
#define DROP(w, n) _mm256_srli_epi32(w, n)
#define LOOKUP(t, w) look_up_avx2(t, w)
#define CODE4(w) _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(w, _mm256_set1_epi32(15))), _mm256_set1_ps(7.5f))
#define BF16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define STOREB(p, v) store_bf16_avx2(p, v)
#define STOREB2(p, v, w) (STOREB(p, v), STOREB((p) + 8, w))
#define BYTES(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define STREAM(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)

INLINE __m256 look_up_avx2(Table8 t, __m256i w) { /* a permutation takes 3 bits; the fourth chooses between two */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, w), _mm256_permutevar8x32_ps(t.high, w),
                            _mm256_castsi256_ps(_mm256_slli_epi32(w, 28)));
}

INLINE void store_bf16_avx2(uint16_t *to, __m256 v) { /* as narrow(), of numbers */
    __m256i w = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
    w = _mm256_srli_epi32(_mm256_add_epi32(w, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(w, w), 8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}

INLINE float sum_avx2(__m256 a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
#include "affine_rows.h"
#include "affine_undefine.h"

/* ---- AVX-512 */
#define NAME(x) x##_avx512
#define INLINE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) static inline __attribute__((always_inline))
#define CALLED __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) static
#define L 16
#define RB 4
#define TB 4
#define R2 4
#define R4 4
#define F __m512
#define I __m512i
#define T16 __m512
#define LOADI(p) _mm512_loadu_si512(p)
#define LOADF(p) _mm512_loadu_ps(p)
#define STOREF(p, v) _mm512_storeu_ps(p, v)
#define LOADT(p) _mm512_loadu_ps(p)
#define SET(v) _mm512_set1_ps(v)
#define ADD(a, b) _mm512_add_ps(a, b)
#define SUB(a, b) _mm512_sub_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define NFMA(a, b, c) _mm512_fnmadd_ps(a, b, c)
#define SUM(a) _mm512_reduce_add_ps(a)
#define DROP(w, n) _mm512_srli_epi32(w, n)
#define LOOKUP(t, w) _mm512_permutexvar_ps(w, t)
#define CODE4(w) \
    _mm512_permutexvar_ps(w, _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f, 3.5f, \
                                            4.5f, 5.5f, 6.5f, 7.5f))
#define BF16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define STOREB2(p, v, w) store_bf16_avx512(p, v, w)
#define STOREB(p, v) _mm256_storeu_si256((__m256i *)(p), narrow_avx512(v))
#define BYTES(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define STREAM(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)

/* As narrow(), of numbers, the results in the high halves; the processor's own conversion drops denormal ones. */
INLINE __m512i rounded_avx512(__m512 v) {
    __m512i w = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(w, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(w, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}

INLINE __m256i narrow_avx512(__m512 v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_avx512(v), 16)); }

INLINE void store_bf16_avx512(uint16_t *to, __m512 v, __m512 w) {
    const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                          21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(rounded_avx512(v), high, rounded_avx512(w)));
}
#include "affine_rows.h"
#include "affine_undefine.h"
#endif

typedef struct {
    void (*prepare)(const Side *, const void *, Prepared *);
    void (*rows)(const Side *, const Form *, const uint8_t *, int64_t, int64_t, const Prepared *const *, const int64_t *,
                 int64_t, const Next *);
    void (*unpack)(const Unpack *, int64_t, int64_t, uint8_t *);
} Loops;

static Loops loops = {prepare_c, rows_c, unpack_rows_c};

/* Use instruction sets up to `limit`: 0 plain C, 1 AVX2, 2 AVX-512, and for tiles 3 its BF16 and 4 AMX. Returns the one
 * taken. */
int moepack_affine_level(int limit) {
    int best = 0;
    loops = (Loops){prepare_c, rows_c, unpack_rows_c};
#ifdef HAVE_X86
    if (limit > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        best = 1, loops = (Loops){prepare_avx2, rows_avx2, unpack_rows_avx2};
    if (limit > 1 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        best = 2, loops = (Loops){prepare_avx512, rows_avx512, unpack_rows_avx512};
#endif
    return best + moepack_tiles_level(best == 2 ? limit - 2 : 0);
}

/* ---- one product */
typedef struct {
    int64_t job, from, to; /* units */
} Task;

typedef struct {
    const Side *m;
    const Job *jobs;
    const Task *tasks;
    const int64_t *order, *source;  /* slots by expert; of each prepared activation, which it is */
    const Prepared *const *of_slot; /* beside `order` */
    Prepared *prepared;
    int64_t n_tasks, n_prepared;
    atomic_llong next, next_prepared;
} Run;

static void prepare_all(void *argument) {
    Run *run = argument;
    const Side *m = run->m;
    int64_t size = m->cols * (m->x_bf16 ? 2 : 4), i;
    while ((i = atomic_fetch_add_explicit(&run->next_prepared, 1, memory_order_relaxed)) < run->n_prepared)
        loops.prepare(m, (const uint8_t *)m->x + run->source[i] * size, run->prepared + i);
}

static void run_tasks(void *argument) {
    Run *run = argument;
    const Side *m = run->m;
    int64_t i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed), after;
    for (; i < run->n_tasks; i = after) {
        after = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed); /* known early, to be fetched early */
        const Task *task = run->tasks + i, *then = run->tasks + (after < run->n_tasks ? after : i);
        const Job *job = run->jobs + task->job, *then_job = run->jobs + then->job;
        for (int64_t u = task->from; u < task->to; u++) {
            int64_t row = u * UNIT, end = row + UNIT < m->rows ? row + UNIT : m->rows;
            Next next = {job->form, job->base, row + UNIT};
            if (u + 1 == task->to) next = (Next){then_job->form, then_job->base, then->from * UNIT};
            loops.rows(m, job->form, job->base, row, end, run->of_slot + job->first, run->order + job->first, job->count,
                       &next);
        }
    }
}

static Arena kept; /* grows to what calls need; its lock is `arena_lock` */
static pthread_mutex_t arena_lock = PTHREAD_MUTEX_INITIALIZER;

#define NEEDS_QUADS 1
#define NEEDS_PAIRS 2

static size_t prepared_size(const Side *m, int needs) {
    size_t padded = 32 * (size_t)ceil_div(m->cols, 32);
    size_t floats = padded + 3 * (padded / 32 + 16) + (needs & NEEDS_QUADS ? 4 * padded : 0) +
                    (needs & NEEDS_PAIRS ? 8 * padded : 0);
    return 4 * ((floats + 15) / 16 * 16);
}

static void place(const Side *m, int needs, uint8_t *at, Prepared *p) {
    size_t padded = 32 * (size_t)ceil_div(m->cols, 32);
    float *next = (float *)at;
    p->x = next, next += padded;
    p->quads = needs & NEEDS_QUADS ? next : 0, next += needs & NEEDS_QUADS ? 4 * padded : 0;
    p->pairs = needs & NEEDS_PAIRS ? next : 0, next += needs & NEEDS_PAIRS ? 8 * padded : 0;
    for (int k = 0; k < 3; k++) p->sums[k] = next, next += padded / 32 + 16;
}

/* Jobs [first, last): their activations, then their rows. */
static int some_jobs(const Side *m, const Job *jobs, int64_t first, int64_t last, const int64_t *order, int64_t *seat,
                     Arena *arena) {
    int64_t activations = ceil_div(m->slots, m->share), n = 0, begin = jobs[first].first;
    int64_t slots = jobs[last - 1].first + jobs[last - 1].count - begin, units = ceil_div(m->rows, UNIT);
    int64_t most = slots < activations ? slots : activations, cost = 0;
    int64_t max_tasks = (last - first) * units;
    /* seat: of each activation, 0 or 1 + its place among the prepared; entries that are used are 0 again at the end */
    size_t head = sizeof(Prepared) * (size_t)most + sizeof(int64_t) * 2 * (size_t)most +
                  sizeof(void *) * (size_t)slots + sizeof(Task) * (size_t)max_tasks;
    size_t room = (head + 63) / 64 * 64 + prepared_size(m, 3) * (size_t)most;
    if (grow(arena, room)) return 1;
    uint8_t *at = arena->at;
    Prepared *prepared = (Prepared *)at;
    int64_t *source = (int64_t *)(prepared + most), *needs = source + most;
    const Prepared **of_slot = (const Prepared **)(needs + most);
    Task *tasks = (Task *)(of_slot + slots);
    at += (head + 63) / 64 * 64;
    for (int64_t j = first; j < last; j++) {
        int64_t bits = jobs[j].form->bits;
        int64_t need = bits == 1 ? NEEDS_QUADS : bits == 2 ? NEEDS_PAIRS : bits == 3 ? NEEDS_QUADS | NEEDS_PAIRS : 0;
        cost += units * jobs[j].count;
        for (int64_t i = 0; i < jobs[j].count; i++) {
            int64_t which = order[jobs[j].first + i] / m->share;
            if (!seat[which]) source[n] = which, needs[n] = 0, seat[which] = ++n;
            needs[seat[which] - 1] |= need;
            of_slot[jobs[j].first - begin + i] = prepared + seat[which] - 1;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        place(m, (int)needs[i], at, prepared + i);
        at += prepared_size(m, (int)needs[i]);
        seat[source[i]] = 0;
    }
    int64_t share = cost / (m->threads * 8) + 1, n_tasks = 0; /* work of one task, so that the last ones even out */
    for (int64_t j = first; j < last; j++) {
        int64_t step = m->threads < 2 ? units : share / jobs[j].count + 1;
        for (int64_t u = 0; u < units; u += step)
            tasks[n_tasks++] = (Task){j, u, u + step < units ? u + step : units};
    }
    Run run = {.m = m, .jobs = jobs, .tasks = tasks, .order = order, .source = source, .prepared = prepared};
    run.of_slot = of_slot - begin, run.n_tasks = n_tasks, run.n_prepared = n;
    atomic_init(&run.next, 0);
    atomic_init(&run.next_prepared, 0);
    moepack_parallel(prepare_all, &run, n < m->threads ? (int)n : (int)m->threads);
    moepack_parallel(run_tasks, &run, n_tasks < m->threads ? (int)n_tasks : (int)m->threads);
    return 0;
}

/* Returns 0, or 1 when memory is short. */
int moepack_affine_product(const Side *m) {
    int64_t activations = ceil_div(m->slots, m->share);
    int64_t *count = calloc((size_t)(m->experts + 1 + m->slots + activations), sizeof(int64_t));
    Job *jobs = malloc((size_t)(m->experts + 1) * sizeof(Job));
    if (!count || !jobs) {
        free(count), free(jobs);
        return 1;
    }
    int64_t *order = count + m->experts + 1, *seat = order + m->slots, n = 0, late = m->experts + 1, at = 0;
    for (int64_t s = 0; s < m->slots; s++)
        if (m->index[s] >= 0 && m->index[s] < m->experts) count[m->index[s]]++;
    for (int64_t e = 0; e < m->experts; e++) {
        int64_t here = count[e];
        count[e] = -1;
        const int many = here > m->limits[m->handles[e] & 63];
        if (!here || (many && !m->tiles)) continue;
        const uint8_t *base = (const uint8_t *)(m->handles[e] & ~(uint64_t)63);
        jobs[many ? --late : n++] = (Job){base, m->forms + (m->handles[e] & 63), at, here};
        count[e] = at;
        at += here;
    }
    for (int64_t s = 0; s < m->slots; s++) {
        int64_t e = m->index[s];
        if (e >= 0 && e < m->experts && count[e] >= 0) order[count[e]++] = s;
    }
    Arena own = {0, 0}, *arena = &own;
    int mine = !pthread_mutex_trylock(&arena_lock), failed = 0;
    if (mine) arena = &kept;
    size_t each = prepared_size(m, 3);
    for (int64_t j = 0; j < n && !failed;) { /* as many experts at a time as their prepared activations have room */
        int64_t end = j, slots = 0;
        while (end < n && (end == j || (size_t)(slots + jobs[end].count) * each <= CACHE)) slots += jobs[end++].count;
        failed = some_jobs(m, jobs, j, end, order, seat, arena);
        j = end;
    }
    if (!failed && late <= m->experts) failed = moepack_tiles_product(m, jobs + late, m->experts + 1 - late, order, arena);
    if (mine)
        pthread_mutex_unlock(&arena_lock);
    else
        free(own.at);
    free(count), free(jobs);
    return failed;
}

/* ---- weights, for products of many tokens that another library makes */
typedef struct {
    const Unpack *m;
    atomic_llong next;
} UnpackRun;

static void unpack_all(void *argument) {
    UnpackRun *run = argument;
    const Unpack *m = run->m;
    int64_t row;
    while ((row = m->from + UNIT * atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < m->to)
        loops.unpack(m, row, row + UNIT < m->to ? UNIT : m->to - row,
                     (uint8_t *)m->out + (row - m->from) * (m->out_bf16 ? 2 : 4));
}

void moepack_affine_unpack(const Unpack *m) {
    UnpackRun run = {.m = m};
    atomic_init(&run.next, 0);
    int64_t units = ceil_div(m->to - m->from, UNIT);
    moepack_parallel(unpack_all, &run, units < m->threads ? (int)units : (int)m->threads);
}

/* ---- a token's experts, weighted and added in the order of its slots */
typedef struct {
    int64_t tokens, top_k, cols, experts, from_bf16, out_bf16, round, threads; /* round: weighted results to BF16 */
    const void *from;     /* [tokens * top_k, cols] */
    const int64_t *index; /* slots of experts past the last are left out */
    const float *gates;
    void *out; /* [tokens, cols] */
} Combine;

typedef struct {
    const Combine *m;
    atomic_llong next;
} CombineRun;

static void combine_all(void *argument) {
    enum { PART = 512 };
    CombineRun *run = argument;
    const Combine *m = run->m;
    int64_t parts = ceil_div(m->cols, PART), i;
    while ((i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < parts * m->tokens) {
        int64_t token = i / parts, first = i % parts * PART, n = m->cols - first < PART ? m->cols - first : PART;
        float sum[PART] = {0};
        for (int64_t s = token * m->top_k; s < (token + 1) * m->top_k; s++) {
            if (m->index[s] < 0 || m->index[s] >= m->experts) continue;
            int64_t at = s * m->cols + first;
            float gate = m->gates[s];
            if (m->round)
                for (int64_t c = 0; c < n; c++)
                    sum[c] += widen(narrow(gate * widen(((const uint16_t *)m->from)[at + c])));
            else if (m->from_bf16)
                for (int64_t c = 0; c < n; c++) sum[c] += gate * widen(((const uint16_t *)m->from)[at + c]);
            else
                for (int64_t c = 0; c < n; c++) sum[c] += gate * ((const float *)m->from)[at + c];
        }
        int64_t at = token * m->cols + first;
        if (m->out_bf16)
            for (int64_t c = 0; c < n; c++) ((uint16_t *)m->out)[at + c] = narrow(sum[c]);
        else
            memcpy((float *)m->out + at, sum, sizeof(float) * (size_t)n);
    }
}

void moepack_affine_combine(const Combine *m) {
    CombineRun run = {.m = m};
    atomic_init(&run.next, 0);
    moepack_parallel(combine_all, &run, m->tokens * m->cols < 32768 ? 1 : (int)m->threads);
}
