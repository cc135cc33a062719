/* State space layers. Those of Mamba (Jamba): the scan alone, below. Those of Mamba-2 (Nemotron-H, Granite 4), from the one
 * projection to the input of the last product: causal convolution, update of the state, and normalisation of the gated
 * results.
 *
 * Each head keeps a state S [dim][size], and for a token with input x [dim], step s > 0, and its group's B and C [size]
 *
 *     S <- exp(-scale s) S + (s x) B^T;  out = S C + skip x
 *
 * (Transformers are SSMs, arXiv:2405.21060, section 7). All is float32. TOKENS tokens at a time go through three stages,
 * each by tasks: a convolution of some channels of a sequence, a head of a sequence, a group's results of a token.
 */
#include "states.h"

#define TOKENS 32    /* of a pass, through all stages before the next */
#define CHANNELS 128 /* of a task of the convolution */
#define WIDEST 8     /* a convolution's width */

/* A token's projection: gates [heads * dim]; inputs [heads * dim], B [groups * size], C [groups * size]; steps [heads].
 * The convolution's channels are those of inputs, B and C. */
typedef struct {
    const uint16_t *projection; /* [tokens][row] */
    const uint8_t *live;        /* [tokens], 0 for padding, whose inputs, B and C are zeros; or 0 */
    const float *scale, *bias, *skip;             /* [heads]; the bias of steps */
    const uint16_t *filter, *filter_bias, *weight; /* [channels][width]; [channels] or 0; [heads * dim], of the normalisation */
    uint16_t *out;                                /* [tokens][heads * dim] */
    int64_t sequences, heads, dim, size, groups, width, parts; /* parts: that are normalised each by itself */
    const int64_t *first;                         /* [sequences + 1]: the first token of each, and the end */
    uint16_t *const *windows;                     /* by sequence: the last inputs of the convolution, [channels][width] */
    float *const *states;                         /* by sequence: [heads][dim][size] */
    float epsilon, least, most;                   /* limits of steps, where a sequence has more tokens than one */
} Mamba;

/* Mamba's scan (arXiv:2312.00752, algorithm 2). Each channel keeps a state s [size], and for a token with input x, step > 0,
 * and B and C [size] that all channels share
 *
 *     s <- exp(step * rates) s + (step * x) B;  out = s C
 */
typedef struct {
    const float *x, *steps; /* [sequences][channels][tokens], as `out` */
    const float *rates;     /* [channels][size], not above 0 */
    const float *b, *c;     /* [sequences][tokens][size] */
    float *states;          /* [sequences][channels][size] */
    float *out;
    int64_t sequences, channels, tokens, size;
} Scan;

typedef struct {
    const Scan *scan; /* or 0, for a layer of Mamba-2 */
    const Mamba *m;
    float *rows; /* [TOKENS][channels], of the tokens from `from` to `to` */
    int64_t from, to, tasks;
    int stage;
} Run;

static int64_t channels_of(const Mamba *m) { return m->heads * m->dim + 2 * m->groups * m->size; }
static int64_t row_of(const Mamba *m) { return m->heads * m->dim + channels_of(m) + m->heads; }

SMALL void filtered(const Run *run, int64_t sequence, int64_t part, int64_t from, int64_t to) {
    const Mamba *m = run->m;
    const int64_t channels = channels_of(m), c = part * CHANNELS, cols = least(CHANNELS, channels - c), width = m->width;
    float rows[(TOKENS + WIDEST) * CHANNELS], filter[WIDEST * CHANNELS];
    const Part of = {m->projection + m->heads * m->dim + c, row_of(m), 0};
    const uint16_t *bias = m->filter_bias ? m->filter_bias + c : 0, *weights = m->filter + c * width;
    uint16_t *window = m->windows[sequence] + c * width;
    if (width == 4)
        convolve(&of, from, 0, to - from, cols, 4, CHANNELS, weights, bias, window, rows, filter);
    else
        convolve(&of, from, 0, to - from, cols, width, CHANNELS, weights, bias, window, rows, filter);
    for (int64_t t = from; t < to; t++) {
        float *out = run->rows + (t - run->from) * channels + c;
        if (!m->live || m->live[t])
            memcpy(out, rows + (t - from) * CHANNELS, sizeof(float) * (size_t)cols);
        else
            memset(out, 0, sizeof(float) * (size_t)cols);
    }
}

