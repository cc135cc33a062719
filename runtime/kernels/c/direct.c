/* Products straight from packed bytes, in rounds: threads prepare activations, then multiply rows by them.
 *
 * Sums are made in a fixed order, and for BF16 activations times codes in integers. So neither the number of threads
 * nor other experts change a result's bits. product.c chooses the loops, threads.c runs the threads.
 */
#include "gemm.h"

static const Loops *loops_of(const Gemm *m, const Form *f) {
    return is_fp8(f) ? moepack_fp8[m->x_bf16] : m->x_bf16 ? moepack_fixed : moepack_floats;
}

static void prepare(const Gemm *m, int64_t activation, Prepared *p) {
    const uint8_t *x = (const uint8_t *)m->x + activation * m->cols * (m->x_bf16 ? 2 : 4);
    (m->x_bf16 ? moepack_fixed : moepack_floats)->prepare(m, x, p);
    if (p->scaled) moepack_fp8[m->x_bf16]->prepare(m, x, p);
}

/* ---- one product */
typedef struct {
    int64_t job, from, to; /* rows */
} Task;

typedef struct {
    const Gemm *m;
    const Job *jobs;
    const Task *tasks;
    const int64_t *order, *source;  /* slots by expert; the index in x of each prepared activation */
    const Prepared *const *of_slot; /* the prepared activation of each entry of `order` */
    Prepared *prepared;
} Run;

static void prepare_one(const void *of, int64_t number, void *room) {
    const Run *run = of;
    (void)room;
    prepare(run->m, run->source[number], run->prepared + number);
}

static void run_task(const void *of, int64_t number, void *room) {
    const Run *run = of;
    const Gemm *m = run->m;
    const Task *task = run->tasks + number;
    const Job *job = run->jobs + task->job;
    (void)room;
    for (int64_t row = task->from, end; row < task->to; row = end) {
        end = least(row + UNIT, task->to);
        loops_of(m, job->form)->rows(m, job, row, end, run->of_slot + job->first, run->order + job->first, job->count);
    }
}

#define TOGETHER 4 /* the most slots in one pass over an expert's rows (TB, MANY) */
#define BESIDE (sizeof(Prepared) + sizeof(void *)) /* bytes of a slot in addition to its prepared activation */
#define NEEDS_SUMS 1 /* floats, and sums of them */
#define NEEDS_QUADS 2
#define NEEDS_PAIRS 4
#define NEEDS_FIXED 8 /* sums and units of integers; shifted left by 1 to 8, integers as in `fixed` */
#define NEEDS_SCALED (NEEDS_FIXED << 9) /* floats for FP8 codes */
#define NEEDS_ALL (NEEDS_FIXED - 1 + NEEDS_SCALED) /* those that take most: of float32 activations; of BF16 ones fewer */

static int needs_of(const Gemm *m, const Form *f, int64_t slots) {
    if (f->bits == 16) return 0;
    if (is_fp8(f)) return NEEDS_SCALED;
    const int bits = codes_of(f), p = low_bits(bits), many = moepack_fixed->many, two = two_planes(bits);
    if (is_trellis(bits)) return m->x_bf16 ? NEEDS_FIXED | NEEDS_FIXED << 8 : NEEDS_SUMS;
    if (m->x_bf16) {
        const int halved = many && slots >= many && (p == 2 || p == 4) ? NEEDS_FIXED << (5 + p / 2) : 0;
        if (halved && slots % many == 0) return NEEDS_FIXED | halved | (bits == 5 ? NEEDS_FIXED << 1 : 0);
        if (bits == MXFP4 || bits == NVFP4) return NEEDS_FIXED | NEEDS_FIXED << 5 | halved;
        return NEEDS_FIXED | NEEDS_FIXED << (p == 8 ? 4 : 1 + p / 2) | (two ? NEEDS_FIXED << 1 : 0) | halved;
    }
    return NEEDS_SUMS | (bits == 1 || two ? NEEDS_QUADS : 0) | (bits == 2 || bits == 3 ? NEEDS_PAIRS : 0);
}

