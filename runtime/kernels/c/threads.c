/* Threads for the CPU kernels: the caller's OpenMP (GOMP_parallel, so that one set of threads serves torch and us), or a
 * pool of our own. And a loop that reads memory, for comparison. */
#include <pthread.h>
#include <unistd.h>

#include "gemm.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel borrowed = 0;

void moepack_affine_threads(Parallel parallel) { borrowed = parallel; }

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*work)(void *);
    void *argument;
    int started, wanted;
    atomic_uint round;
    atomic_int left;
} Pool;

static Pool pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* one call at a time has the pool; others run on one thread */

static void *worker(void *number) {
    unsigned seen = 0;
    for (;;) {
        for (int spin = 0; spin < 20000 && atomic_load_explicit(&pool.round, memory_order_acquire) == seen; spin++)
#ifdef __x86_64__
            _mm_pause();
#else
            ;
#endif
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.round);
        int mine = (int)(intptr_t)number < pool.wanted;
        void (*work)(void *) = pool.work;
        void *argument = pool.argument;
        pthread_mutex_unlock(&pool.lock);
        if (mine) {
            work(argument);
            atomic_fetch_sub(&pool.left, 1);
        }
    }
    return 0;
}

static void after_fork(void) { /* a child process has none of its parent's threads */
    pool = (Pool){.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
    pthread_mutex_init(&busy, 0);
}

static void parallel(void (*work)(void *), void *argument, int threads) {
    if (threads < 2) {
        work(argument);
        return;
    }
    if (borrowed) {
        borrowed(work, argument, (unsigned)threads, 0);
        return;
    }
    if (pthread_mutex_trylock(&busy)) {
        work(argument);
        return;
    }
    static int registered;
    if (!registered) registered = !pthread_atfork(0, 0, after_fork);
    pthread_mutex_lock(&pool.lock);
    while (pool.started < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)pool.started)) break;
        pthread_detach(thread);
        pool.started++;
    }
    pool.work = work, pool.argument = argument;
    pool.wanted = threads - 1 < pool.started ? threads - 1 : pool.started;
    atomic_store(&pool.left, pool.wanted);
    atomic_fetch_add_explicit(&pool.round, 1, memory_order_release);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(argument);
    while (atomic_load(&pool.left)) {
#ifdef __x86_64__
        _mm_pause();
#endif
    }
    pthread_mutex_unlock(&busy);
}

typedef struct {
    void (*work)(void *);
    void *argument;
} Task;

/* Codes count from 2^-120, so that those of subnormal FP8 numbers are denormal floats: a thread that takes denormals for
 * zeros (torch.set_flush_denormal) does not while it works here. */
static void with_denormals(void *task) {
    const Task *t = task;
#ifdef __x86_64__
    const unsigned before = _mm_getcsr(), flushes = before & 0x8040; /* flush to zero, denormals are zero */
    if (flushes) _mm_setcsr(before & ~0x8040u);
    t->work(t->argument);
    if (flushes) _mm_setcsr(before);
#else
    t->work(t->argument);
#endif
}

void moepack_parallel(void (*work)(void *), void *argument, int threads) {
    Task task = {work, argument};
    parallel(with_denormals, &task, threads);
}

typedef struct {
    Piece *piece;
    const void *of;
    int64_t n;
    uint8_t *rooms;
    size_t each;
    atomic_llong next, seats;
} Pieces;

static void some_pieces(void *argument) {
    Pieces *run = argument;
    uint8_t *room = run->rooms;
    if (run->each) room += run->each * (size_t)atomic_fetch_add_explicit(&run->seats, 1, memory_order_relaxed);
    int64_t i;
    while ((i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < run->n) run->piece(run->of, i, room);
}

void moepack_pieces(Piece *piece, const void *of, int64_t n, int64_t threads, void *rooms, size_t each) {
    Pieces run = {.piece = piece, .of = of, .n = n, .rooms = rooms, .each = each};
    atomic_init(&run.next, 0);
    atomic_init(&run.seats, 0);
    moepack_parallel(some_pieces, &run, (int)least(threads, n));
}

/* ---- reading memory only: a lower bound of the time of kernels that read as many bytes */
enum { PIECE = 1 << 17 };
typedef struct {
    const uint8_t *const *at;
    int64_t size;
    atomic_llong *total;
} Reading;

#ifdef __x86_64__
__attribute__((target("avx2"))) static int64_t read_avx2(const uint8_t *at, int64_t size) {
    __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t i = 0; i + 128 <= size; i += 128) {
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++)
            sum[k] = _mm256_add_epi64(sum[k], _mm256_loadu_si256((const __m256i *)(at + i + 32 * k)));
    }
    sum[0] = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    return _mm256_extract_epi64(sum[0], 0) + _mm256_extract_epi64(sum[0], 2);
}
#endif

static int64_t read_c(const uint8_t *at, int64_t size) {
    uint64_t sum = 0;
    for (int64_t i = 0; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, at + i, 8);
        sum += word;
    }
    return (int64_t)sum;
}

static void read_piece(const void *of, int64_t number, void *room) {
    const Reading *run = of;
    const int64_t pieces = ceil_div(run->size, PIECE), first = number % pieces * PIECE;
    const uint8_t *at = run->at[number / pieces] + first;
    const int64_t size = least(PIECE, run->size - first);
    int64_t sum;
    (void)room;
#ifdef __x86_64__
    sum = __builtin_cpu_supports("avx2") ? read_avx2(at, size) : read_c(at, size);
#else
    sum = read_c(at, size);
#endif
    atomic_fetch_add_explicit(run->total, sum, memory_order_relaxed);
}

/* Read `size` bytes at each of n addresses; returns a sum, so that the compiler keeps every read. */
int64_t moepack_affine_read(const uint8_t *const *at, int64_t n, int64_t size, int64_t threads) {
    atomic_llong total;
    atomic_init(&total, 0);
    const Reading run = {at, size, &total};
    moepack_pieces(read_piece, &run, ceil_div(size, PIECE) * n, threads, 0, 0);
    return atomic_load(&total);
}
