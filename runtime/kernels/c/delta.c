/* Linear attention by the gated delta rule (Qwen3-Next, Kimi-Linear), from projections to the input of the last product:
 * causal convolution, norms of queries and keys, update of the state, and gated normalisation.
 *
 * Each head keeps a state S [k_dim][v_dim], and for a token with query q, key k, value v, decay d and rate b
 *
 *     S <- d S;  S <- S + k (b (v - S^T k))^T;  out = S^T q
 *
 * (Gated Delta Networks, arXiv:2412.06464, equation 10; with a decay for each row of S, Kimi Linear, arXiv:2510.26692).
 * S^T k and S^T q are summed in one reading of S before the update, since out = S^T (d q) + (k q) b (v - S^T (d k)).
 * All is float32. A task is one head of keys, with the heads of values that share it, of one sequence.
 */
#include "states.h"

#define TOKENS 32 /* of a prompt, between which a head's part of the state stays in the first cache */
#define COLS 32   /* columns of that part */
#define SMALLEST 1e-6f /* added to the squared length of queries and keys */

/* Channels are those of all queries, then all keys, then all values. A head of keys has `shared` heads of values. */
struct Delta {
    Part q, k, v, gate, rate, decay; /* `shared` heads follow one another in the last four; of the last two, numbers */
    const float *logs; /* [tokens][keys * shared][k_dim], the decays' logarithms; or 0: -scale * softplus(decay + bias) */
    const float *scale, *bias; /* [keys * shared] */
    const uint16_t *filter;    /* [channels][width] */
    const uint16_t *weight;    /* [v_dim], of the normalisation */
    uint16_t *out;             /* [tokens][keys * shared][v_dim] */
    int64_t sequences, keys, shared, k_dim, v_dim, width, sigmoid; /* sigmoid: the gate, else silu */
    const int64_t *first;     /* [sequences + 1]: the first token of each, and the end */
    uint16_t *const *windows; /* by sequence: the last inputs of the convolution, [channels][width] */
    float *const *states;     /* by sequence: [keys * shared][k_dim][v_dim] */
    float epsilon;
};

/* What one thread needs for `tokens` tokens at a time. */
typedef struct {
    float *rows, *filter, *state, *k, *q, *d, *out, *delta, *rate, *products;
} Room;

static int64_t channels_of(const Delta *m) { return 2 * m->k_dim + m->shared * m->v_dim; }

/* Lays out a thread's room from `at` on; returns its floats. */
static int64_t lay_out(const Delta *m, int64_t tokens, float *at, Room *room) {
    const int64_t channels = channels_of(m);
    const int64_t sizes[] = {(tokens + m->width) * channels, m->width * channels, m->k_dim * COLS, tokens * m->k_dim,
                             tokens * m->k_dim, tokens * m->k_dim, tokens * m->v_dim, m->v_dim, tokens, tokens};
    float **const parts[] = {&room->rows, &room->filter, &room->state, &room->k, &room->q,
                             &room->d, &room->out, &room->delta, &room->rate, &room->products};
    int64_t end = 0;
    for (int i = 0; i < 10; i++) {
        if (at) *parts[i] = at + end;
        end += (sizes[i] + LANES - 1) & -LANES;
    }
    return end;
}

/* One token in `cols` columns of the state, which begins at `s` and has rows `stride` apart. */
SMALL void step(float *restrict s, int64_t stride, int64_t rows, int64_t cols, const float *k, const float *q, const float *key,
                const float *d, const float *v, float rate, float product, float *restrict delta, float *restrict out) {
    for (int64_t c = 0; c < cols; c++) delta[c] = out[c] = 0;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const float *s0 = s + r * stride, *s1 = s0 + stride, *s2 = s1 + stride, *s3 = s2 + stride;
        const float k0 = k[r], k1 = k[r + 1], k2 = k[r + 2], k3 = k[r + 3];
        const float q0 = q[r], q1 = q[r + 1], q2 = q[r + 2], q3 = q[r + 3];
        for (int64_t c = 0; c < cols; c++) {
            delta[c] += k0 * s0[c] + k1 * s1[c] + (k2 * s2[c] + k3 * s3[c]);
            out[c] += q0 * s0[c] + q1 * s1[c] + (q2 * s2[c] + q3 * s3[c]);
        }
    }
    for (; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            delta[c] += k[r] * s[r * stride + c];
            out[c] += q[r] * s[r * stride + c];
        }
    for (int64_t c = 0; c < cols; c++) {
        delta[c] = (v[c] - delta[c]) * rate;
        out[c] += product * delta[c];
    }
    for (r = 0; r < rows; r++) {
        float *row = s + r * stride;
        const float by = d[r], add = key[r];
        for (int64_t c = 0; c < cols; c++) row[c] = row[c] * by + add * delta[c];
    }
}

