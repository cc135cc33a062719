/* One instruction set's loops over experts' rows for BF16 activations. The loops use the macros of affine_rows.h. A C
 * file includes this file after affine_rows.h, and defines before
 *
 *   PARTS                            1: fields of 16 bits times activations' 16; 2: fields of 8 bits times their two bytes
 *   FR                               vectors of rows that one pass takes: together whole lines of 16 words
 *   DOT(acc, fields, x)              acc + the sum of fields' products in each 32-bit word
 *   DOT16(acc, fields, x)            the same of fields of 16 bits
 *   SHL16, DROP16                    shifts of both halves of words to the left and right
 *   SETI, LOADB                      a broadcast of 32 bits; L bytes as 32-bit words
 *   AND, ADDI, SUBI, MULI, SHL       of 32-bit words
 *   FLOATS(words), FUSED(a, b, c)    words as floats, rounded; a * b + c, rounded once
 *   HALVES(words, odd)               the even or odd halves of words as BF16 numbers, widened
 *   ARRANGE(to, from, order)         64 bytes: to[i] = from[order[i]], of 16-bit or, with two PARTS, 8-bit elements
 *   FP4(words, k)                    field k of 4 bits, of E2M1 codes: twice their values, plus 12
 *   PAIRS(bytes, x), ADDH            in place of FP4: 16-bit sums of two products of unsigned bytes times signed ones;
 *                                    a 16-bit sum
 *   FP4_BYTES(bytes)                 with PAIRS: the same of the E2M1 code in each byte
 *   MAKE_TABLES(x, n, to), TABLES(words, n, tables, sum)   with PAIRS, for planes of one bit: 12 bytes of tables a column of n;
 *                                    n words of 16 rows looked up in them, and the sums into sum[2]
 *   MANY                             with PAIRS, where more than TB activations are worth a pass: their number
 *   TURN(to, from, n)                with MANY: ARRANGE, in which a word has two columns that are n apart
 *   THIRD(low, high, half, k)        with two PARTS: fields of two bits, field k of `low`, with their third bits on top
 *
 * An activation becomes 16-bit integers times a power of two, one for each 128 columns, such that the greatest number
 * of these columns becomes 2^14 or more. Sums of codes times integers are exact, so their order does not matter and
 * every instruction set makes the same bits; each group's sum is then rounded to float32 and added in order. The error
 * of an integer is at most 1/32640 of the greatest of the 128 columns, and 0 for numbers of at least 2^-7 of the
 * greatest (except 255/256 of the power of two above the greatest). BF16 itself rounds the greatest by up to 1/512.
 * Activations that are not finite make every result NaN. */

#define FIXED 128 /* columns that share a power of two: a multiple of every group size */

/* Activations of one pass. More than TB are multiplied by halves of words: 16-bit sums of so many find no registers. */
#ifdef MANY
#define PASS MANY
#else
#define PASS TB
#define MANY 0
#endif
#define HALVED(T) ((T) > TB)
#if MANY /* the compiler, which may add integers in any order, would make all products first and run out of registers */
#define KEEP(sum) __asm__("" : "+x"(sum))
#else
#define KEEP(sum) (void)(sum)
#endif

#define FIELD (16 / PARTS)                    /* bits of a field */
#define FIELDS(p) (FIELD / (p))               /* fields of a word of a plane of p bits */
#define CHAINS(T) ((T) == 1 ? PARTS : 1) /* separate sums, so that additions need not wait */
#define MASK(p) ((int32_t)(PARTS == 2 ? ((1u << (p)) - 1) * 0x01010101u : ((1u << (p)) - 1) * 0x00010001u))

#include "fixed_prepare.h"

