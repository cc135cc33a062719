/* What a decoding token needs of a layer in one call: queries, keys and values, or latents; the experts; or all of a
 * decoder layer, with experts or a dense MLP.
 *
 * Calls from Python one by one, with a tensor between each two, take longer than small products. Results have the bits of
 * the separate calls. */
#include <math.h>

#include "gemm.h"

typedef struct {
    const uint16_t *weight; /* [cols]; 0: no normalisation */
    int64_t form;
    double epsilon;
} Normal;

static void normalise(const Normal *m, const uint16_t *x, uint16_t *out, int64_t rows, int64_t cols) {
    moepack_affine_norm(x, m->weight, out, rows, cols, m->form, m->epsilon);
}

/* Every result is written, whatever the number of tokens. Returns what moepack_affine_dense does. */
static int dense(const Dense *of, int64_t n, int64_t cols, const void *x, void *out, int64_t tokens, int64_t bf16,
                 int64_t tiles, int64_t threads) {
    return moepack_affine_dense(of, n, cols, x, out, tokens, bf16, tiles ? IN_TILES : FROM_BYTES, threads);
}

/* Queries, keys and values: products, normalisations of each head or of a whole row, rotation of queries and keys. */
typedef struct {
    const Dense *of; /* three matrices */
    int64_t cols, tokens, tiles, threads;
    const uint16_t *x;            /* [tokens][cols] */
    uint16_t *out;                /* the three results, one after another, [tokens][rows] each */
    int64_t head, turned, angles; /* columns of a head; of those, the columns that are rotated: 0 for none */
    const uint16_t *cos, *sin;    /* [tokens][angles], as in Rope */
    Normal norm[2];               /* of queries and keys */
    int64_t norm_cols[2];
} Project;

/* Returns what moepack_affine_dense does. */
int moepack_affine_project(const Project *m) {
    const int failed = dense(m->of, 3, m->cols, m->x, m->out, m->tokens, 1, m->tiles, m->threads);
    if (failed) return failed;
    uint16_t *at = m->out;
    for (int i = 0; i < 2; at += m->tokens * m->of[i].rows, i++) {
        const int64_t numbers = m->tokens * m->of[i].rows;
        if (m->norm[i].weight) normalise(m->norm + i, at, at, numbers / m->norm_cols[i], m->norm_cols[i]);
        if (m->turned) {
            const Rope rope = {at, m->cos, m->sin, m->tokens, m->of[i].rows / m->head, m->head, m->turned, m->angles};
            moepack_rope(&rope);
        }
    }
    return 0;
}

enum { UNTURNED, HALVES, PAIRS, COMPLEX }; /* what a rotation turns: halves against halves, neighbours into halves, or
                                              * neighbours in place, in float32 */

/* Queries and what a latent layer keeps of a token: a normalised latent, and a rotated part of the key of all heads. */
typedef struct {
    const Dense *of;     /* two matrices: the queries' first, and that of latents and shared keys */
    const Dense *second; /* makes queries of the first's normalised results; or 0 */
    int64_t cols, tokens, tiles, threads;
    const uint16_t *x;                /* [tokens][cols] */
    uint16_t *query, *latent, *turned; /* the results: [tokens][heads][head], [tokens][rank], [tokens][rotated] */
    int64_t heads, head, rank, rotated;
    int64_t way;           /* of rotation, which turns the last `rotated` numbers of a head */
    const void *cos, *sin; /* BF16 [tokens][rotated]; COMPLEX: `cos` has pairs of float32, [tokens][rotated / 2] */
    Normal middle, norm;   /* between the queries' matrices, and of latents */
} ProjectLatent;

/* Rotates `heads` parts of each token's rows, `step` numbers apart. */
static void turn(const ProjectLatent *m, uint16_t *x, int64_t heads, int64_t step) {
    const int64_t half = m->rotated / 2;
    if (m->way == UNTURNED) return;
    for (int64_t row = 0; row < m->tokens * heads && m->way != HALVES; row++) {
        const float *angle = (const float *)m->cos + row / heads * m->rotated;
        uint16_t *at = x + row * step, parts[m->rotated];
        for (int64_t i = 0; i < half; i++) {
            const uint16_t a = at[2 * i], b = at[2 * i + 1];
            if (m->way == PAIRS) {
                parts[i] = a;
                parts[half + i] = b;
                continue;
            }
            const float cos = angle[2 * i], sin = angle[2 * i + 1];
            parts[2 * i] = narrow(widen(a) * cos - widen(b) * sin);
            parts[2 * i + 1] = narrow(widen(a) * sin + widen(b) * cos);
        }
        memcpy(at, parts, sizeof(parts));
    }
    if (m->way == COMPLEX) return;
    const Rope rope = {x, m->cos, m->sin, m->tokens, heads, step, m->rotated, m->rotated};
    moepack_rope(&rope);
}

