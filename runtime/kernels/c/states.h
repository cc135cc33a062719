/* What layers with a state of fixed size have in common (delta.c, mamba.c): a causal convolution, whose last inputs are
 * kept, and gates. */
#ifndef MOEPACK_STATES_H
#define MOEPACK_STATES_H
#include <math.h>

#include "lanes.h"

#ifdef HAVE_X86
#define WHOLE512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")))
#endif

/* BF16 numbers of tokens' heads of keys: that of token t and head h begins at `at + t * row + h * step`. */
typedef struct {
    const uint16_t *at;
    int64_t row, step;
} Part;

SMALL float sigmoid(float x) {
    const float e = exponential(x < 0 ? x : -x);
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

SMALL float dot(const float *a, const float *b, int64_t n) {
    float sums[LANES] = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES)
        for (int i = 0; i < LANES; i++) sums[i] += a[c + i] * b[c + i];
    for (; c < n; c++) sums[c % LANES] += a[c] * b[c];
    return total(sums);
}

/* The convolution of n tokens' channels, a part of them: `rows` has `width` older rows before them, and gets results from
 * its beginning. `bias` may be 0. The window moves on. */
SMALL void convolve(const Part *of, int64_t first, int64_t head, int64_t n, int64_t cols, int64_t width, int64_t stride,
                    const uint16_t *weights, const uint16_t *bias, uint16_t *window, float *rows, float *filter) {
    for (int64_t c = 0; c < cols; c++)
        for (int64_t i = 0; i < width; i++) {
            rows[i * stride + c] = widen(window[c * width + i]);
            filter[i * stride + c] = widen(weights[c * width + i]);
        }
    for (int64_t t = 0; t < n; t++) {
        const uint16_t *x = of->at + (first + t) * of->row + head * of->step;
        float *row = rows + (width + t) * stride;
        for (int64_t c = 0; c < cols; c++) row[c] = widen(x[c]);
    }
    for (int64_t c = 0; c < cols; c++)
        for (int64_t i = 0; i < width; i++) window[c * width + i] = narrow(rows[(n + i) * stride + c]); /* exact */
    for (int64_t t = 0; t < n; t++) {
        float *out = rows + t * stride;
        for (int64_t c = 0; c < cols; c++) {
            float sum = bias ? widen(bias[c]) : 0;
            for (int64_t i = 0; i < width; i++) sum += rows[(t + 1 + i) * stride + c] * filter[i * stride + c];
            out[c] = sum * sigmoid(sum);
        }
    }
}

#endif