/* Adds to `acc` the products of words [from, to) of a plane of p bits for FR vectors of rows and T activations. */
INLINE void NAME(fixed_plane)(const int p, const int T, const uint32_t *words, int64_t from, int64_t to,
                              const int32_t *const *x, I acc[FR][PASS][2][PARTS]) {
    const int hints = p <= 2 || moepack_hints;
    const I mask = SETI(MASK(p));
    for (int64_t w = from; w < to; w++) {
        I v[FR];
        UNROLL for (int r = 0; r < FR; r++) v[r] = LOADI(words + w * BLOCK + r * L);
        if (hints) STREAM(words + (w + AHEAD) * BLOCK);
        UNROLL for (int k = 0; k < FIELDS(p); k++) {
            I f[FR];
            UNROLL for (int r = 0; r < FR; r++)
                f[r] = p == 8 && PARTS == 2 ? v[r] : AND(DROP(v[r], p * k), mask);
            UNROLL for (int t = 0; t < T; t++) UNROLL for (int i = 0; i < PARTS; i++) {
                const I at = SETI(x[t][(w * FIELDS(p) + k) * PARTS + i]);
                UNROLL for (int r = 0; r < FR; r++) {
                    I *sum = &acc[r][t][k % CHAINS(T)][i];
                    *sum = DOT(*sum, f[r], at);
                    if (HALVED(T)) KEEP(*sum);
                }
            }
        }
    }
}

#ifdef PAIRS
/* As fixed_plane, for p of 1, 2 or 4, or n words of E2M1 codes, 4 at most, if `fp4`. Sums of 16 bits hold what 128
 * columns of 1 or 2 bits, 32 of 4 bits or 16 of E2M1 codes add to one of them. */
INLINE void NAME(byte_words)(const int p, const int fp4, const int T, const uint32_t *words, const int64_t n,
                             const int32_t *const *x, I acc[FR][PASS][2][PARTS]) {
    const int R = fp4 && T > 1 ? 1 : FR, chains = fp4 ? 2 : 1, fields = 8 / p; /* AVX2's registers hold so many sums */
    const I mask = SETI(((1 << p) - 1) * 0x01010101);
    UNROLL for (int first = 0; first < FR; first += R) {
        I sum[FR][PASS][2][2];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) UNROLL for (int i = 0; i < 4; i++)
            sum[r][t][i / 2][i % 2] = SETI(0);
        UNROLL for (int w = 0; w < n; w++)
            UNROLL for (int k = 0; k < fields; k++) {
                I f[FR];
                UNROLL for (int r = 0; r < R; r++) {
                    f[r] = AND(DROP(LOADI(words + w * BLOCK + (first + r) * L), p * k), mask);
                    if (fp4) f[r] = FP4_BYTES(f[r]);
                }
                UNROLL for (int t = 0; t < T; t++) UNROLL for (int i = 0; i < 2; i++) {
                    const I at = SETI(x[t][(w * fields + k) * 2 + i]);
                    UNROLL for (int r = 0; r < R; r++) {
                        I *to = &sum[r][t][k % chains][i];
                        *to = ADDH(*to, PAIRS(f[r], at));
                    }
                }
            }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) UNROLL for (int i = 0; i < 2 * chains; i++) {
            I *to = &acc[first + r][t][0][0];
            *to = DOT(*to, sum[r][t][i / 2][i % 2], SETI(i % 2 ? 0x00010001 : 0x01000100));
        }
    }
}

INLINE void NAME(byte_plane)(const int p, const int T, const uint32_t *words, int64_t from, int64_t to,
                             const int32_t *const *x, I acc[FR][PASS][2][PARTS]) {
    const int most = p < 4 ? 4 * p : 4; /* words */
    for (int64_t w = from; w < to; w += most) {
        const int64_t n = least(most, to - w);
        const int32_t *at[PASS];
        UNROLL for (int t = 0; t < T; t++) at[t] = x[t] + w * 16 / p;
        for (int i = 0; i < n; i++)
            if (p < 4 || moepack_hints) STREAM(words + (w + i + AHEAD) * BLOCK);
        NAME(byte_words)(p, 0, T, words + w * BLOCK, n, at, acc);
    }
}
#endif

