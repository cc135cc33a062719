/* Experts' products on a CPU, straight from their extents: y = W x + b for all (expert, activations) pairs of one matrix
 * of a layer, in any versions, in one call on some threads. FORMAT.md, "Affine extents".
 *
 * The caller checks every address and size; forms are checked here. Experts with few slots run straight from their
 * bytes (direct.c), those with many in tiles (affine_tiles.c).
 */
#include <pthread.h>

#include "../../../pack/codec/isa.h"
#include "gemm.h"

/* ---- the loops for this processor */
const Loops *moepack_floats = &moepack_floats_plain, *moepack_fixed = &moepack_fixed_plain;
const Loops *moepack_fp8[2] = {&moepack_fp8_plain, &moepack_fp8_plain};
Unpacking *moepack_unpacking = moepack_unpack_plain;
int moepack_hints = 0, moepack_vectors = 0, moepack_bf16 = 0;
const char *moepack_affine_sources = MOEPACK_SOURCES; /* the digest of the files that this library is made of */

/* Use instruction sets up to `limit`, a level of isa.h; returns the level in use. */
int moepack_affine_level(int limit) {
    int best = (int)least(limit, isa_level());
    moepack_floats = &moepack_floats_plain, moepack_fixed = &moepack_fixed_plain;
    moepack_fp8[0] = &moepack_fp8_plain, moepack_unpacking = moepack_unpack_plain;
#ifdef HAVE_X86
    moepack_hints = __builtin_cpu_is("intel") || __builtin_cpu_is("znver3");
    if (best >= ISA_AVX2) {
        moepack_floats = &moepack_floats_avx2, moepack_fixed = &moepack_fixed_avx2;
        moepack_fp8[0] = &moepack_fp8_avx2, moepack_unpacking = moepack_unpack_avx2;
    }
    if (best >= ISA_AVX512) {
        moepack_floats = &moepack_floats_avx512, moepack_fixed = &moepack_fixed_avx512;
        moepack_fp8[0] = &moepack_fp8_avx512, moepack_unpacking = moepack_unpack_avx512;
    }
    if (best >= ISA_AVX512_VNNI) moepack_fixed = &moepack_fixed_vnni;
#endif
    moepack_bf16 = best >= ISA_AVX512_BF16;
    moepack_vectors = best < ISA_AVX2 ? 0 : best < ISA_AVX512 ? 1 : 2;
    moepack_fp8[1] = moepack_bf16 ? &moepack_fp8_bf16 : moepack_fp8[0];
    const int below = (int)least(best, ISA_AVX512_VNNI);
    return below + moepack_tiles_level(best - below);
}

static Arena kept; /* memory for all calls, which grows as they need; guarded by `arena_lock` */
static pthread_mutex_t arena_lock = PTHREAD_MUTEX_INITIALIZER;

static void arena_after_fork(void) { /* in a child process: another thread of the parent may have held the lock */
    if (pthread_mutex_trylock(&arena_lock)) kept = (Arena){0, 0};
    pthread_mutex_init(&arena_lock, 0);
}

__attribute__((constructor)) static void arena_at_fork(void) { pthread_atfork(0, 0, arena_after_fork); }

/* Runs n jobs of `slots` slots in all from their bytes, `many` in tiles. `seat`: a zero for each activation. */
static int run_jobs(const Gemm *m, Job *jobs, int64_t n, Job *late, int64_t many, int64_t slots, const int64_t *order,
                    int64_t *seat) {
    Arena own = {0, 0}, *arena = &own;
    int failed = 0, mine = !pthread_mutex_trylock(&arena_lock);
    if (mine) arena = &kept;
    if (n) failed = moepack_direct_product(m, jobs, n, slots, order, seat, arena);
    if (many && !failed) failed = moepack_tiles_product(m, late, many, order, arena);
    if (mine)
        pthread_mutex_unlock(&arena_lock);
    else
        free(own.at);
    return failed;
}

