/* One instruction set's loops over experts' rows for float32 activations, and unpacking. The instruction set's C file
 * includes this file, and defines before
 *
 *   NAME(x), INLINE, CALLED, WHOLE   x with the set's suffix; how inner, outer and other files' functions are declared
 *   L                                lanes of a vector: 16, 8 or 1 (rows of a packed matrix, columns of a BF16 one)
 *   F, I, T16                        L floats; L 32-bit words; a table of 16 floats
 *   LOADI, LOADF, STOREF, LOADT, SET loads, a store, a table's load, a broadcast
 *   ADD, SUB, MUL, FMA, NFMA, SUM    a + b, a - b, a * b, a * b + c, c - a * b, the sum of the lanes
 *   DROP(words, n)                   words shifted right by n bits
 *   LOOKUP(table, words)             table[word & 15]
 *   CODE4(words), CODE8(words)       (word & 15) - 7.5, (word & 255) - 127.5
 *   BF16(at), BYTES(at)              L BF16 numbers or bytes as floats
 *   SETI, ADDI, AND, SHL, SRA, MAXI  of 32-bit words: a broadcast, a + b, a & b, shifts (SRA keeps the sign), the greater one
 *   SRA16(words, n)                  SRA of both 16-bit halves
 *   XOR, SUBI                        of 32-bit words; FLOATS(words): these as floats, rounded
 *   LEVELS(states)                   the levels of trellis states, of 16 bits each in both halves of words
 *   LOADB, LOADSB, LOADSH            L bytes, signed bytes and signed 16-bit numbers as 32-bit words
 *   AS_FLOATS(words)                 the words' bits as floats
 *   STOREB(at, v), STOREB2(at, v, w) a store of L floats, or of twice L, rounded to BF16
 *   RB, TB                           vectors of rows, and activations, that one pass holds in registers
 *   STREAM(at)                       a hint to fetch the line at `at`
 *
 * The inner step of a packed product is a look-up. A LUT, made once for each activation, has the 16 values that 4 bits
 * of codes can add to a sum. 4 bits of 16 rows look up their values in one permutation: 64 one-bit or 32 two-bit
 * weights in three instructions. For 4-bit codes the LUT has the codes, which are then multiplied; 8-bit codes are
 * converted to numbers. Codes count from the middle of their range, so that a zero point corrects little:
 * scale * (sum code * x - zero * sum x).
 */

#include "codes.h"

#define QUAD 4.0f /* LUTs of four one-bit codes are for codes worth 4: the high plane of three bits */

static const float quad_of[4][16] = {
#define Q(a, b) QUAD * a / 2, QUAD * b / 2
    {Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1), Q(-1, 1)},
    {Q(-1, -1), Q(1, 1), Q(-1, -1), Q(1, 1), Q(-1, -1), Q(1, 1), Q(-1, -1), Q(1, 1)},
    {Q(-1, -1), Q(-1, -1), Q(1, 1), Q(1, 1), Q(-1, -1), Q(-1, -1), Q(1, 1), Q(1, 1)},
    {Q(-1, -1), Q(-1, -1), Q(-1, -1), Q(-1, -1), Q(1, 1), Q(1, 1), Q(1, 1), Q(1, 1)},
};
static const float pair_of[2][16] = {
    {-1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f},
    {-1.5f, -1.5f, -1.5f, -1.5f, -.5f, -.5f, -.5f, -.5f, .5f, .5f, .5f, .5f, 1.5f, 1.5f, 1.5f, 1.5f},
};

static const float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};
static const float two_bits[16] = {-1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f,
                                   -1.5f, -.5f, .5f, 1.5f, -1.5f, -.5f, .5f, 1.5f};
static const float one_bit[16] = {-.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f, -.5f, .5f};

/* As `plane`, for trellis codes in `low` and `high`. */
INLINE void NAME(trellis)(const int bits, const int R, const int T, const uint32_t *const *low, const uint32_t *const *high,
                          int64_t from, int64_t to, const float *const *x, I state[RB][2], F acc[RB][TB]) {
    for (int64_t w = from; w < to; w++) {
        I v[RB], h[RB];
        UNROLL for (int r = 0; r < R; r++) {
            v[r] = h[r] = LOADI(low[r] + w * BLOCK);
            if (bits == TRELLIS3) h[r] = DROP(LOADI(high[r] + w / 2 * BLOCK), w % 2 * 16);
            STREAM(low[r] + (w + AHEAD) * BLOCK);
        }
        UNROLL for (int i = 0; i < 16; i++) UNROLL for (int r = 0; r < R; r++) {
            const F code = NAME(next_level)(bits, state[r], v + r, h + r);
            UNROLL for (int t = 0; t < T; t++) acc[r][t] = FMA(code, SET(x[t][w * 16 + i]), acc[r][t]);
        }
    }
}