/* As fixed_plane, for n words of E2M1 codes, 4 at most. */
INLINE void NAME(fixed_fp4)(const int T, const uint32_t *words, const int64_t n, const int32_t *const *x,
                            I acc[FR][PASS][2][PARTS]) {
    UNROLL for (int w = 0; w < 4; w++) if (w < n) STREAM(words + (w + AHEAD) * BLOCK);
#ifdef PAIRS
    if (!HALVED(T)) {
        NAME(byte_words)(4, 1, T, words, n, x, acc);
        return;
    }
#define FP4(v, k) AND(FP4_BYTES(AND(DROP(v, 4 * (k)), SETI(0x000F000F))), SETI(0x00FF00FF))
#endif
    UNROLL for (int w = 0; w < 4; w++) UNROLL for (int k = 0; k < FIELDS(4); k++) UNROLL for (int r = 0; r < FR; r++) {
        if (w >= n) break;
        const I f = FP4(LOADI(words + w * BLOCK + r * L), k);
        UNROLL for (int t = 0; t < T; t++) UNROLL for (int i = 0; i < PARTS; i++) {
            acc[r][t][0][i] = DOT(acc[r][t][0][i], f, SETI(x[t][(w * FIELDS(4) + k) * PARTS + i]));
            if (HALVED(T)) KEEP(acc[r][t][0][i]);
        }
    }
#ifdef PAIRS
#undef FP4
#endif
}

/* As fixed_plane, for a plane of one bit. */
INLINE void NAME(one_bit)(const int T, const uint32_t *words, int64_t from, int64_t to, const int32_t *const *x,
                          I acc[FR][PASS][2][PARTS]) {
#if defined(TABLES)
    UNROLL for (int t = 0; t < T; t++) {
        I sum[FR];
        TABLES(words + from * BLOCK, to - from, (const uint8_t *)x[t] + from * 384, sum);
        UNROLL for (int r = 0; r < FR; r++) acc[r][t][0][0] = sum[r];
    }
#elif defined(PAIRS)
    NAME(byte_plane)(1, T, words, from, to, x, acc);
#else
    NAME(fixed_plane)(1, T, words, from, to, x, acc);
#endif
}

/* As fixed_plane, for codes of three bits: joining the bits of both planes first saves half the products. */
#if PARTS == 1 && MANY
INLINE void NAME(fixed_three)(const int T, const uint32_t *low, const uint32_t *high, int64_t from, int64_t to,
                              const int32_t *const *x, I acc[FR][PASS][2][PARTS]) {
    for (int64_t w = from; w < to; w++) {
        I v[FR], h[FR];
        STREAM(low + (w + AHEAD) * BLOCK);
        UNROLL for (int r = 0; r < FR; r++) {
            v[r] = LOADI(low + w * BLOCK + r * L), h[r] = DROP(LOADI(high + w / 2 * BLOCK + r * L), w % 2 * 16);
            h[r] = ADDI(AND(h[r], SETI(0xFF)), SHL(AND(h[r], SETI(0xFF00)), 8)); /* of a word's halves, eight bits each */
        }
        UNROLL for (int k = 0; k < 8; k++) {
            I f[FR];
            UNROLL for (int r = 0; r < FR; r++) {
                const I above = AND(k < 2 ? SHL(h[r], 2 - k) : DROP(h[r], k - 2), SETI(0x00040004));
                f[r] = ADDI(AND(DROP(v[r], 2 * k), SETI(0x00030003)), above);
            }
            UNROLL for (int t = 0; t < T; t++) {
                const I at = SETI(x[t][w * 8 + k]);
                UNROLL for (int r = 0; r < FR; r++) {
                    acc[r][t][0][0] = DOT(acc[r][t][0][0], f[r], at);
                    KEEP(acc[r][t][0][0]);
                }
            }
        }
    }
}
#elif PARTS == 2
INLINE void NAME(fixed_three)(const int T, const uint32_t *low, const uint32_t *high, int64_t from, int64_t to,
                              const int32_t *const *x, I acc[FR][PASS][2][PARTS]) {
    for (int64_t w = from; w < to; w += 2) {
        const I h = LOADI(high + w / 2 * BLOCK);
        STREAM(low + (w + AHEAD) * BLOCK);
        STREAM(low + (w + 1 + AHEAD) * BLOCK);
        UNROLL for (int half = 0; half < 2; half++) {
            if (w + half >= to) break;
            const I v = LOADI(low + (w + half) * BLOCK);
            UNROLL for (int k = 0; k < 4; k++) {
                const I f = THIRD(v, h, half, k);
                UNROLL for (int t = 0; t < T; t++) UNROLL for (int i = 0; i < 2; i++)
                    acc[0][t][k % CHAINS(T)][i] =
                        DOT(acc[0][t][k % CHAINS(T)][i], f, SETI(x[t][((w + half) * 4 + k) * 2 + i]));
            }
        }
    }
}
#endif