/* One token in one row of a state; x is the row's input, by its step. Returns S C. */
typedef float Step(float *restrict s, int64_t size, float decay, float x, const float *b, const float *c);

/* A step by vectors of N numbers. Rows go one after another: by four at once, memory is read at half of the rate. */
#define STEP(N)                                                                                                      \
    typedef float Vector##N __attribute__((vector_size(4 * N), aligned(4), may_alias));                              \
    SMALL float step##N(float *restrict s, int64_t size, float decay, float x, const float *b, const float *c) {     \
        Vector##N sums = {0};                                                                                        \
        int64_t i = 0;                                                                                               \
        for (; i + N <= size; i += N) {                                                                              \
            Vector##N *at = (Vector##N *)(s + i);                                                                    \
            const Vector##N now = *at * decay + x * *(const Vector##N *)(b + i);                                     \
            *at = now;                                                                                               \
            sums += now * *(const Vector##N *)(c + i);                                                               \
        }                                                                                                            \
        float sum = 0;                                                                                               \
        for (; i < size; i++) {                                                                                      \
            s[i] = s[i] * decay + x * b[i];                                                                          \
            sum += s[i] * c[i];                                                                                      \
        }                                                                                                            \
        for (int k = 0; k < N; k++) sum += sums[k];                                                                  \
        return sum;                                                                                                  \
    }
STEP(4)
STEP(8)
STEP(16)

SMALL void scan(const Run *run, int64_t sequence, int64_t head, int64_t from, int64_t to, Step *step) {
    const Mamba *m = run->m;
    const int64_t channels = channels_of(m), inner = m->heads * m->dim, size = m->size;
    const int64_t group = head / (m->heads / m->groups);
    const int limited = m->first[sequence + 1] - m->first[sequence] > 1;
    float by[TOKENS], decay[TOKENS];
    for (int64_t t = from; t < to; t++) {
        const float x = widen(m->projection[t * row_of(m) + inner + channels + head]) + m->bias[head];
        const float made = x > 20.0f ? x : log1pf(expf(x));
        const float one = !limited ? made : made < m->least ? m->least : made > m->most ? m->most : made;
        by[t - from] = one;
        decay[t - from] = expf(-m->scale[head] * one);
    }
    float *state = m->states[sequence] + head * m->dim * size, *first = run->rows + (from - run->from) * channels;
    const float *b = first + inner + group * size, *c = b + m->groups * size;
    for (int64_t r = 0; r < m->dim; r++) {
        float *x = first + head * m->dim + r;
        for (int64_t t = 0; t < to - from; t++, x += channels) {
            const float sum = step(state + r * size, size, decay[t], by[t] * *x, b + t * channels, c + t * channels);
            *x = sum + m->skip[head] * *x;
        }
    }
}

SMALL void finish(const Run *run, int64_t t, int64_t part) {
    const Mamba *m = run->m;
    const int64_t inner = m->heads * m->dim, cols = inner / m->parts, at = part * cols;
    float *x = run->rows + (t - run->from) * channels_of(m) + at;
    const uint16_t *gate = m->projection + t * row_of(m) + at;
    for (int64_t c = 0; c < cols; c++) {
        const float z = widen(gate[c]);
        x[c] *= z * sigmoid(z);
    }
    const float by = 1.0f / sqrtf(dot(x, x, cols) / (float)cols + m->epsilon);
    for (int64_t c = 0; c < cols; c++) m->out[t * inner + at + c] = narrow(widen(m->weight[at + c]) * (x[c] * by));
}

