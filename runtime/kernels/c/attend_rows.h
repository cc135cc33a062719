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

/* Lanes of two vectors that are added to one: constants, because GCC makes others lane by lane at each use. */
#define LOW(half, l) ((l) / half % 2 ? LANES + (l) - half : (l))
#define HIGH(half, l) ((l) / half % 2 ? LANES + (l) : (l) + half)
#define FOUR(of, half, l) of(half, l), of(half, l + 1), of(half, l + 2), of(half, l + 3)
#if LANES == 16
#define ALL(of, half) FOUR(of, half, 0), FOUR(of, half, 4), FOUR(of, half, 8), FOUR(of, half, 12)
#elif LANES == 8
#define ALL(of, half) FOUR(of, half, 0), FOUR(of, half, 4)
#else
#define ALL(of, half) FOUR(of, half, 0)
#endif
#define ADD_HALVES(half)                                                             \
    for (int i = 0; i < half; i++)                                                   \
        s[i] = __builtin_shuffle(s[i], s[i + half], (NAME(Lanes)){ALL(LOW, half)}) + \
               __builtin_shuffle(s[i], s[i + half], (NAME(Lanes)){ALL(HIGH, half)});

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
#if LANES > 8
    ADD_HALVES(8)
#endif
#if LANES > 4
    ADD_HALVES(4)
#endif
    ADD_HALVES(2)
    ADD_HALVES(1)
    return s[0];
#endif
}

/* Code the n numbers of a group; return the scale, not a number if one of them is not finite. */
TARGET static uint16_t NAME(code_group)(const float *x, int64_t n, int64_t bits, uint8_t *out) {
    float most = 0, low = 0;
    int finite = 1;
    for (int64_t i = 0; i < n; i++) {
        most = x[i] > most ? x[i] : most;
        low = x[i] < low ? x[i] : low;
        finite &= x[i] - x[i] == 0.0f;
    }
    const float far = most > -low ? most : low; /* 4 bits have one level more on the side of `far` */
    const uint16_t scale = narrow(bits == 8 ? (far < 0 ? -far : far) / 127.0f : far / -8.0f);
    const float by = widen(scale);
    int8_t codes[GROUP_8];
    if (!finite || by == 0.0f)
        memset(codes, 0, sizeof codes);
    else
        for (int64_t i = 0; i < n; i++) {
            const float code = (x[i] / by + 12582912.0f) - 12582912.0f;
            const float lowest = bits == 8 ? -127.0f : -8.0f, highest = bits == 8 ? 127.0f : 7.0f;
            codes[i] = (int8_t)(code < lowest ? lowest : code > highest ? highest : code);
        }
    if (bits == 8)
        memcpy(out, codes, (size_t)n);
    else
        for (int64_t i = 0; i < n / 2; i++) out[i] = (uint8_t)((codes[i] + 8) | (codes[n / 2 + i] + 8) << 4);
    return finite ? scale : 0x7FC0;
}

/* Make one row of `Rows` BF16. */
TARGET static void NAME(opened_row)(const uint8_t *from, int64_t cols, int64_t bits, uint16_t *out) {
    const int64_t group = bits == 8 ? GROUP_8 : GROUP_4;
    const uint8_t *scales = from + cols * bits / 8;
    for (int64_t c = 0; c < cols; c += group, scales += 2) {
        const float scale = widen(short_at(scales));
        const int64_t n = least(group, cols - c);
        if (bits == 8) {
            const int8_t *codes = (const int8_t *)from + c;
            for (int64_t i = 0; i < n; i++) out[c + i] = narrow((float)codes[i] * scale);
            continue;
        }
        const uint8_t *codes = from + c / 2;
        for (int64_t i = 0; i < n / 2; i++) {
            out[c + i] = narrow((float)((codes[i] & 15) - 8) * scale);
            out[c + n / 2 + i] = narrow((float)((codes[i] >> 4) - 8) * scale);
        }
    }
}

