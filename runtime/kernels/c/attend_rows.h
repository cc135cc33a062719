/* One instruction set's loops of attention.c, which includes this file with NAME, TARGET and LANES (numbers of a vector).
 * Vectors are GCC's, so the same text becomes SSE, AVX2 or AVX-512 code. */
#define INLINE TARGET static inline __attribute__((always_inline))
#define V NAME(Vector)
#define HEADS (LANES / 4) /* rows of a tile; with 4 keys, its sums are LANES, which `totals` adds up to one vector */

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(Lanes) __attribute__((vector_size(4 * LANES)));

INLINE V NAME(load)(const float *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void NAME(store)(float *to, V v) { memcpy(to, &v, sizeof v); }

/* Return in lane i the sum of vector i's lanes: halves of two vectors are added to one vector, then quarters, and so on. */
INLINE V NAME(totals)(V *s) {
#ifdef __clang__ /* which has no shuffle by a vector of lanes */
    V out;
    for (int i = 0; i < LANES; i++) {
        out[i] = 0;
        for (int l = 0; l < LANES; l++) out[i] += s[i][l];
    }
    return out;
#else
#pragma GCC unroll 8
    for (int half = LANES / 2; half; half /= 2) {
        NAME(Lanes) low, high;
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            const int second = l / half % 2;
            low[l] = second ? LANES + l - half : l;
            high[l] = second ? LANES + l : l + half;
        }
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            s[i] = __builtin_shuffle(s[i], s[i + half], low) + __builtin_shuffle(s[i], s[i + half], high);
    }
    return s[0];
#endif
}

/* n BF16 rows as float32 rows of `wide` numbers, from number `at` on; what is past n rows or `cols` numbers is zero. */
INLINE void NAME(widened)(float *out, const uint16_t *from, int64_t row, int64_t n, int64_t cols, int64_t wide) {
    for (int64_t i = 0; i < KEYS; i++, out += wide) {
        if (i >= n) {
            memset(out, 0, (size_t)cols * sizeof(float));
            continue;
        }
        const uint16_t *x = from + i * row;
        for (int64_t c = 0; c < cols; c++) out[c] = widen(x[c]);
    }
}

/* out[r * ld + j] = scale * (row r of q) . (row j of keys), for KEYS keys; rows of `wide` numbers. */
INLINE void NAME(dots)(const float *q, const float *keys, int64_t rows, int64_t wide, float scale, float *out, int64_t ld) {
    for (int64_t r = 0; r < rows; r += HEADS)
        for (int64_t j = 0; j < KEYS; j += 4) {
            V s[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) s[i] = (V){0};
            const float *x = q + r * wide, *k = keys + j * wide;
            for (int64_t c = 0; c < wide; c += LANES) {
                const V k0 = NAME(load)(k + c), k1 = NAME(load)(k + wide + c);
                const V k2 = NAME(load)(k + 2 * wide + c), k3 = NAME(load)(k + 3 * wide + c);
#pragma GCC unroll 4
                for (int a = 0; a < HEADS; a++) {
                    const V by = NAME(load)(x + a * wide + c);
                    s[4 * a] += by * k0;
                    s[4 * a + 1] += by * k1;
                    s[4 * a + 2] += by * k2;
                    s[4 * a + 3] += by * k3;
                }
            }
            float sums[LANES];
            NAME(store)(sums, NAME(totals)(s) * scale);
#pragma GCC unroll 4
            for (int a = 0; a < HEADS; a++) memcpy(out + (r + a) * ld + j, sums + 4 * a, 4 * sizeof(float));
        }
}