/* One head of values over n tokens: `room` has their decayed keys and queries, `key` [n][stride] the keys themselves. */
SMALL void head_of(const Delta *m, float *state, int64_t n, const float *key, const float *v, int64_t stride, const Room *room) {
    const int64_t rows = m->k_dim, dim = m->v_dim;
    if (n == 1) {
        step(state, dim, rows, dim, room->k, room->q, key, room->d, v, room->rate[0], room->products[0], room->delta, room->out);
        return;
    }
    for (int64_t c = 0; c < dim; c += COLS) {
        const int64_t cols = least(COLS, dim - c);
        for (int64_t r = 0; r < rows; r++) memcpy(room->state + r * COLS, state + r * dim + c, sizeof(float) * (size_t)cols);
        for (int64_t t = 0; t < n; t++) {
            const float *k = room->k + t * rows, *q = room->q + t * rows, *d = room->d + t * rows, *one = key + t * stride;
            float *out = room->out + t * dim + c;
            const float *value = v + t * stride + c;
            if (cols == COLS)
                step(room->state, COLS, rows, COLS, k, q, one, d, value, room->rate[t], room->products[t], room->delta, out);
            else
                step(room->state, COLS, rows, cols, k, q, one, d, value, room->rate[t], room->products[t], room->delta, out);
        }
        for (int64_t r = 0; r < rows; r++) memcpy(state + r * dim + c, room->state + r * COLS, sizeof(float) * (size_t)cols);
    }
}

/* The decays of n tokens of one head of values, [n][k_dim]. */
SMALL void decays(const Delta *m, int64_t first, int64_t n, int64_t g, int64_t j, float *out) {
    const int64_t heads = m->keys * m->shared, head = g * m->shared + j, dim = m->k_dim;
    for (int64_t t = 0; t < n; t++, out += dim) {
        if (m->logs) {
            const float *log = m->logs + ((first + t) * heads + head) * dim;
            for (int64_t c = 0; c < dim; c++) out[c] = exponential(log[c]);
            continue;
        }
        const float x = widen(m->decay.at[(first + t) * m->decay.row + g * m->decay.step + j]) + m->bias[head];
        const float by = expf(-m->scale[head] * (x > 20.0f ? x : log1pf(expf(x))));
        for (int64_t c = 0; c < dim; c++) out[c] = by;
    }
}

/* The results of n tokens' head over their root mean square, times the weight and the gate. */
SMALL void finish(const Delta *m, int64_t first, int64_t n, int64_t g, int64_t j, const float *x) {
    const int64_t dim = m->v_dim;
    for (int64_t t = 0; t < n; t++, x += dim) {
        const uint16_t *gate = m->gate.at + (first + t) * m->gate.row + g * m->gate.step + j * dim;
        uint16_t *out = m->out + ((first + t) * m->keys * m->shared + g * m->shared + j) * dim;
        const float by = 1.0f / sqrtf(dot(x, x, dim) / (float)dim + m->epsilon);
        for (int64_t c = 0; c < dim; c++) {
            const float z = widen(gate[c]), opened = sigmoid(z);
            out[c] = narrow(widen(m->weight[c]) * (x[c] * by) * (m->sigmoid ? opened : z * opened));
        }
    }
}