/* Adds to `acc` the products of words [from, to) of one plane, for R vectors of rows and T activations. `values` has a
 * LUT for each 4 bits of a row, or for `codes` of 4 or 8 bits or MXFP4 the activation itself. */
INLINE void NAME(plane)(const int codes, const int R, const int T, const uint32_t *const *words, int64_t from, int64_t to,
                        const float *const *values, F acc[RB][TB]) {
    const int each = codes == 8 ? 8 : 4, fields = 32 / each; /* bits at a time */
    const T16 fp4 = LOADT(e2m1);
    for (int64_t w = from; w < to; w++) {
        I v[RB];
        UNROLL for (int r = 0; r < R; r++) v[r] = LOADI(words[r] + w * BLOCK);
        UNROLL for (int r = 0; r < R; r++) STREAM(words[r] + (w + AHEAD) * BLOCK);
        UNROLL for (int i = 0; i < fields; i++) {
            if (codes) {
                F c[RB];
                UNROLL for (int r = 0; r < R; r++) 
                    c[r] = codes == 8 ? CODE8(v[r]) : codes == MXFP4 ? LOOKUP(fp4, v[r]) : CODE4(v[r]);
                UNROLL for (int t = 0; t < T; t++) {
                    F x = SET(values[t][w * fields + i]);
                    UNROLL for (int r = 0; r < R; r++) acc[r][t] = FMA(c[r], x, acc[r][t]);
                }
            } else {
                UNROLL for (int t = 0; t < T; t++) {
                    T16 table = LOADT(values[t] + (w * 8 + i) * 16);
                    UNROLL for (int r = 0; r < R; r++) acc[r][t] = ADD(acc[r][t], LOOKUP(table, v[r]));
                }
            }
            if (i < fields - 1) {
                UNROLL for (int r = 0; r < R; r++) v[r] = DROP(v[r], each);
            }
        }
    }
}

/* Products of R vectors of rows from `row` on and T activations, into out[r * T + t]. */
INLINE void NAME(packed)(const int bits, const int R, const int T, const Gemm *m, const Form *f, const uint8_t *base,
                         int64_t row, const Prepared *const *x, float *out) {
    const int fp4 = bits == MXFP4 || bits == NVFP4, width = fp4 ? 4 : bits > 16 ? 8 : bits, of = scales_of(f);
    const int item = fp4 || of == OF_BYTE ? 1 : 2;
    const int64_t groups = ceil_div(m->cols, f->group), per_word = 32 / low_bits(bits);
    const int64_t low_words = ceil_div(m->cols, per_word), high_words = ceil_div(m->cols, 32);
    const int64_t step = f->group / per_word, high_step = f->group / 32;
    const uint32_t *low[RB], *high[RB];
    const uint8_t *scale[RB], *zero[RB];
    const float *values[TB], *quads[TB], *sums[TB];
    F total[RB][TB];
    I state[RB][2];
    UNROLL for (int r = 0; r < R; r++) {
        int64_t block = (row + r * L) / BLOCK, lane = (row + r * L) % BLOCK;
        state[r][0] = state[r][1] = SETI(0);
        low[r] = (const uint32_t *)(base + f->low) + block * low_words * BLOCK + lane;
        high[r] = (const uint32_t *)(base + f->high) + block * high_words * BLOCK + lane;
        scale[r] = base + f->scale + (block * groups * BLOCK + lane) * item;
        zero[r] = base + f->zero + block * groups * BLOCK + lane;
        UNROLL for (int t = 0; t < T; t++) total[r][t] = SET(0.0f);
    }
    UNROLL for (int t = 0; t < T; t++) {
        values[t] = bits >= 4 ? x[t]->x : bits == 1 ? x[t]->quads : x[t]->pairs;
        quads[t] = x[t]->quads;
        sums[t] = x[t]->sums[f->group / 64];
    }
    const F unit = SET(1.0f / (1 << (8 - width))), middle = SET(-(float)((1 << width) - 1) / 2);
    for (int64_t g = 0; g < groups; g++) {
        F acc[RB][TB];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) acc[r][t] = SET(0.0f);
        int64_t to = (g + 1) * step < low_words ? (g + 1) * step : low_words;
        if (is_trellis(bits))
            NAME(trellis)(bits, R, T, low, high, g * step, to, values, state, acc);
        else
            NAME(plane)(fp4 ? MXFP4 : bits == 5 ? 4 : bits >= 4 ? bits : 0, R, T, low, g * step, to, values, acc);
        if (bits == 3 || bits == 5) {
            to = (g + 1) * high_step < high_words ? (g + 1) * high_step : high_words;
            F above[RB][TB]; /* of five bits a quarter of what they are worth */
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) above[r][t] = bits == 3 ? acc[r][t] : SET(0.0f);
            NAME(plane)(0, R, T, high, g * high_step, to, quads, above);
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++)
                acc[r][t] = bits == 3 ? above[r][t] : FMA(above[r][t], SET(4.0f), acc[r][t]);
        }
        UNROLL for (int r = 0; r < R; r++) {
            F s = SCALE(bits, of, scale[r] + g * BLOCK * item);
            if (bits == 1) s = MUL(s, SET(1 / QUAD));
            if (f->zeros != MIDPOINT) {
                F z = f->zeros == SYMMETRIC ? SET(0.5f) : FMA(BYTES(zero[r] + g * BLOCK), unit, middle);
                if (bits == 1) z = MUL(z, SET(QUAD));
                UNROLL for (int t = 0; t < T; t++) acc[r][t] = NFMA(z, SET(sums[t][g]), acc[r][t]);
            }
            UNROLL for (int t = 0; t < T; t++) total[r][t] = FMA(s, acc[r][t], total[r][t]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) {
        if (f->outer >= 0) total[r][t] = MUL(total[r][t], SET(outer_of(f, base, row + r * L)));
        STOREF(out + (r * T + t) * L, total[r][t]);
    }
}