INLINE I NAME(folded)(const int chains, I acc[2][PARTS]) { /* the total of one vector of rows' sums */
    I part[PARTS];
    UNROLL for (int i = 0; i < PARTS; i++) part[i] = chains == 2 ? ADDI(acc[0][i], acc[1][i]) : acc[0][i];
    return PARTS == 2 ? ADDI(SHL(part[0], 8), part[PARTS - 1]) : part[0];
}

/* Products of FR vectors of rows from `row` on and T activations, into out[(r * T + t) * L]. */
INLINE void NAME(fixed_rows)(const int bits, const int T, const Gemm *m, const Form *f, const uint8_t *base, int64_t row,
                             const Prepared *const *x, float *out) {
    const int p = low_bits(bits), of = scales_of(f), item = of == OF_BYTE ? 1 : 2;
    const int64_t groups = ceil_div(m->cols, f->group), words = ceil_div(m->cols * p, 32), block = row / BLOCK;
    const int64_t lane = row % BLOCK, step = f->group * p / 32, per = FIXED / f->group;
    const uint32_t *low = (const uint32_t *)(base + f->low) + block * words * BLOCK + lane;
    const uint32_t *high = (const uint32_t *)(base + f->high) + block * ceil_div(m->cols, 32) * BLOCK + lane;
    const uint8_t *scale = base + f->scale + (block * groups * BLOCK + lane) * item;
    const uint8_t *zero = base + f->zero + block * groups * BLOCK + lane;
    const int32_t *at[PASS], *totals[PASS];
    F total[FR][PASS];
    UNROLL for (int t = 0; t < T; t++) {
        at[t] = x[t]->fixed[p == 8 ? 3 : HALVED(T) && p > 1 ? 4 + p / 2 : p / 2], totals[t] = x[t]->totals[f->group / 64];
        UNROLL for (int r = 0; r < FR; r++) total[r][t] = SET(0.0f);
    }
    for (int64_t g = 0; g < groups; g++) {
        I acc[FR][PASS][2][PARTS];
        UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < 2; c++)
            UNROLL for (int i = 0; i < PARTS; i++) acc[r][t][c][i] = SETI(0);
        const int64_t to = least((g + 1) * step, words);
#if PARTS == 2 || MANY
        if (bits == 3 && (PARTS == 2 || HALVED(T)))
            NAME(fixed_three)(T, low, high, g * step, to, at, acc);
        else
#endif
#ifdef PAIRS
        if (p == 1)
            NAME(one_bit)(T, low, g * step, to, at, acc);
        else if (p < 8 && !HALVED(T))
            NAME(byte_plane)(p, T, low, g * step, to, at, acc);
        else
#endif
            NAME(fixed_plane)(p, T, low, g * step, to, at, acc);
        I sum[FR][PASS];
        UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++)
            /* in units of 2^(bits - 8) of a code, as zeros are */
            sum[r][t] = SHL(NAME(folded)(CHAINS(T), acc[r][t]), 8 - bits);
        if (bits == 5 || (bits == 3 && PARTS == 1 && !HALVED(T))) {
            const int32_t *above[PASS];
            UNROLL for (int t = 0; t < T; t++) above[t] = x[t]->fixed[0];
            UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < 2; c++)
                UNROLL for (int i = 0; i < PARTS; i++) acc[r][t][c][i] = SETI(0);
            NAME(one_bit)(T, high, g * (f->group / 32), least((g + 1) * (f->group / 32), ceil_div(m->cols, 32)), above, acc);
            UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++)
                sum[r][t] = ADDI(sum[r][t], SHL(NAME(folded)(CHAINS(T), acc[r][t]), 7));
        }
        F unit[PASS];
        UNROLL for (int t = 0; t < T; t++) unit[t] = SET(x[t]->units[g / per] * (1.0f / (1 << (8 - bits))));
        UNROLL for (int r = 0; r < FR; r++) {
            const F s = SCALE(bits, of, scale + (g * BLOCK + r * L) * item);
            const I z = f->zeros == STORED      ? LOADB(zero + g * BLOCK + r * L)
                        : f->zeros == SYMMETRIC ? SETI(128)
                                                : SETI(((1 << bits) - 1) << (8 - bits) >> 1);
            UNROLL for (int t = 0; t < T; t++) {
                const I exact = SUBI(sum[r][t], MULI(z, SETI(totals[t][g])));
                total[r][t] = FUSED(MUL(FLOATS(exact), unit[t]), s, total[r][t]);
            }
        }
    }
    UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) {
        if (f->outer >= 0) total[r][t] = MUL(total[r][t], SET(outer_of(f, base, row + r * L)));
        STOREF(out + (r * T + t) * L, total[r][t]);
    }
}