/* A unit's n rows from number `at` on, in BF16: where they lie, or made in `room`, which then begins behind them. */
INLINE Strip NAME(strip)(const Rows *rows, const Unit *u, int64_t at, int64_t n, uint16_t **room) {
    const uint8_t *from = row_of(rows, u->batch, u->group, at);
    if (rows->bits == 16) return (Strip){(const uint16_t *)from, rows->token / 2};
    uint16_t *made = *room;
    *room += STRIP * rows->cols;
    for (int64_t i = 0; i < n; i++) NAME(opened_row)(from + i * rows->token, rows->cols, rows->bits, made + i * rows->cols);
    return (Strip){made, rows->cols};
}

#define FETCHED (2 * KEYS) /* rows ahead of those that are widened */

/* n BF16 rows as float32 rows of `wide` numbers, from number `at` on; what is past n rows or `cols` numbers is zero. */
INLINE void NAME(widened)(float *out, const uint16_t *from, int64_t row, int64_t n, int64_t cols, int64_t wide) {
    for (int64_t i = 0; i < KEYS; i++, out += wide) {
        if (i >= n) {
            memset(out, 0, (size_t)cols * sizeof(float));
            continue;
        }
        const uint16_t *x = from + i * row;
        for (int64_t c = 0; c < cols; c += 32) __builtin_prefetch(x + FETCHED * row + c);
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
#pragma GCC unroll 4
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] = parts[i + half] > parts[i] ? parts[i + half] : parts[i];
    top = parts[0] > top ? parts[0] : top;
    const float from = top == -INFINITY ? 0.0f : top; /* no key is seen: all become zeros */
    const float before = exponential(*most - from);
    memset(parts, 0, sizeof parts);
    for (int j = 0; j < STRIP; j++) scores[j] = exponential(scores[j] - from);
    for (int j = 0; j < STRIP; j += 16)
        for (int i = 0; i < 16; i++) parts[i] += scores[j + i];
#pragma GCC unroll 4
    for (int half = 8; half; half /= 2) /* additions to one number would each wait for the one before */
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    *sum = *sum * before + parts[0];
    *most = top;
    return before;
}

/* Attention of some rows of one head of k and v over keys [u->from, u->to): unnormalised sums, and each row's greatest
 * score and sum of exponentials. */
TARGET static void NAME(attend)(const Attend *m, const Unit *u, float *room, float *most, float *sum, float *acc) {
    const int64_t both = m->k.cols + m->k2.cols, q_wide = wide_of(both), v_wide = wide_of(m->v.cols), rows = u->rows;
    float *q = room, *keys = q + ROWS * q_wide, *scores = keys + KEYS * (q_wide > v_wide ? q_wide : v_wide);
    uint16_t *opened = (uint16_t *)(scores + ROWS * STRIP);
    const int64_t whole = (rows + 3) & -4;
    memset(q, 0, (size_t)(whole * q_wide) * sizeof(float));
    memset(acc, 0, (size_t)(whole * v_wide) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t h = u->group * m->heads + (u->row + r) / m->tokens, i = (u->row + r) % m->tokens;
        const uint16_t *one = (const uint16_t *)row_of(&m->q, u->batch, h, i);
        for (int64_t c = 0; c < m->q.cols; c++) q[r * q_wide + c] = widen(one[c]);
        if (m->q2.cols) {
            const uint16_t *two = (const uint16_t *)row_of(&m->q2, u->batch, h, i);
            for (int64_t c = 0; c < m->q2.cols; c++) q[r * q_wide + m->q.cols + c] = widen(two[c]);
        }
        most[r] = -INFINITY;
        sum[r] = 0;
    }
    memset(keys, 0, (size_t)(KEYS * q_wide) * sizeof(float));
    for (int64_t at = u->from; at < u->to; at += STRIP) {
        const int64_t n = least(STRIP, u->to - at);
        if (!sees(m, u, at, n)) continue;
        uint16_t *left = opened;
        const Strip k = NAME(strip)(&m->k, u, at, n, &left);
        const Strip k2 = m->k2.cols ? NAME(strip)(&m->k2, u, at, n, &left) : k;
        const Strip v = m->v.at != m->k.at ? NAME(strip)(&m->v, u, at, n, &left) : k;
        if (v_wide > q_wide || m->k.cols != m->v.cols) /* zeros beyond the numbers of a key, where values were */
            memset(keys, 0, (size_t)(KEYS * q_wide) * sizeof(float));
        else if (q_wide > both)
            for (int j = 0; j < KEYS; j++) memset(keys + j * q_wide + both, 0, (size_t)(q_wide - both) * sizeof(float));
        for (int64_t j = 0; j < n; j += KEYS) {
            const int64_t some = least(KEYS, n - j);
            NAME(widened)(keys, k.at + j * k.row, k.row, some, m->k.cols, q_wide);
            if (m->k2.cols) NAME(widened)(keys + m->k.cols, k2.at + j * k2.row, k2.row, some, m->k2.cols, q_wide);
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
            NAME(widened)(keys, v.at + j * v.row, v.row, least(KEYS, n - j), m->v.cols, v_wide);
            NAME(sums)(scores + j, STRIP, keys, whole, v_wide, acc);
        }
    }
}