/* Returns what moepack_affine_dense does. */
int moepack_affine_latent(const ProjectLatent *m) {
    const int64_t n = m->tokens, first = m->of[0].rows, rank = m->rank, rotated = m->rotated;
    uint16_t *room = malloc(sizeof(uint16_t) * (size_t)(n * (first + m->of[1].rows)));
    if (!room) return 1;
    int failed = dense(m->of, 2, m->cols, m->x, room, n, 1, m->tiles, m->threads);
    if (!failed && m->second) {
        if (m->middle.weight) normalise(&m->middle, room, room, n, first);
        failed = dense(m->second, 1, first, room, m->query, n, 1, m->tiles, m->threads);
        if (failed > 1) failed = 4; /* the third matrix */
    } else if (!failed) {
        memcpy(m->query, room, sizeof(*room) * (size_t)(n * first));
    }
    const uint16_t *held = room + n * first;
    for (int64_t t = 0; t < n; t++, held += rank + rotated) {
        memcpy(m->latent + t * rank, held, sizeof(*held) * (size_t)rank);
        memcpy(m->turned + t * rotated, held + rank, sizeof(*held) * (size_t)rotated);
    }
    free(room);
    if (failed) return failed;
    if (m->norm.weight) normalise(&m->norm, m->latent, m->latent, n, rank);
    turn(m, m->query + m->head - rotated, m->heads, m->head);
    turn(m, m->turned, 1, rotated);
    return 0;
}

/* Linear attention: matrices of the layer's normalised input, and what a rule of delta.c makes of their results. */
typedef struct {
    const Dense *of;
    int64_t count;
    uint16_t *made;    /* the results, one after another, [tokens][rows] each, where the rule reads them */
    const Delta *rule; /* `out` is the layer's `attended` */
} Linear;

/* A layer's gated experts for few BF16 tokens: two products, and the weighted sum. `up.out`, `down.x`,
 * `down.out` and `sum.from` are set here. Returns what moepack_affine_product does. */
typedef struct {
    Gemm up, down;
    Combine sum;
    int64_t pairs; /* whether the gate is moepack_pair_gate's; else silu's */
    float limit, alpha;
} Experts;

int moepack_affine_experts(Experts *m) {
    const int64_t slots = m->up.slots, inner = m->down.cols;
    uint16_t *room = malloc(sizeof(uint16_t) * (size_t)(slots * (3 * inner + m->down.rows)));
    if (!room) return 1;
    uint16_t *gated = room + 2 * slots * inner, *y = gated + slots * inner;
    m->up.out = room;
    int failed = moepack_affine_product(&m->up);
    if (!failed) {
        if (m->pairs) moepack_pair_gate(room, gated, slots * inner, m->limit, m->alpha);
        else moepack_silu_gate(room, gated, slots, inner);
        m->down.x = gated, m->down.out = y;
        failed = moepack_affine_product(&m->down);
    }
    if (!failed) {
        m->sum.from = y;
        moepack_affine_combine(&m->sum);
    }
    free(room);
    return failed;
}

/* A decoder layer of a few tokens, with `project` or `latent` one of each sequence: h = x + attention(norm(x)), and
 * out = h + experts(norm(h)), a shared one among them; in a layer without experts the shared one is its MLP. */
typedef struct {
    int64_t tokens, hidden, tiles, threads;
    const uint16_t *x; /* [tokens][hidden] */
    Normal before, after;
    Project *project; /* 0: `attended` is given. `x` and `out` are set here */
    ProjectLatent *latent; /* or of a latent layer. `x` and the results are set here */
    const Linear *linear;  /* or of linear attention */
    Heads *lift, *lower;   /* of a latent layer: `x` and `out` are set here */
    Attend *attend;   /* keys and values have room for the tokens' own rows, the last ones; `q` and `out` are set here */
    const uint16_t *attended; /* what attention's own last matrix multiplies, or without one attention's result */
    int64_t attended_cols;
    const Dense *last; /* or 0 */
    uint16_t *h, *normed; /* [tokens][hidden]: the results without `out` */
    const float *wide;    /* [experts][hidden]: a router's matrix in float32; or 0 */
    const Dense *router;  /* or one of another kind. Activations are in the dtype of the logits, as `route` says */
    Route *route;         /* `logits` is set here */
    Experts *experts;     /* or 0. `index`, `x` and `gates` are set here; experts with a handle of 0 are skipped */
    const Dense *shared, *shared_down; /* an expert of all tokens, beside `experts` or alone: two matrices and one; or 0 */
    const Dense *shared_gate;          /* its only row's sigmoid weighs that result; or 0 */
    uint16_t *out;                     /* [tokens][hidden]; 0: the call ends before the experts */
} Layer;