/* acc[r * wide + c] += sum over KEYS values of p[r * ld + j] * values[j * wide + c]; rows come in fours. */
INLINE void NAME(sums)(const float *p, int64_t ld, const float *values, int64_t rows, int64_t wide, float *acc) {
    for (int64_t r = 0; r < rows; r += 4)
        for (int64_t c = 0; c < wide; c += 2 * LANES) {
            V s[8];
#pragma GCC unroll 4
            for (int a = 0; a < 4; a++) {
                s[2 * a] = NAME(load)(acc + (r + a) * wide + c);
                s[2 * a + 1] = NAME(load)(acc + (r + a) * wide + c + LANES);
            }
            for (int j = 0; j < KEYS; j++) {
                const V one = NAME(load)(values + j * wide + c), two = NAME(load)(values + j * wide + c + LANES);
#pragma GCC unroll 4
                for (int a = 0; a < 4; a++) {
                    const float by = p[(r + a) * ld + j];
                    s[2 * a] += by * one;
                    s[2 * a + 1] += by * two;
                }
            }
#pragma GCC unroll 4
            for (int a = 0; a < 4; a++) {
                NAME(store)(acc + (r + a) * wide + c, s[2 * a]);
                NAME(store)(acc + (r + a) * wide + c + LANES, s[2 * a + 1]);
            }
        }
}

/* One block of a row's softmax: scores become e^(score - greatest so far); returns by what older sums are multiplied. */
INLINE float NAME(soften)(float *scores, float *most, float *sum) {
    float top = *most;
    float parts[16];
    memcpy(parts, scores, sizeof parts);
    for (int j = 16; j < STRIP; j += 16)
        for (int i = 0; i < 16; i++) parts[i] = scores[j + i] > parts[i] ? scores[j + i] : parts[i];
    for (int i = 0; i < 16; i++) top = parts[i] > top ? parts[i] : top;
    const float from = top == -INFINITY ? 0.0f : top; /* no key is seen: all become zeros */
    const float before = exponential(*most - from);
    memset(parts, 0, sizeof parts);
    for (int j = 0; j < STRIP; j++) scores[j] = exponential(scores[j] - from);
    for (int j = 0; j < STRIP; j += 16)
        for (int i = 0; i < 16; i++) parts[i] += scores[j + i];
    float added = 0;
    for (int i = 0; i < 16; i++) added += parts[i];
    *sum = *sum * before + added;
    *most = top;
    return before;
}

/* Attention of some rows of one head of k and v over keys [u->from, u->to): unnormalised sums, and each row's greatest
 * score and sum of exponentials. */