/* An indexer's scores of n keys from key `at` on; `room` is zeros at first, and stays so where no number is. */
TARGET static void NAME(index)(const Index *m, int64_t at, int64_t n, float *room) {
    const int64_t rows = (m->heads + 3) & -4, wide = wide_of(m->cols);
    float *products = room, *q = products + rows * STRIP, *keys = q + rows * wide;
    for (int64_t t = 0; t < m->tokens; t++) {
        const uint16_t *from = m->q + t * m->heads * m->cols;
        for (int64_t h = 0; h < m->heads; h++)
            for (int64_t c = 0; c < m->cols; c++) q[h * wide + c] = widen(from[h * m->cols + c]);
        for (int64_t j = 0; j < n; j += KEYS) {
            NAME(widened)(keys, m->k + (at + j) * m->row, m->row, least(KEYS, n - j), m->cols, wide);
            NAME(dots)(q, keys, rows, wide, 1.0f, products + j, STRIP);
        }
        weigh(m, t, at, n, products);
    }
}

/* One head's product of `tokens` rows of x with its matrix: by rows (dots), or by columns (sums). The matrix's rows are
 * BF16, `row` numbers apart; or it is `tile`, in float32, with zeros behind the last rows and columns. */
TARGET static void NAME(head)(const Heads *m, int64_t h, const uint16_t *matrix, const float *tile, int64_t row, float *room) {
    const int64_t n = m->sums ? m->in : m->out_cols, cols = m->sums ? m->out_cols : m->in;
    const int64_t wide = tile ? row : wide_of(cols);
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
        if (!tile) memset(rows, 0, (size_t)(KEYS * wide) * sizeof(float));
        for (int64_t j = 0; j < n; j += KEYS) {
            if (!tile) NAME(widened)(rows, matrix + j * row, row, least(KEYS, n - j), cols, wide);
            const float *some_rows = tile ? tile + j * wide : rows;
            if (m->sums)
                NAME(sums)(x + j, ld, some_rows, whole, wide, made);
            else
                NAME(dots)(x, some_rows, whole, wide, 1.0f, made + j, ld);
        }
        for (int64_t t = 0; t < some; t++) {
            uint16_t *out = m->out + h * m->out_at[0] + (first + t) * m->out_at[1];
            const float *from = made + t * (m->sums ? wide : ld);
            for (int64_t c = 0; c < m->out_cols; c++) out[c] = narrow(from[c]);
        }
    }
}

#undef HEADS
#undef FETCHED
#undef LOW
#undef HIGH
#undef FOUR
#undef ALL
#undef ADD_HALVES
#undef INLINE
#undef V