/* Write the new rows of keys or values behind the others. */
static void append(const Rows *to, int64_t length, const uint16_t *from, int64_t tokens, int64_t groups) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t g = 0; g < groups; g++, from += to->cols)
            memcpy((uint8_t *)to->at + t * to->batch + g * to->head + (length - 1) * to->token, from,
                   sizeof(*from) * (size_t)to->cols);
}

static void add(const uint16_t *a, const uint16_t *b, uint16_t *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = narrow(widen(a[i]) + widen(b[i]));
}

static int attention(Layer *m, uint16_t *normed, uint16_t *made) {
    Project *p = m->project;
    Attend *a = m->attend;
    const int64_t all = p->of[0].rows;
    normalise(&m->before, m->x, normed, m->tokens, m->hidden);
    p->x = normed, p->out = made;
    const int failed = moepack_affine_project(p);
    if (failed) return failed;
    const uint16_t *keys = made + m->tokens * all, *values = keys + m->tokens * p->of[1].rows;
    append(&a->k, a->length, keys, m->tokens, a->groups);
    append(&a->v, a->length, values, m->tokens, a->groups);
    a->q = (Rows){(const uint8_t *)made, p->head, 16, 2 * all, 2 * p->head, 2 * all};
    uint16_t *out = made + m->tokens * (all + 2 * p->of[1].rows);
    a->out = out, m->attended = out;
    return moepack_affine_attend(a, m->threads);
}

static int latent_attention(Layer *m, uint16_t *normed, uint16_t *made) {
    ProjectLatent *p = m->latent;
    Attend *a = m->attend;
    const int64_t head = p->head, all = p->heads * head, sums = p->heads * p->rank;
    uint16_t *lifted = made + m->tokens * all, *summed = lifted + m->tokens * sums, *out = summed + m->tokens * sums;
    normalise(&m->before, m->x, normed, m->tokens, m->hidden);
    p->x = normed, p->query = made;
    p->latent = out + m->tokens * m->attended_cols, p->turned = p->latent + m->tokens * p->rank;
    int failed = moepack_affine_latent(p);
    if (failed) return failed;
    append(&a->k, a->length, p->latent, m->tokens, 1);
    append(&a->k2, a->length, p->turned, m->tokens, 1);
    m->lift->x = made, m->lift->out = lifted;
    failed = moepack_affine_heads(m->lift, m->threads);
    if (failed) return failed;
    a->q = (Rows){(const uint8_t *)lifted, p->rank, 16, 2 * sums, 2 * p->rank, 2 * sums};
    a->q2 = (Rows){(const uint8_t *)(made + head - p->rotated), p->rotated, 16, 2 * all, 2 * head, 2 * all};
    a->out = summed;
    failed = moepack_affine_attend(a, m->threads);
    if (failed) return failed;
    m->lower->x = summed, m->lower->out = out;
    m->attended = out;
    return moepack_affine_heads(m->lower, m->threads);
}

static int linear_attention(const Layer *m, uint16_t *normed) {
    const Linear *l = m->linear;
    normalise(&m->before, m->x, normed, m->tokens, m->hidden);
    const int failed = dense(l->of, l->count, m->hidden, normed, l->made, m->tokens, 1, m->tiles, m->threads);
    return failed ? failed : moepack_delta(l->rule, m->threads);
}