/* Set p's pointers to memory from `at` on; returns the bytes they need. */
static size_t place(const Gemm *m, int needs, uint8_t *at, Prepared *p) {
    const size_t padded = 32 * (size_t)ceil_div(m->cols, 32), each = padded / 32 + 16;
    uint8_t *next = at;
#define PART(field, need, words) p->field = needs & (need) ? (void *)next : 0, next += needs & (need) ? 4 * (words) : 0
    PART(x, NEEDS_SUMS, padded);
    PART(scaled, NEEDS_SCALED, padded);
    PART(quads, NEEDS_QUADS, 4 * padded);
    PART(pairs, NEEDS_PAIRS, 8 * padded);
    for (int k = 0; k < 8; k++)
        PART(fixed[k], NEEDS_FIXED << (k + 1), k == 0 && moepack_fixed->tables ? 3 * padded : padded / 2);
    for (int k = 0; k < 3; k++) PART(sums[k], NEEDS_SUMS, each);
    for (int k = 0; k < 5; k++) PART(totals[k], NEEDS_FIXED, padded / 16 + 16);
    PART(units, NEEDS_FIXED, each);
    return (size_t)(next - at + 63) / 64 * 64;
}

static size_t prepared_size(const Gemm *m, int needs) {
    Prepared p;
    return place(m, needs, 0, &p);
}

/* Sizes of the arena's part for direct products: lists, then prepared activations. */
typedef struct {
    int64_t most;        /* the number of activations, at most */
    size_t own;          /* bytes for each thread, if each prepares activations for itself; or 0 */
    size_t lists, round, all; /* round: bytes of prepared activations at a time */
} Room;

/* Each thread prepares activations for itself in OWN bytes. Compared with rounds of 24 MB that threads prepare
 * together, products of Qwen3-30B-A3B's shape with 16 and 128 tokens take 0.94 to 1.02 times as long on one thread,
 * because prepared activations are still in the second-level cache when they are read. They take 0.7 to 1.0 times as
 * long on two threads that are interrupted, which need not wait for each other. 256 KB, 512 KB and 1 MB do not differ.
 * A thread's share must hold the activations of one pass over rows. If all threads' shares exceed MOST, threads prepare
 * together. */
#define OWN ((size_t)512 << 10)
#define MOST ((size_t)24 << 20)

static int64_t tasks_of(int64_t rows) { return ceil_div(rows, UNIT); } /* at most */

static Room room_of(const Gemm *m, int64_t slots, int64_t n, int64_t tasks, int needs) {
    Room r = {.most = least(slots, ceil_div(m->slots, m->share))};
    size_t each = prepared_size(m, needs), prepared = each * (size_t)r.most, pass = TOGETHER * (each + BESIDE) + 64;
    size_t together = (sizeof(Prepared) + 2 * sizeof(int64_t)) * (size_t)r.most + sizeof(void *) * (size_t)slots +
                      sizeof(Job) * (size_t)n + sizeof(Task) * (size_t)tasks;
    size_t alone = sizeof(Job) * (size_t)(n + slots / TOGETHER);
    r.lists = ((together > alone ? together : alone) + 63) / 64 * 64;
    r.own = (pass > OWN ? pass + 63 : OWN) / 64 * 64;
    if (r.own * (size_t)m->threads > MOST) r.own = 0;
    r.round = r.own ? r.own * (size_t)m->threads : pass > MOST ? pass : MOST;
    if (prepared <= r.round) r.own = 0; /* all fit one round: each activation is prepared once for all experts */
    r.all = r.lists + (prepared < r.round ? prepared : r.round);
    return r;
}

/* Expert batches whose activations each thread prepares for itself: threads wait for one another only at the end. */
typedef struct {
    const Gemm *m;
    const Job *batches;
    const int64_t *order;
} Alone;

static void run_alone(const void *of, int64_t number, void *room) {
    const Alone *run = of;
    const Gemm *m = run->m;
    const Job *job = run->batches + number;
    const int64_t *slot = run->order + job->first;
    const int needs = needs_of(m, job->form, job->count);
    const Prepared **of_slot = room;
    Prepared *prepared = (Prepared *)(of_slot + job->count);
    uint8_t *at = (uint8_t *)room + (BESIDE * (size_t)job->count + 63) / 64 * 64;
    for (int64_t k = 0; k < job->count; k++, at += prepared_size(m, needs)) {
        place(m, needs, at, prepared + k);
        prepare(m, slot[k] / m->share, prepared + k);
        of_slot[k] = prepared + k;
    }
    for (int64_t row = 0; row < job->rows; row += UNIT)
        loops_of(m, job->form)->rows(m, job, row, least(row + UNIT, job->rows), of_slot, slot, job->count);
}