/* As fixed_rows, for MXFP4 or NVFP4: sums of twice the values over 128 columns first, in which scales up to 2^100 have
 * room, then times the value of a 1. */
INLINE void NAME(fp4_rows)(const int nv, const int T, const Gemm *m, const Form *f, const uint8_t *base, int64_t row,
                           const Prepared *const *x, float *out) {
    const int64_t step = nv ? 2 : 4, words = ceil_div(m->cols, 8), groups = ceil_div(words, step), block = row / BLOCK;
    const uint32_t *codes = (const uint32_t *)(base + f->low) + block * words * BLOCK + row % BLOCK;
    const uint8_t *scale = base + f->scale + block * groups * BLOCK + row % BLOCK;
    F total[FR][PASS];
    UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) total[r][t] = SET(0.0f);
    for (int64_t b = 0, w = 0; w < words; b++) {
        F part[FR][PASS];
        UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) part[r][t] = SET(0.0f);
        for (const int64_t to = least(w + FIXED / 8, words); w < to; w += step, scale += BLOCK) {
            const int32_t *at[PASS];
            I acc[FR][PASS][2][PARTS];
            UNROLL for (int t = 0; t < T; t++) {
                at[t] = x[t]->fixed[HALVED(T) ? 6 : 4] + w * 4;
                UNROLL for (int r = 0; r < FR; r++) UNROLL for (int i = 0; i < PARTS; i++)
                    acc[r][t][0][i] = SETI(i == PARTS - 1 ? x[t]->totals[nv ? 3 : 4][w / step] : 0);
            }
            if (w + step <= to)
                NAME(fixed_fp4)(T, codes + w * BLOCK, step, at, acc); /* a constant: no loop */
            else
                NAME(fixed_fp4)(T, codes + w * BLOCK, to - w, at, acc);
            UNROLL for (int r = 0; r < FR; r++) {
                const F s = nv ? E4M3_SHIFTED(scale + r * L) : POW2(scale + r * L);
                UNROLL for (int t = 0; t < T; t++)
                    part[r][t] = FUSED(FLOATS(NAME(folded)(1, acc[r][t])), s, part[r][t]);
            }
        }
        UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) {
            if (nv) part[r][t] = MUL(part[r][t], SET(0x1p120f));
            total[r][t] = FUSED(part[r][t], SET(x[t]->units[b] * 0.5f), total[r][t]);
        }
    }
    UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++)
        STOREF(out + (r * T + t) * L, nv ? MUL(total[r][t], SET(outer_of(f, base, row + r * L))) : total[r][t]);
}

/* As fixed_rows, for trellis codes. Half a word has eight codes: shifted left it has the newest of a state, and the half
 * before it, shifted right, the others. So the states of columns k and k + 8 of a word are made side by side, and a word
 * of the activation has these two columns. */
