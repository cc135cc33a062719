/* A router's choice of experts for a few tokens, by its logits: scores, the greatest of them, and gates. */
#include <math.h>

#include "gemm.h"

enum { SOFTMAX, SIGMOID, CHOSEN }; /* scores: of all logits, of each, or the logits, whose softmax is of the chosen alone */

typedef struct {
    float by;
    int32_t of;
} Choice;

/* NaN comes first, as in torch. */
static inline int before(const Choice *a, const Choice *b) { return (isnan(a->by) && !isnan(b->by)) || a->by > b->by; }

static inline void swap(Choice *a, Choice *b) {
    const Choice kept = *a;
    *a = *b, *b = kept;
}

static void insertion(Choice *c, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        const Choice new = c[i];
        int64_t at = i;
        for (; at > 0 && before(&new, c + at - 1); at--) c[at] = c[at - 1];
        c[at] = new;
    }
}

/* Bring the first nth + 1 of n choices to the front, as nth_element of libstdc++ does: torch's topk calls it for more than
 * one in 64, so of equal scores the same are chosen, in the same order. BF16 logits are often equal. */
static void select_first(Choice *c, int64_t nth, int64_t n) {
    int64_t first = 0, last = n;
    while (last - first > 3) {
        Choice *a = c + first + 1, *b = c + first + (last - first) / 2, *d = c + last - 1, *pivot = c + first;
        Choice *median = before(a, b) ? (before(b, d) ? b : before(a, d) ? d : a) : before(a, d) ? a : before(b, d) ? d : b;
        swap(pivot, median);
        int64_t i = first + 1, j = last;
        for (;;) {
            while (before(c + i, pivot)) i++;
            j--;
            while (before(pivot, c + j)) j--;
            if (i >= j) break;
            swap(c + i, c + j);
            i++;
        }
        if (i <= nth) first = i;
        else last = i;
    }
    insertion(c + first, last - first);
}

/* Keep the scores of the best groups: others become 0, or with `two` come last. */
static void in_groups(const Route *m, float *choice, float *score, Choice *c) {
    const int64_t each = m->experts / m->groups;
    for (int64_t g = 0; g < m->groups; g++) {
        float best = -INFINITY, next = -INFINITY;
        for (int64_t e = g * each; e < (g + 1) * each; e++) {
            const float x = choice[e];
            if (x > best) next = best, best = x;
            else if (x > next) next = x;
        }
        c[g] = (Choice){m->two ? best + next : best, (int32_t)g};
    }
    select_first(c, m->kept - 1, m->groups);
    for (int64_t i = m->kept; i < m->groups; i++)
        for (int64_t e = c[i].of * each; e < (c[i].of + 1) * each; e++) {
            choice[e] = m->two ? -INFINITY : 0.0f;
            if (!m->two) score[e] = 0.0f;
        }
}

static void softmax(float *x, int64_t n) {
    float most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < n; i++) x[i] = exponential(x[i] - most);
    for (int64_t i = 0; i < n; i++) sum += x[i];
    for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

/* Returns 0, or 1 when memory is short. */
int moepack_route(const Route *m) {
    const int64_t n = m->experts, k = m->top_k;
    float *score = malloc((size_t)n * (2 * sizeof(float) + sizeof(Choice)));
    if (!score) return 1;
    float *choice = score + n;
    Choice *c = (Choice *)(choice + n);
    for (int64_t t = 0; t < m->tokens; t++) {
        for (int64_t e = 0; e < n; e++)
            score[e] = m->logits_bf16 ? widen(((const uint16_t *)m->logits)[t * n + e]) : ((const float *)m->logits)[t * n + e];
        if (m->scores == SOFTMAX) softmax(score, n);
        else if (m->scores == SIGMOID)
            for (int64_t e = 0; e < n; e++) score[e] = 1.0f / (1.0f + expf(-score[e]));
        for (int64_t e = 0; e < n; e++) choice[e] = m->bias ? score[e] + m->bias[e] : score[e];
        if (m->groups > 1) in_groups(m, choice, score, c);
        for (int64_t e = 0; e < n; e++) c[e] = (Choice){choice[e], (int32_t)e};
        select_first(c, k - 1, n);
        if (m->sorted) insertion(c, k - 1);
        float gates[16], sum = 0;
        for (int64_t i = 0; i < k; i++) gates[i] = score[c[i].of];
        if (m->scores == CHOSEN) softmax(gates, k);
        for (int64_t i = 0; i < k; i++) sum += gates[i];
        if (m->normed)
            for (int64_t i = 0; i < k; i++) gates[i] /= sum + (m->scores == SIGMOID ? 1e-20f : 0.0f);
        for (int64_t i = 0; i < k; i++) {
            const float gate = gates[i] * m->scale;
            m->index[t * k + i] = c[i].of;
            if (m->gates_bf16) ((uint16_t *)m->gates)[t * k + i] = narrow(gate);
            else ((float *)m->gates)[t * k + i] = gate;
        }
    }
    free(score);
    return 0;
}
