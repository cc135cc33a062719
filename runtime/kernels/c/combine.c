/* Unpack weights for products that another library makes; weight and add the outputs of a token's experts. */
#include "gemm.h"

/* ---- unpack weights, for products of many tokens that another library makes */
static void unpack_unit(const void *of, int64_t number, void *room) {
    const Unpack *m = of;
    const int64_t first = UNIT * number, row = m->from + first;
    (void)room;
    moepack_unpacking(m, row, least(UNIT, m->to - row), (uint8_t *)m->out + first * (m->out_bf16 ? 2 : 4));
}

/* Returns 0, or 2 for a form without a kernel, as BF16 is here. */
int moepack_affine_unpack(const Unpack *m) {
    if (!known(m->form) || m->form->bits == 16) return 2;
    moepack_pieces(unpack_unit, m, ceil_div(m->to - m->from, UNIT), m->threads, 0, 0);
    return 0;
}

/* ---- a token's experts */
enum { PART = 512 }; /* columns of a token that are added up at a time */

static void combine_part(const void *of, int64_t number, void *room) {
    const Combine *m = of;
    const int64_t parts = ceil_div(m->cols, PART), token = number / parts, first = number % parts * PART;
    const int64_t n = least(PART, m->cols - first);
    float sum[PART] = {0};
    (void)room;
    for (int64_t s = token * m->top_k; s < (token + 1) * m->top_k; s++) {
        if (m->index[s] < 0 || m->index[s] >= m->experts) continue;
        int64_t at = s * m->cols + first;
        float gate = m->gates[s];
        if (m->round)
            for (int64_t c = 0; c < n; c++) sum[c] += widen(narrow(gate * widen(((const uint16_t *)m->from)[at + c])));
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

void moepack_affine_combine(const Combine *m) {
    const int64_t threads = m->tokens * m->cols < 32768 ? 1 : m->threads;
    moepack_pieces(combine_part, m, ceil_div(m->cols, PART) * m->tokens, threads, 0, 0);
}