INLINE void NAME(trellis_rows)(const int bits, const int T, const Gemm *m, const Form *f, const uint8_t *base, int64_t row,
                               const Prepared *const *x, float *out) {
    const int of = scales_of(f), item = of == OF_BYTE ? 1 : 2;
    const int64_t groups = ceil_div(m->cols, FIXED), words = ceil_div(m->cols, 16), block = row / BLOCK, lane = row % BLOCK;
    const uint32_t *low = (const uint32_t *)(base + f->low) + block * words * BLOCK + lane;
    const uint32_t *high = (const uint32_t *)(base + f->high) + block * ceil_div(m->cols, 32) * BLOCK + lane;
    const uint8_t *scale = base + f->scale + (block * groups * BLOCK + lane) * item;
    const int32_t *pairs[PASS];
    I last[FR], last_high[FR]; /* the words before */
    F total[FR][PASS];
    UNROLL for (int r = 0; r < FR; r++) last[r] = last_high[r] = SETI(0);
    UNROLL for (int t = 0; t < T; t++) {
        pairs[t] = x[t]->fixed[7];
        UNROLL for (int r = 0; r < FR; r++) total[r][t] = SET(0.0f);
    }
    for (int64_t g = 0; g < groups; g++) {
        I acc[FR][PASS];
        UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) acc[r][t] = SETI(0);
        const int64_t to = least((g + 1) * (FIXED / 16), words);
        for (int64_t w = g * (FIXED / 16); w < to; w += 2) UNROLL for (int odd = 0; odd < 2; odd++) {
            if (w + odd >= to) break;
            I now[FR], before[FR], third[FR];
            STREAM(low + (w + odd + AHEAD) * BLOCK);
            UNROLL for (int r = 0; r < FR; r++) {
                now[r] = LOADI(low + (w + odd) * BLOCK + r * L);
                before[r] = XOR(SHL(now[r], 16), DROP(last[r], 16));
                last[r] = now[r];
                if (bits == TRELLIS2) continue;
                if (odd) {
                    third[r] = DROP(last_high[r], 8);
                } else {
                    const I h = LOADI(high + w / 2 * BLOCK + r * L);
                    third[r] = XOR(SHL(h, 8), DROP(last_high[r], 24));
                    last_high[r] = h;
                }
                /* 24 columns from the eighth before the word on: of them the first 16 and the last */
                third[r] = XOR(AND(third[r], SETI(0xFFFF)), SHL(DROP(third[r], 8), 16));
            }
            UNROLL for (int k = 0; k < 8; k++) {
                I level[FR];
                UNROLL for (int r = 0; r < FR; r++) {
                    I state = k < 7 ? XOR(SHL16(now[r], 14 - 2 * k), DROP16(before[r], 2 * k + 2)) : now[r];
                    if (bits == TRELLIS3) state = XOR(state, AND(DROP16(third[r], k + 1), SETI(0x00FF00FF)));
                    level[r] = LEVELS(state);
                }
                UNROLL for (int t = 0; t < T; t++) {
                    const I at = SETI(pairs[t][(w + odd) * 8 + k]);
                    UNROLL for (int r = 0; r < FR; r++) {
                        acc[r][t] = DOT16(acc[r][t], level[r], at);
                        KEEP(acc[r][t]);
                    }
                }
            }
        }
        UNROLL for (int r = 0; r < FR; r++) {
            const F s = SCALE(bits, of, scale + (g * BLOCK + r * L) * item);
            UNROLL for (int t = 0; t < T; t++) {
                const I exact = SUBI(acc[r][t], SETI(TRELLIS_ZERO * x[t]->totals[2][g]));
                total[r][t] = FUSED(MUL(FLOATS(exact), SET(x[t]->units[g])), s, total[r][t]);
            }
        }
    }
    UNROLL for (int r = 0; r < FR; r++) UNROLL for (int t = 0; t < T; t++) {
        if (f->outer >= 0) total[r][t] = MUL(total[r][t], SET(outer_of(f, base, row + r * L)));
        STOREF(out + (r * T + t) * L, total[r][t]);
    }
}

/* Products of a row of a BF16 matrix. Activations stay BF16: as float32 they push a row's lines out of a first-level
 * cache of 32 KiB (measured at 2048 columns: 13 GB/s with float32, 30 with BF16, 31 for reading alone). */