static void alone_product(const Gemm *m, const Job *jobs, int64_t n, int64_t slots, const int64_t *order, const Room *room,
                          uint8_t *at) {
    Job *batches = (Job *)at;
    const int64_t even = ceil_div(slots, 4 * m->threads * TOGETHER) * TOGETHER; /* so that threads end together */
    int64_t n_batches = 0;
    for (int64_t j = 0; j < n; j++) {
        const int64_t fit = (int64_t)((room->own - 64) / (prepared_size(m, needs_of(m, jobs[j].form, jobs[j].count)) + BESIDE));
        const int64_t most = least(fit / TOGETHER * TOGETHER, even);
        for (int64_t done = 0; done < jobs[j].count; done += most) {
            const int64_t here = least(most, jobs[j].count - done);
            batches[n_batches] = jobs[j], batches[n_batches].first += done, batches[n_batches++].count = here;
        }
    }
    const Alone run = {m, batches, order};
    moepack_pieces(run_alone, &run, n_batches, m->threads, at + room->lists, room->own);
}

#define ALONE 65536 /* products that one thread computes in the time that waking another takes */

/* Run jobs straight from their bytes, in rounds of the expert batches that fit. An expert is divided into several
 * batches only if it has more slots than fit a round. */
int moepack_direct_product(const Gemm *m, Job *jobs, int64_t n, int64_t slots, const int64_t *order, int64_t *seat,
                          Arena *arena) {
    int all = 0;
    int64_t most_tasks = 0;
    for (int64_t j = 0; j < n; j++) all |= needs_of(m, jobs[j].form, jobs[j].count), most_tasks += tasks_of(jobs[j].rows);
    const Room room = room_of(m, slots, n, most_tasks, all);
    if (grow(arena, room.all)) return 1;
    if (room.own) {
        alone_product(m, jobs, n, slots, order, &room, arena->at);
        return 0;
    }
    Prepared *prepared = (Prepared *)arena->at;
    int64_t *source = (int64_t *)(prepared + room.most), *needs = source + room.most;
    const Prepared **of_slot = (const Prepared **)(needs + room.most);
    Job *batches = (Job *)(of_slot + slots);
    Task *tasks = (Task *)(batches + n);
    for (int64_t j = 0, done = 0; j < n;) {
        /* seat: by activation, 0 or 1 + its index among the prepared ones; used entries are set back to 0 at the end */
        int64_t n_batches = 0, n_prepared = 0, n_tasks = 0, cost = 0, weights = 0;
        size_t used = 0;
        for (; j < n; j++, done = 0) {
            const Job *job = jobs + j;
            const int need = needs_of(m, job->form, job->count);
            int64_t fit = 0, rest = job->count - done;
            for (size_t more = used; fit < rest; fit++) {
                const int64_t at = seat[order[job->first + done + fit] / m->share];
                more += at ? prepared_size(m, (int)needs[at - 1] | need) - prepared_size(m, (int)needs[at - 1])
                           : prepared_size(m, need);
                if (more > room.round) break;
            }
            if (fit < rest && n_batches) break;
            if (fit < rest) fit -= fit % TOGETHER;
            for (int64_t i = job->first + done; i < job->first + done + fit; i++) {
                const int64_t which = order[i] / m->share;
                if (!seat[which]) {
                    source[n_prepared] = which, needs[n_prepared] = 0, seat[which] = ++n_prepared;
                    used += prepared_size(m, 0);
                }
                int64_t *mine = needs + seat[which] - 1;
                used += prepared_size(m, (int)*mine | need) - prepared_size(m, (int)*mine);
                *mine |= need;
                of_slot[i] = prepared + seat[which] - 1;
            }
            batches[n_batches] = *job, batches[n_batches].first += done, batches[n_batches++].count = fit;
            cost += ceil_div(job->rows, UNIT) * fit, weights += job->rows * m->cols * fit;
            done += fit;
            if (fit < rest) break;
        }
        uint8_t *at = arena->at + room.lists;
        for (int64_t i = 0; i < n_prepared; i++) {
            place(m, (int)needs[i], at, prepared + i);
            at += prepared_size(m, (int)needs[i]);
            seat[source[i]] = 0;
        }
        const int64_t share = cost / (m->threads * 8) + 1; /* work of one task, so that threads end together */
        for (int64_t p = 0; p < n_batches; p++) {
            const int64_t rows = batches[p].rows;
            const int64_t step = m->threads < 2 ? rows : UNIT * (share / batches[p].count + 1);
            for (int64_t row = 0; row < rows; row += step) tasks[n_tasks++] = (Task){p, row, least(row + step, rows)};
        }
        const Run run = {m, batches, tasks, order, source, of_slot, prepared};
        moepack_pieces(prepare_one, &run, n_prepared, m->threads, 0, 0);
        moepack_pieces(run_task, &run, n_tasks, least(m->threads, 1 + weights / ALONE), 0, 0);
    }
    return 0;
}

size_t moepack_direct_kept(const Gemm *m, int64_t slots, int64_t n, int64_t tasks) {
    return room_of(m, slots, n, tasks, NEEDS_ALL).all;
}