/* Products of R rows of a BF16 matrix and T activations, into out[r * T + t]. */
INLINE void NAME(plain)(const int R, const int T, const Gemm *m, const Form *f, const uint8_t *base, int64_t row,
                        const Prepared *const *x, float *out) {
    const uint16_t *w[RB];
    F acc[RB][TB];
    const int64_t whole = m->cols - m->cols % L;
    UNROLL for (int r = 0; r < R; r++) {
        w[r] = (const uint16_t *)(base + f->low) + (row + r) * m->cols;
        UNROLL for (int t = 0; t < T; t++) acc[r][t] = SET(0.0f);
    }
    for (int64_t c = 0; c < whole; c += L) {
        F v[RB];
        UNROLL for (int r = 0; r < R; r++) v[r] = BF16(w[r] + c);
        UNROLL for (int t = 0; t < T; t++) {
            F a = LOADF((const float *)x[t]->at + c);
            UNROLL for (int r = 0; r < R; r++) acc[r][t] = FMA(v[r], a, acc[r][t]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) {
        float sum = SUM(acc[r][t]);
        for (int64_t c = whole; c < m->cols; c++) sum += widen(w[r][c]) * ((const float *)x[t]->at)[c];
        out[r * T + t] = sum;
    }
}

#define PACKED(bits, R, T) \
    case bits: NAME(packed)(bits, R, T, m, job->form, job->base, at, x, part); break;
#define BY_BITS(R, T) \
    switch (codes_of(job->form)) { \
        INTEGER_CODES(PACKED, R, T) \
        PACKED(MXFP4, R, T) \
        PACKED(NVFP4, R, T) \
        PACKED(TRELLIS2, R, T) \
        PACKED(TRELLIS3, R, T) \
    }

/* Products of rows [row, end), at most UNIT and from a block's first, and T activations; results go to `slot`. */
#define ROWS(T, R) \
    CALLED void NAME(rows_##T)(const Gemm *m, const Job *job, int64_t row, int64_t end, const Prepared *const *x, \
                               const int64_t *slot) { \
        float part[RB * T * L]; \
        int64_t at = row; \
        if (job->form->bits == 16) { \
            for (; at + R <= end; at += R) { \
                NAME(plain)(R, T, m, job->form, job->base, at, x, part); \
                for (int t = 0; t < T; t++) put(m, job, slot[t], at, R, part + t, T); \
            } \
            for (; at < end; at++) { \
                NAME(plain)(1, T, m, job->form, job->base, at, x, part); \
                for (int t = 0; t < T; t++) put(m, job, slot[t], at, 1, part + t, T); \
            } \
            return; \
        } \
        while (at < end) { \
            int r = at + (R - 1) * L < end ? R : 1; \
            if (r == R) { \
                BY_BITS(R, T) \
            } else { \
                BY_BITS(1, T) \
            } \
            for (int k = 0; k < r; k++) \
                for (int t = 0; t < T; t++) { \
                    int64_t first = at + k * L; \
                    put(m, job, slot[t], first, end - first < L ? end - first : L, part + (k * T + t) * L, 1); \
                } \
            at += r * L; \
        } \
    }

/* A function that takes n slots to NAME(of_4), _2 and _1, which compute so many at a time. */
#if TB >= 4
#define FOURS(of) \
    for (; t + 4 <= n; t += 4) NAME(of##_4)(m, job, row, end, x + t, slot + t);
#else
#define FOURS(of)
#endif
#define BY_SLOTS(name, of) \
    CALLED void NAME(name)(const Gemm *m, const Job *job, int64_t row, int64_t end, const Prepared *const *x, \
                           const int64_t *slot, int64_t n) { \
        int64_t t = 0; \
        FOURS(of) \
        for (; t + 2 <= n; t += 2) NAME(of##_2)(m, job, row, end, x + t, slot + t); \
        for (; t < n; t++) NAME(of##_1)(m, job, row, end, x + t, slot + t); \
    }

ROWS(1, RB)
ROWS(2, R2)
#if TB >= 4
ROWS(4, R4)
#endif
BY_SLOTS(rows, rows)

/* Prepare one activation: pad it with zeros to a multiple of 32 columns, add up its groups, make its LUTs. */
CALLED void NAME(prepare)(const Gemm *m, const void *from, Prepared *p) {
    const int64_t cols = m->cols, padded = 32 * ceil_div(cols, 32);
    int64_t c;
    p->at = from;
    if (!p->x) return;
    memcpy(p->x, from, sizeof(float) * (size_t)cols);
    memset(p->x + cols, 0, sizeof(float) * (size_t)(padded - cols));
    for (int64_t g = 0; g < padded / 32; g++) {
        F sum = SET(0.0f);
        for (int i = 0; i < 32; i += L) sum = ADD(sum, LOADF(p->x + 32 * g + i));
        p->sums[0][g] = SUM(sum);
    }
    for (int k = 1; k < 3; k++)
        for (int64_t g = 0; g < ceil_div(padded, 32 << k); g++) {
            const float *finer = p->sums[k - 1] + 2 * g;
            p->sums[k][g] = finer[0] + (2 * g + 1 < ceil_div(padded, 16 << k) ? finer[1] : 0.0f);
        }
    for (int part = 0; part < 16; part += L) {
        if (p->quads) {
            F a = LOADF(quad_of[0] + part), b = LOADF(quad_of[1] + part);
            F d = LOADF(quad_of[2] + part), e = LOADF(quad_of[3] + part);
            for (c = 0; c < padded; c += 4) {
                F y = FMA(a, SET(p->x[c]), MUL(b, SET(p->x[c + 1])));
                F z = FMA(d, SET(p->x[c + 2]), MUL(e, SET(p->x[c + 3])));
                STOREF(p->quads + 4 * c + part, ADD(y, z));
            }
        }
        if (p->pairs) {
            F a = LOADF(pair_of[0] + part), b = LOADF(pair_of[1] + part);
            for (c = 0; c < padded; c += 2)
                STOREF(p->pairs + 8 * c + part, FMA(a, SET(p->x[c]), MUL(b, SET(p->x[c + 1]))));
        }
    }
}
/* Unpack R vectors of rows from `row` on, column after column, `ld` numbers apart: as scale * (code - zero), exact; for
 * floating-point codes code * scale, rounded. Then times the outer scale, rounded where that is no power of two. */
INLINE void NAME(unpack)(const int bits, const int R, const Unpack *m, int64_t row, uint8_t *out) {
    const Form *f = m->form;
    const int p = low_bits(bits), per_word = 32 / p, width = bits > 8 ? p : bits, of = scales_of(f);
    const int wide = bits == FP8 || bits == FP8_ROW, item = wide ? 4 : (bits > 16 && !is_trellis(bits)) || of == OF_BYTE ? 1 : 2;
    const int64_t group = bits == FP8_ROW ? m->cols : f->group, groups = ceil_div(m->cols, group);
    const F unit = SET(1.0f / (1 << (8 - width))), middle = SET(-(float)((1 << width) - 1) / 2);
    const T16 twos = LOADT(two_bits);
    const T16 ones = LOADT(one_bit);
    const T16 fours = LOADT(e2m1);
    const uint32_t *low[2], *high[2];
    const uint8_t *scale[2], *zero[2];
    F outer[2];
    I state[2][2];
    UNROLL for (int r = 0; r < R; r++) {
        state[r][0] = state[r][1] = SETI(0);
        int64_t block = (row + r * L) / BLOCK, lane = (row + r * L) % BLOCK;
        low[r] = (const uint32_t *)(m->base + f->low) + block * ceil_div(m->cols, per_word) * BLOCK + lane;
        high[r] = (const uint32_t *)(m->base + f->high) + block * ceil_div(m->cols, 32) * BLOCK + lane;
        scale[r] = m->base + f->scale + (bits == FP8 ? block * groups : block * groups * BLOCK + lane) * item;
        zero[r] = m->base + f->zero + block * groups * BLOCK + lane;
        outer[r] = SET(f->outer >= 0 ? outer_of(f, m->base, row + r * L) : 1.0f);
    }
    for (int64_t c = 0; c < m->cols;) {
        const int64_t g = c / group, word = c / per_word, end = c + per_word < m->cols ? c + per_word : m->cols;
        F s[2], less[2];
        I w[2], h[2];
        UNROLL for (int r = 0; r < R; r++) {
            s[r] = bits == FP8       ? SET(((const float *)scale[r])[g])
                   : bits == FP8_ROW ? LOADF((const float *)scale[r])
                   : bits == MXFP8   ? POW2(scale[r] + g * BLOCK)
                                     : SCALE(bits, of, scale[r] + g * BLOCK * item);
            less[r] = f->zeros == STORED      ? MUL(s[r], FMA(BYTES(zero[r] + g * BLOCK), unit, middle))
                      : f->zeros == SYMMETRIC ? MUL(s[r], SET(0.5f))
                                              : SET(0.0f);
            w[r] = h[r] = LOADI(low[r] + word * BLOCK);
            if (two_planes(bits)) {
                h[r] = LOADI(high[r] + c / 32 * BLOCK);
                if (c % 32) h[r] = DROP(h[r], (int)(c % 32));
            }
        }
        for (; c < end; c++) {
            F value[2];
            UNROLL for (int r = 0; r < R; r++) {
                F code = is_trellis(bits)                ? NAME(next_level)(bits, state[r], w + r, h + r)
                         : bits == 8                      ? CODE8(w[r])
                         : bits == 4 || bits == 5        ? CODE4(w[r])
                         : bits == MXFP4 || bits == NVFP4 ? LOOKUP(fours, w[r])
                         : bits > 16                     ? E4M3_LOW(w[r])
                         : bits == 1                     ? LOOKUP(ones, w[r])
                                                         : LOOKUP(twos, w[r]);
                if (!is_trellis(bits)) w[r] = DROP(w[r], p);
                if (bits == 3 || bits == 5) {
                    code = FMA(LOOKUP(ones, h[r]), SET(bits == 3 ? 4.0f : 16.0f), code);
                    h[r] = DROP(h[r], 1);
                }
                value[r] = MUL(s[r], code);
                if (bits <= 16) value[r] = SUB(value[r], less[r]); /* both products and the difference fit a float */
                if (f->outer >= 0) value[r] = MUL(value[r], outer[r]);
            }
            if (m->out_bf16 && R == 2)
                STOREB2((uint16_t *)out + c * m->ld, value[0], value[1]);
            else
                UNROLL for (int r = 0; r < R; r++) {
                    if (m->out_bf16)
                        STOREB((uint16_t *)out + c * m->ld + r * L, value[r]);
                    else
                        STOREF((float *)out + c * m->ld + r * L, value[r]);
                }
        }
    }
}

#define UNPACK_CASE(bits, R) \
    case bits: NAME(unpack)(bits, R, m, row + r, at); break;
#define UNPACK(R) \
    switch (codes_of(m->form)) { \
        INTEGER_CODES(UNPACK_CASE, R) \
        UNPACK_CASE(MXFP4, R) \
        UNPACK_CASE(NVFP4, R) \
        UNPACK_CASE(MXFP8, R) \
        UNPACK_CASE(FP8, R) \
        UNPACK_CASE(FP8_ROW, R) \
        UNPACK_CASE(TRELLIS2, R) \
        UNPACK_CASE(TRELLIS3, R) \
    }

/* Unpack rows [row, row + n), n a multiple of 16: two vectors at a time, which fill a cache line in BF16. */
WHOLE void NAME(moepack_unpack)(const Unpack *m, int64_t row, int64_t n, uint8_t *out) {
    const int64_t size = m->out_bf16 ? 2 : 4;
    int64_t r = 0;
    for (; r + 2 * L <= n; r += 2 * L) {
        uint8_t *at = out + r * size;
        UNPACK(2)
    }
    for (; r < n; r += L) {
        uint8_t *at = out + r * size;
        UNPACK(1)
    }
}

const Loops NAME(moepack_floats) = {NAME(prepare), NAME(rows), 0};