/* A token in a channel; returns its result. */
SMALL float scanned(float *restrict state, const float *restrict rates, const float *restrict b, const float *restrict c,
                    int64_t size, float step, float given) {
    float sums[LANES] = {0};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES)
        for (int i = 0; i < LANES; i++) {
            const float now = state[k + i] * exponential(step * rates[k + i]) + given * b[k + i];
            state[k + i] = now;
            sums[i] += now * c[k + i];
        }
    for (; k < size; k++) {
        state[k] = state[k] * exponential(step * rates[k]) + given * b[k];
        sums[k % LANES] += state[k] * c[k];
    }
    return total(sums);
}

SMALL void scan_channels(const Scan *run, int64_t i) {
    const int64_t parts = (run->channels + CHANNELS - 1) / CHANNELS, sequence = i / parts, size = run->size;
    const int64_t end = least(i % parts * CHANNELS + CHANNELS, run->channels);
    for (int64_t channel = i % parts * CHANNELS; channel < end; channel++) {
        const int64_t row = sequence * run->channels + channel;
        for (int64_t t = 0; t < run->tokens; t++) {
            const int64_t at = row * run->tokens + t, token = (sequence * run->tokens + t) * size;
            const float step = run->steps[at];
            run->out[at] = scanned(run->states + row * size, run->rates + channel * size, run->b + token, run->c + token, size,
                                   step, step * run->x[at]);
        }
    }
}

SMALL void task(const Run *run, int64_t i, Step *step) {
    if (run->scan) {
        scan_channels(run->scan, i);
        return;
    }
    const Mamba *m = run->m;
    if (run->stage == 2) {
        finish(run, run->from + i / m->parts, i % m->parts);
        return;
    }
    const int64_t each = run->tasks / m->sequences, sequence = i / each;
    const int64_t from = m->first[sequence] > run->from ? m->first[sequence] : run->from;
    const int64_t to = least(m->first[sequence + 1], run->to);
    if (from >= to) return;
    if (run->stage)
        scan(run, sequence, i % each, from, to, step);
    else
        filtered(run, sequence, i % each, from, to);
}

static void task_plain(const Run *run, int64_t i) { task(run, i, step4); }
#ifdef HAVE_X86
AVX2 static void task_avx2(const Run *run, int64_t i) { task(run, i, step8); }
WHOLE512 static void task_avx512(const Run *run, int64_t i) { task(run, i, step16); }
#endif

static void (*const tasks_of[])(const Run *, int64_t) = LEVELS_OF(task);

static void one_task(const void *of, int64_t number, void *room) {
    (void)room;
    tasks_of[moepack_vectors](of, number);
}

/* `width` is at most WIDEST. Returns 0; or 1 when memory is short, having done nothing. */
int moepack_mamba(const Mamba *m, int64_t threads) {
    const int64_t tokens = m->first[m->sequences], channels = channels_of(m);
    Run run = {.m = m};
    if (posix_memalign((void **)&run.rows, 64, sizeof(float) * (size_t)(least(tokens, TOKENS) * channels))) return 1;
    if (tokens * m->heads * m->dim * m->size < 65536) threads = 1; /* waking others would take longer */
    for (run.from = 0; run.from < tokens; run.from = run.to) {
        run.to = least(run.from + TOKENS, tokens);
        const int64_t tasks[] = {m->sequences * ((channels + CHANNELS - 1) / CHANNELS), m->sequences * m->heads,
                                 (run.to - run.from) * m->parts};
        for (run.stage = 0; run.stage < 3; run.stage++) {
            run.tasks = tasks[run.stage];
            moepack_pieces(one_task, &run, run.tasks, threads, 0, 0);
        }
    }
    free(run.rows);
    return 0;
}

void moepack_scan(const Scan *scan, int64_t threads) {
    const Run run = {.scan = scan, .tasks = scan->sequences * ((scan->channels + CHANNELS - 1) / CHANNELS)};
    if (scan->sequences * scan->tokens * scan->channels * scan->size < 65536) threads = 1;
    moepack_pieces(one_task, &run, run.tasks, threads, 0, 0);
}
