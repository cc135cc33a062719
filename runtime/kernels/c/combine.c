/* Unpack weights for products that another library makes; weight and add the outputs of a token's experts. */
#include "gemm.h"

/* ---- unpack weights, for products of many tokens that another library makes */
typedef struct {
    const Unpack *m;
    atomic_llong next;
} UnpackRun;

static void unpack_all(void *argument) {
    UnpackRun *run = argument;
    const Unpack *m = run->m;
    int64_t row;
    while ((row = m->from + UNIT * atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < m->to)
        moepack_unpacking(m, row, row + UNIT < m->to ? UNIT : m->to - row,
                          (uint8_t *)m->out + (row - m->from) * (m->out_bf16 ? 2 : 4));
}

/* Returns 0, or 2 for a form without a kernel, as BF16 is here. */
int moepack_affine_unpack(const Unpack *m) {
    if (!known(m->form) || m->form->bits == 16) return 2;
    UnpackRun run = {.m = m};
    atomic_init(&run.next, 0);
    int64_t units = ceil_div(m->to - m->from, UNIT);
    moepack_parallel(unpack_all, &run, (int)least(units, m->threads));
    return 0;
}

/* ---- a token's experts */
typedef struct {
    const Combine *m;
    atomic_llong next;
} CombineRun;

static void combine_all(void *argument) {
    enum { PART = 512 };
    CombineRun *run = argument;
    const Combine *m = run->m;
    int64_t batches = ceil_div(m->cols, PART), i;
    while ((i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < batches * m->tokens) {
        int64_t token = i / batches, first = i % batches * PART, n = m->cols - first < PART ? m->cols - first : PART;
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
