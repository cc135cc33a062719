/* What a decoding token needs in one call: a layer's queries, keys and values, and a layer's experts. Calls from Python
 * one by one, with a tensor between each two, take longer than small products. */
#include "gemm.h"

/* Queries, keys and values: products, normalisations of each head or of a whole row, rotation of queries and keys. */
typedef struct {
    const Dense *of; /* three matrices */
    int64_t cols, tokens, tiles, threads;
    const uint16_t *x;        /* [tokens][cols] */
    uint16_t *out;            /* the three results, one after another, [tokens][rows] each */
    int64_t head, turned, angles; /* columns of a head; of those, the columns that are rotated: 0 for none */
    const uint16_t *cos, *sin;    /* [tokens][angles], as in Rope */
    const uint16_t *weight[2]; /* of the normalisations of queries and keys; 0 for none */
    int64_t norm_cols[2], norm_form[2];
    double epsilon[2];
} Project;

/* Returns what moepack_affine_dense does. */
int moepack_affine_project(const Project *m) {
    const int failed = moepack_affine_dense(m->of, 3, m->cols, m->x, m->out, m->tokens, 1, m->tiles, m->threads);
    if (failed) return failed;
    uint16_t *at = m->out;
    for (int i = 0; i < 2; at += m->tokens * m->of[i].rows, i++) {
        const int64_t numbers = m->tokens * m->of[i].rows;
        if (m->weight[i])
            moepack_affine_norm(at, m->weight[i], at, numbers / m->norm_cols[i], m->norm_cols[i], m->norm_form[i], m->epsilon[i]);
        if (m->turned) {
            const Rope rope = {at, m->cos, m->sin, m->tokens, m->of[i].rows / m->head, m->head, m->turned, m->angles};
            moepack_rope(&rope);
        }
    }
    return 0;
}

/* A layer's experts with silu gates for few BF16 tokens: two products, and the weighted sum. `up.out`, `down.x`,
 * `down.out` and `sum.from` are set here. Returns what moepack_affine_product does. */
typedef struct {
    Gemm up, down;
    Combine sum;
} Experts;

int moepack_affine_experts(Experts *m) {
    const int64_t slots = m->up.slots, inner = m->down.cols;
    uint16_t *room = malloc(sizeof(uint16_t) * (size_t)(slots * (3 * inner + m->down.rows)));
    if (!room) return 1;
    uint16_t *gated = room + 2 * slots * inner, *y = gated + slots * inner;
    m->up.out = room;
    int failed = moepack_affine_product(&m->up);
    if (!failed) {
        moepack_silu_gate(room, gated, slots, inner);
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