INLINE void NAME(pairs)(const int T, const int64_t cols, const uint16_t *w, const Prepared *const *x, float *out) {
    const int64_t step = 4 * L, whole = cols - cols % step;
    const int hints = moepack_hints;
    F acc[PASS][2][2];
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int d = 0; d < 4; d++) acc[t][d / 2][d % 2] = SET(0.0f);
    for (int64_t c = 0; c < whole; c += step)
        UNROLL for (int d = 0; d < 2; d++) {
            const I v = LOADI((const uint32_t *)(w + c + 2 * L * d));
            if (hints && (2 * L * d) % 32 == 0) STREAM(w + c + 2 * L * d + AHEAD * 32);
            UNROLL for (int t = 0; t < T; t++) {
                const I a = LOADI((const uint32_t *)((const uint16_t *)x[t]->at + c + 2 * L * d));
                UNROLL for (int odd = 0; odd < 2; odd++)
                    acc[t][d][odd] = FMA(HALVES(v, odd), HALVES(a, odd), acc[t][d][odd]);
            }
        }
    UNROLL for (int t = 0; t < T; t++) {
        float sum = SUM(ADD(ADD(acc[t][0][0], acc[t][0][1]), ADD(acc[t][1][0], acc[t][1][1])));
        for (int64_t c = whole; c < cols; c++) sum += widen(w[c]) * widen(((const uint16_t *)x[t]->at)[c]);
        out[t] = sum;
    }
}

#define FIXED_CASE(bits, T) \
    case bits: NAME(fixed_rows)(bits, T, m, job->form, job->base, at, x, part); break;

/* Products of rows [row, end), at most UNIT and from a block's first, and T activations; results go to `slot`. */
#define FIXED_ROWS(name, T) \
    CALLED void NAME(name)(const Gemm *m, const Job *job, int64_t row, int64_t end, const Prepared *const *x, \
                                     const int64_t *slot) { \
        float part[FR * PASS * L]; \
        int64_t at = row; \
        if (job->form->bits == 16) { \
            const uint16_t *w = (const uint16_t *)(job->base + job->form->low); \
            for (; at < end; at++) { \
                NAME(pairs)(T, m->cols, w + at * m->cols, x, part); \
                for (int t = 0; t < T; t++) put(m, job, slot[t], at, 1, part + t, 1); \
            } \
            return; \
        } \
        for (; at < end; at += FR * L) { \
            switch (codes_of(job->form)) { \
                INTEGER_CODES(FIXED_CASE, T) \
            case MXFP4: NAME(fp4_rows)(0, T, m, job->form, job->base, at, x, part); break; \
            case NVFP4: NAME(fp4_rows)(1, T, m, job->form, job->base, at, x, part); break; \
            case TRELLIS2: NAME(trellis_rows)(TRELLIS2, T, m, job->form, job->base, at, x, part); break; \
            case TRELLIS3: NAME(trellis_rows)(TRELLIS3, T, m, job->form, job->base, at, x, part); break; \
            } \
            for (int r = 0; r < FR; r++) \
                for (int t = 0; t < T && at + r * L < end; t++) \
                    put(m, job, slot[t], at + r * L, least(L, end - at - r * L), part + (r * T + t) * L, 1); \
        } \
    }

FIXED_ROWS(rows_of_one, 1)
FIXED_ROWS(rows_of_two, 2)
FIXED_ROWS(rows_of_many, PASS)

CALLED void NAME(rows_fixed)(const Gemm *m, const Job *job, int64_t row, int64_t end, const Prepared *const *x,
                             const int64_t *slot, int64_t n) {
    int64_t t = 0;
    for (; t + PASS <= n; t += PASS) NAME(rows_of_many)(m, job, row, end, x + t, slot + t);
    for (; t + 2 <= n; t += 2) NAME(rows_of_two)(m, job, row, end, x + t, slot + t);
    for (; t < n; t++) NAME(rows_of_one)(m, job, row, end, x + t, slot + t);
}

#ifdef TABLES
const Loops NAME(moepack_fixed) = {NAME(prepare_fixed), NAME(rows_fixed), 1, MANY};
#else
const Loops NAME(moepack_fixed) = {NAME(prepare_fixed), NAME(rows_fixed), 0, MANY};
#endif
#undef MANY
#undef PASS
#undef KEEP