SMALL void delta(const Delta *m, int64_t sequence, int64_t g, const Room *room) {
    const int64_t dim = m->k_dim, values = m->shared * m->v_dim, stride = channels_of(m), width = m->width;
    const float root = 1.0f / sqrtf((float)dim);
    float *q = room->rows, *k = q + dim, *v = k + dim;
    for (int64_t first = m->first[sequence]; first < m->first[sequence + 1]; first += TOKENS) {
        const int64_t n = least(TOKENS, m->first[sequence + 1] - first);
        const Part *parts[] = {&m->q, &m->k, &m->v};
        const int64_t channel[] = {g * dim, (m->keys + g) * dim, 2 * m->keys * dim + g * values};
        for (int p = 0, at = 0; p < 3; at += (int)dim, p++) {
            const int64_t cols = p < 2 ? dim : values, from = channel[p] * width;
            uint16_t *window = m->windows[sequence] + from;
            if (width == 4)
                convolve(parts[p], first, g, n, cols, 4, stride, m->filter + from, 0, window, q + at, room->filter + at);
            else
                convolve(parts[p], first, g, n, cols, width, stride, m->filter + from, 0, window, q + at, room->filter + at);
        }
        for (int64_t t = 0; t < n; t++) {
            float *query = q + t * stride, *key = k + t * stride;
            const float by = root / sqrtf(dot(query, query, dim) + SMALLEST), short_by = 1.0f / sqrtf(dot(key, key, dim) + SMALLEST);
            for (int64_t c = 0; c < dim; c++) query[c] *= by;
            for (int64_t c = 0; c < dim; c++) key[c] *= short_by;
            room->products[t] = dot(query, key, dim);
        }
        for (int64_t j = 0; j < m->shared; j++) {
            decays(m, first, n, g, j, room->d);
            for (int64_t t = 0; t < n; t++) {
                for (int64_t c = 0; c < dim; c++) {
                    room->k[t * dim + c] = room->d[t * dim + c] * k[t * stride + c];
                    room->q[t * dim + c] = room->d[t * dim + c] * q[t * stride + c];
                }
                room->rate[t] = sigmoid(widen(m->rate.at[(first + t) * m->rate.row + g * m->rate.step + j]));
            }
            float *state = m->states[sequence] + (g * m->shared + j) * dim * m->v_dim;
            head_of(m, state, n, k, v + j * m->v_dim, stride, room);
            finish(m, first, n, g, j, room->out);
        }
    }
}

static void delta_plain(const Delta *m, int64_t sequence, int64_t g, const Room *room) { delta(m, sequence, g, room); }
#ifdef HAVE_X86
AVX2 static void delta_avx2(const Delta *m, int64_t sequence, int64_t g, const Room *room) { delta(m, sequence, g, room); }
WHOLE512 static void delta_avx512(const Delta *m, int64_t sequence, int64_t g, const Room *room) { delta(m, sequence, g, room); }
#endif

static void (*const deltas[])(const Delta *, int64_t, int64_t, const Room *) = LEVELS_OF(delta);

typedef struct {
    const Delta *m;
    int64_t tokens;
} Run;

static void head_of_keys(const void *of, int64_t number, void *memory) {
    const Run *run = of;
    Room room;
    lay_out(run->m, run->tokens, memory, &room);
    deltas[moepack_vectors](run->m, number / run->m->keys, number % run->m->keys, &room);
}

int moepack_delta(const Delta *m, int64_t threads) {
    int64_t most = 1;
    for (int64_t s = 0; s < m->sequences; s++)
        if (m->first[s + 1] - m->first[s] > most) most = m->first[s + 1] - m->first[s];
    const int64_t work = m->first[m->sequences] * m->keys * m->shared * m->k_dim * m->v_dim;
    threads = work < 65536 ? 1 : least(threads, m->sequences * m->keys); /* waking others would take longer */
    const Run run = {m, least(most, TOKENS)};
    const size_t room = sizeof(float) * (size_t)lay_out(m, run.tokens, 0, 0);
    void *memory;
    if (posix_memalign(&memory, 64, room * (size_t)threads)) return 1;
    moepack_pieces(head_of_keys, &run, m->sequences * m->keys, threads, memory, room);
    free(memory);
    return 0;
}