/* Writes the shared expert's result to `out`, or adds it. */
static int shared(const Layer *m, const uint16_t *normed, int adds) {
    const int64_t inner = m->shared->rows, tokens = m->tokens, hidden = m->hidden;
    uint16_t *room = malloc(sizeof(uint16_t) * (size_t)(tokens * (5 * inner + hidden + 1)));
    if (!room) return 1;
    uint16_t *pairs = room + 2 * tokens * inner, *gated = pairs + 2 * tokens * inner, *result = gated + tokens * inner;
    uint16_t *weights = result + tokens * hidden;
    int failed = dense(m->shared, 2, hidden, normed, room, tokens, 1, m->tiles, m->threads);
    for (int64_t t = 0; t < tokens; t++)
        for (int i = 0; i < 2; i++)
            memcpy(pairs + (2 * t + i) * inner, room + (i * tokens + t) * inner, sizeof(*pairs) * (size_t)inner);
    moepack_silu_gate(pairs, gated, tokens, inner);
    if (!failed) failed = dense(m->shared_down, 1, inner, gated, result, tokens, 1, m->tiles, m->threads);
    if (m->shared_gate && !failed) {
        failed = dense(m->shared_gate, 1, hidden, normed, weights, tokens, 1, m->tiles, m->threads);
        for (int64_t t = 0; t < tokens; t++) {
            const float weight = widen(narrow(1.0f / (1.0f + expf(-widen(weights[t])))));
            for (int64_t c = t * hidden; c < (t + 1) * hidden; c++) result[c] = narrow(weight * widen(result[c]));
        }
    }
    if (!failed && adds) add(m->out, result, m->out, tokens * hidden);
    else if (!failed) memcpy(m->out, result, sizeof(*result) * (size_t)(tokens * hidden));
    free(room);
    return failed;
}

static int experts(Layer *m, uint16_t *normed, float *wide) {
    Experts *e = m->experts;
    Route *r = m->route;
    const int64_t numbers = m->tokens * m->hidden, slots = m->tokens * r->top_k, bf16 = r->logits_bf16;
    const int64_t scores = m->tokens * r->experts;
    int64_t *index = malloc((sizeof(int64_t) + sizeof(float)) * (size_t)slots + sizeof(float) * (size_t)scores);
    if (!index) return 1;
    float *gates = (float *)(index + slots), *logits = gates + slots;
    if (!bf16)
        for (int64_t i = 0; i < numbers; i++) wide[i] = widen(normed[i]);
    const void *x = bf16 ? (const void *)normed : wide;
    int failed = 0;
    if (m->wide) moepack_rows(m->wide, wide, logits, m->tokens, r->experts, m->hidden, m->threads);
    else failed = dense(m->router, 1, m->hidden, x, logits, m->tokens, bf16, m->tiles, m->threads);
    r->logits = logits;
    if (!failed) failed = moepack_route(r);
    for (int64_t s = 0; s < slots && !failed; s++) {
        const int64_t chosen = r->index[s];
        index[s] = chosen < e->up.experts && e->up.handles[chosen] ? chosen : e->up.experts;
        gates[s] = r->gates_bf16 ? widen(((const uint16_t *)r->gates)[s]) : ((const float *)r->gates)[s];
    }
    e->up.index = e->down.index = e->sum.index = index;
    e->sum.gates = gates;
    e->up.x = normed, e->sum.out = m->out;
    if (!failed) failed = moepack_affine_experts(e);
    free(index);
    if (m->shared && !failed) failed = shared(m, normed, 1);
    return failed;
}

static int layer(Layer *m) {
    const int64_t numbers = m->tokens * m->hidden;
    const Project *p = m->project;
    const ProjectLatent *l = m->latent;
    int64_t made = p ? m->tokens * 2 * (p->of[0].rows + p->of[1].rows) : 0;
    if (l) made = m->tokens * (l->heads * (l->head + 2 * l->rank) + l->rank + l->rotated + m->attended_cols);
    uint16_t *room = malloc(sizeof(uint16_t) * (size_t)(5 * numbers + made));
    if (!room) return 1;
    uint16_t *normed = m->normed ? m->normed : room + 2 * numbers, *result = room + 3 * numbers;
    if (!m->h) m->h = room + 4 * numbers;
    uint16_t *parts = room + 5 * numbers;
    int failed = 0;
    if (p) failed = attention(m, normed, parts);
    else if (l) failed = latent_attention(m, normed, parts);
    else if (m->linear) failed = linear_attention(m, normed);
    const uint16_t *attended = m->attended;
    if (m->last && !failed) {
        failed = dense(m->last, 1, m->attended_cols, attended, result, m->tokens, 1, m->tiles, m->threads);
        attended = result;
    }
    if (!failed) {
        add(m->x, attended, m->h, numbers);
        normalise(&m->after, m->h, normed, m->tokens, m->hidden);
        if (m->experts) failed = experts(m, normed, (float *)room);
        else if (m->shared) failed = shared(m, normed, 0);
        if (m->out && !failed) add(m->h, m->out, m->out, numbers);
    }
    free(room);
    return failed;
}

/* Runs layers, each on the result of the one before. Returns 0; 1 when memory is short; or more for a form without a
 * kernel. */
int moepack_affine_layers(Layer *const *m, int64_t n) {
    int failed = 0;
    for (int64_t i = 0; i < n && !failed; i++) failed = layer(m[i]);
    return failed;
}