TARGET static void NAME(attend)(const Attend *m, const Unit *u, float *room, float *most, float *sum, float *acc) {
    const int64_t q_wide = wide_of(m->cols + m->cols2), v_wide = wide_of(m->out_cols), rows = u->rows;
    float *q = room, *keys = q + ROWS * q_wide, *scores = keys + KEYS * (q_wide > v_wide ? q_wide : v_wide);
    const int64_t whole = (rows + 3) & -4;
    memset(q, 0, (size_t)(whole * q_wide) * sizeof(float));
    memset(acc, 0, (size_t)(whole * v_wide) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t h = u->group * m->heads + (u->row + r) / m->tokens, i = (u->row + r) % m->tokens;
        const uint16_t *one = m->q + u->batch * m->q_at[0] + h * m->q_at[1] + i * m->q_at[2];
        for (int64_t c = 0; c < m->cols; c++) q[r * q_wide + c] = widen(one[c]);
        if (m->cols2) {
            const uint16_t *two = m->q2 + u->batch * m->q2_at[0] + h * m->q2_at[1] + i * m->q2_at[2];
            for (int64_t c = 0; c < m->cols2; c++) q[r * q_wide + m->cols + c] = widen(two[c]);
        }
        most[r] = -INFINITY;
        sum[r] = 0;
    }
    memset(keys, 0, (size_t)(KEYS * q_wide) * sizeof(float));
    const uint16_t *k = m->k + u->batch * m->k_at[0] + u->group * m->k_at[1];
    const uint16_t *k2 = m->cols2 ? m->k2 + u->batch * m->k2_at[0] + u->group * m->k2_at[1] : 0;
    const uint16_t *v = m->v + u->batch * m->v_at[0] + u->group * m->v_at[1];
    for (int64_t at = u->from; at < u->to; at += STRIP) {
        const int64_t n = least(STRIP, u->to - at);
        if (v_wide > q_wide || m->cols != m->out_cols) /* zeros beyond the numbers of a key, where values were */
            memset(keys, 0, (size_t)(KEYS * q_wide) * sizeof(float));
        else if (q_wide > m->cols + m->cols2)
            for (int j = 0; j < KEYS; j++)
                memset(keys + j * q_wide + m->cols + m->cols2, 0, (size_t)(q_wide - m->cols - m->cols2) * sizeof(float));
        for (int64_t j = 0; j < n; j += KEYS) {
            const int64_t some = least(KEYS, n - j);
            NAME(widened)(keys, k + (at + j) * m->k_at[2], m->k_at[2], some, m->cols, q_wide);
            if (m->cols2) NAME(widened)(keys + m->cols, k2 + (at + j) * m->k2_at[2], m->k2_at[2], some, m->cols2, q_wide);
            NAME(dots)(q, keys, whole, q_wide, m->scale, scores + j, STRIP);
        }
        for (int64_t r = 0; r < rows; r++) {
            hide(m, u, r, at, n, scores + r * STRIP);
            const float before = NAME(soften)(scores + r * STRIP, most + r, sum + r);
            if (before != 1.0f)
                for (int64_t c = 0; c < v_wide; c++) acc[r * v_wide + c] *= before;
        }
        for (int64_t r = rows; r < whole; r++) memset(scores + r * STRIP, 0, STRIP * sizeof(float));
        memset(keys, 0, (size_t)(KEYS * v_wide) * sizeof(float));
        for (int64_t j = 0; j < n; j += KEYS) {
            NAME(widened)(keys, v + (at + j) * m->v_at[2], m->v_at[2], least(KEYS, n - j), m->out_cols, v_wide);
            NAME(sums)(scores + j, STRIP, keys, whole, v_wide, acc);
        }
    }
}

/* One head's product of `tokens` rows of x with its matrix: by rows (dots), or by columns (sums). */
TARGET static void NAME(head)(const Heads *m, int64_t h, const uint16_t *matrix, int64_t row, float *room) {
    const int64_t n = m->sums ? m->in : m->out_cols, cols = m->sums ? m->out_cols : m->in, wide = wide_of(cols);
    const int64_t ld = (n + KEYS - 1) / KEYS * KEYS, x_wide = m->sums ? ld : wide;
    float *x = room, *made = x + ROWS * x_wide, *rows = made + ROWS * (m->sums ? wide : ld);
    for (int64_t first = 0; first < m->tokens; first += ROWS) {
        const int64_t some = least(ROWS, m->tokens - first), whole = (some + 3) & -4;
        memset(x, 0, (size_t)(whole * x_wide) * sizeof(float));
        for (int64_t t = 0; t < some; t++) {
            const uint16_t *from = m->x + h * m->x_at[0] + (first + t) * m->x_at[1];
            for (int64_t c = 0; c < m->in; c++) x[t * x_wide + c] = widen(from[c]);
        }
        if (m->sums) memset(made, 0, (size_t)(whole * wide) * sizeof(float));
        memset(rows, 0, (size_t)(KEYS * wide) * sizeof(float));
        for (int64_t j = 0; j < n; j += KEYS) {
            NAME(widened)(rows, matrix + j * row, row, least(KEYS, n - j), cols, wide);
            if (m->sums)
                NAME(sums)(x + j, ld, rows, whole, wide, made);
            else
                NAME(dots)(x, rows, whole, wide, 1.0f, made + j, ld);
        }
        for (int64_t t = 0; t < some; t++) {
            uint16_t *out = m->out + h * m->out_at[0] + (first + t) * m->out_at[1];
            const float *from = made + t * (m->sums ? wide : ld);
            for (int64_t c = 0; c < m->out_cols; c++) out[c] = narrow(from[c]);
        }
    }
}

#undef HEADS
#undef INLINE
#undef V