/* Returns 0; 1 when memory is short; or, having done nothing, 2 + the number of a version without kernels. */
int moepack_affine_product(const Gemm *m) {
    int64_t activations = ceil_div(m->slots, m->share);
    int64_t *count = calloc((size_t)(m->experts + 1 + m->slots + activations), sizeof(int64_t));
    Job *jobs = malloc((size_t)(m->experts + 1) * sizeof(Job));
    if (!count || !jobs) {
        free(count), free(jobs);
        return 1;
    }
    int64_t *order = count + m->experts + 1, *seat = order + m->slots, n = 0, late = m->experts + 1, at = 0;
    int failed = 0;
    for (int64_t s = 0; s < m->slots; s++)
        if (m->index[s] >= 0 && m->index[s] < m->experts) count[m->index[s]]++;
    for (int64_t e = 0; e < m->experts && !failed; e++) {
        const int64_t here = count[e], version = (int64_t)(m->handles[e] & 63);
        count[e] = -1;
        if (!here) continue;
        if (version >= m->versions || !known(m->forms + version)) failed = 2 + (int)version;
        if (failed) break;
        const int many = here > m->limits[version];
        if (many && !m->tiles) continue;
        const uint8_t *base = (const uint8_t *)(m->handles[e] & ~(uint64_t)63);
        const Form *form = m->forms + version;
        const uint16_t *bias = form->bias < 0 ? 0 : (const uint16_t *)(base + form->bias);
        jobs[many ? --late : n++] = (Job){base, form, bias, m->out, m->rows, at, here};
        count[e] = at;
        at += here;
    }
    if (failed) {
        free(count), free(jobs);
        return failed;
    }
    for (int64_t s = 0; s < m->slots; s++) {
        int64_t e = m->index[s];
        if (e >= 0 && e < m->experts && count[e] >= 0) order[count[e]++] = s;
    }
    failed = run_jobs(m, jobs, n, jobs + late, m->experts + 1 - late, at, order, seat);
    free(count), free(jobs);
    return failed;
}

/* The most bytes that products of these sizes keep between calls, for any versions, limits and instruction set. Only
 * rows, cols, experts, slots, share and threads of m are read. `most`: slots that one expert can have. */
int64_t moepack_affine_kept(const Gemm *m, int64_t most) {
    const int64_t used = least(m->experts, m->slots);
    size_t direct = moepack_direct_kept(m, m->slots, used, used * ceil_div(m->rows, BLOCK));
    size_t tiles = moepack_tiles_kept(m, most);
    return (int64_t)(direct > tiles ? direct : tiles);
}

/* ---- one input times several matrices */
/* x [tokens, cols] times n matrices: writes the results [tokens, rows] into `out`, one after another. A matrix whose
 * `most` is below `tokens` runs as `many` says: it is skipped, or runs in tiles, or from its packed bytes all the same.
 * Returns 0; 1 when memory is short; or, having done nothing, 2 + the number of a matrix without a kernel. */
int moepack_affine_dense(const Dense *of, int64_t n, int64_t cols, const void *x, void *out, int64_t tokens, int64_t bf16,
                         int64_t many, int64_t threads) {
    const Gemm m = {.cols = cols, .slots = tokens, .share = 1, .x_bf16 = bf16, .out_bf16 = bf16, .threads = threads, .x = x};
    for (int64_t i = 0; i < n; i++)
        if (!known(of[i].form)) return 2 + (int)i;
    Job *jobs = malloc((size_t)n * sizeof(Job) + 2 * (size_t)tokens * sizeof(int64_t));
    if (!jobs) return 1;
    int64_t *order = (int64_t *)(jobs + n), *seat = order + tokens;
    for (int64_t t = 0; t < tokens; t++) order[t] = t, seat[t] = 0;
    int64_t few = 0, late = n;
    for (int64_t i = 0; i < n; i++) {
        Job job = {.base = of[i].base, .form = of[i].form, .bias = of[i].bias, .out = out, .rows = of[i].rows};
        job.count = tokens;
        if (tokens <= of[i].most[bf16] || many == FROM_BYTES) jobs[few++] = job;
        else if (many == IN_TILES) jobs[--late] = job;
        out = (uint8_t *)out + of[i].rows * tokens * (bf16 ? 2 : 4);
    }
    const int failed = run_jobs(&m, jobs, few, jobs + late, n - late, few * tokens, order, seat);
    free(jobs);
    return failed;
}

/* The most bytes that moepack_affine_dense keeps between calls; `units`: blocks of UNIT rows in all matrices. */
int64_t moepack_affine_dense_kept(int64_t n, int64_t units, int64_t cols, int64_t tokens, int64_t threads) {
    const Gemm m = {.cols = cols, .slots = tokens, .share = 1, .experts = 1, .threads = threads};
    const size_t direct = moepack_direct_kept(&m, n * tokens, n, units);
    const size_t tiles = (size_t)n * moepack_tiles_kept(&m, tokens);
    return (int64_t)(direct > tiles ? direct : tiles);
}

/* ---- memory */

/* The bytes that are kept now. moepack_affine_release frees them. */
int64_t moepack_affine_holds(void) { return (int64_t)kept.size; }

void moepack_affine_release(void) {
    pthread_mutex_lock(&arena_lock);
    free(kept.at);
    kept = (Arena){0, 0};
    pthread_mutex_unlock(&arena_lock);
}
