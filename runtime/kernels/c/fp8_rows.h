/* One instruction set's loops over experts' rows for FP8 codes, for float32 and BF16 activations. A C file includes this
 * file after affine_rows.h, whose macros it uses, and defines before FR, vectors of rows that one pass takes.
 *
 * A byte's bits, moved into those of a float32, are its value times 2^-120. Activations are scaled up by a power of two
 * first, so that no product is denormal, and sums are scaled back at the end. */

#define LANES (L == 1 ? 2 : 4) /* separate sums, so that additions do not wait for one another */
#define VECTORS(T) ((T) == 1 ? FR : 1) /* of rows: 16 registers do not hold the sums of two for two activations */

CALLED void NAME(prepare_fp8)(const Gemm *m, const void *from, Prepared *p) {
    const int64_t cols = m->cols, padded = 32 * ceil_div(cols, 32);
    uint32_t most = 0;
    for (int64_t c = 0; c < cols; c++) {
        const float value = m->x_bf16 ? widen(((const uint16_t *)from)[c]) : ((const float *)from)[c];
        uint32_t bits;
        memcpy(&bits, &value, 4);
        most = (bits & 0x7FFFFFFF) > most ? bits & 0x7FFFFFFF : most;
    }
    /* The greatest becomes about 2^100, where both factors are normal numbers. */
    const int wanted = 227 - (int)(most >> 23), power = wanted > 127 ? 127 : wanted < -7 ? -7 : wanted;
    const uint32_t by = (uint32_t)(127 + power) << 23, back = most < 0x7F800000 ? (uint32_t)(247 - power) << 23 : 0x7FC00000;
    float factor;
    memcpy(&factor, &by, 4);
    memcpy(&p->back, &back, 4);
    for (int64_t c = 0; c < cols; c++)
        p->scaled[c] = (m->x_bf16 ? widen(((const uint16_t *)from)[c]) : ((const float *)from)[c]) * factor;
    memset(p->scaled + cols, 0, sizeof(float) * (size_t)(padded - cols));
}

/* Products of R vectors of rows from `row` on and T activations, into out[(r * T + t) * L]. */
INLINE void NAME(fp8)(const int R, const int T, const Gemm *m, const Form *f, const uint8_t *base, int64_t row,
                      const Prepared *const *x, float *out) {
    const int64_t words = ceil_div(m->cols, 4), step = f->bits == FP8_ROW ? words : f->group / 4;
    const int64_t groups = ceil_div(words, step), block = row / BLOCK, lane = row % BLOCK;
    const uint32_t *codes = (const uint32_t *)(base + f->low) + block * words * BLOCK + lane;
    const uint8_t *bytes = base + f->scale + block * groups * BLOCK + lane;
    const float *floats = (const float *)(base + f->scale) + block * groups * (f->bits == FP8_ROW ? BLOCK : 1);
    F total[FR][TB];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) total[r][t] = SET(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t to = least((g + 1) * step, words);
        F acc[FR][TB][LANES];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++) UNROLL for (int k = 0; k < LANES; k++)
            acc[r][t][k] = SET(0.0f);
        for (int64_t w = g * step; w < to; w++) {
            I half[FR][2]; /* codes 0 and 2, or 1 and 3, moved in their 16 bits to where a float has them in its upper half */
            UNROLL for (int r = 0; r < R; r++) {
                const I v = LOADI(codes + w * BLOCK + r * L);
                half[r][0] = SRA16(SHL(v, 8), 4), half[r][1] = SRA16(v, 4);
            }
            STREAM(codes + (w + AHEAD) * BLOCK);
            UNROLL for (int k = 0; k < 4; k++) {
                F c[FR];
                UNROLL for (int r = 0; r < R; r++)
                    c[r] = AS_FLOATS(AND(k < 2 ? SHL(half[r][k % 2], 16) : half[r][k % 2], SETI(0x87F00000)));
                UNROLL for (int t = 0; t < T; t++) {
                    const F a = SET(x[t]->scaled[4 * w + k]);
                    UNROLL for (int r = 0; r < R; r++)
                        acc[r][t][k % LANES] = FMA(c[r], a, acc[r][t][k % LANES]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) {
            const F s = f->bits == MXFP8 ? POW2(bytes + g * BLOCK + r * L)
                        : f->bits == FP8 ? SET(floats[g])
                                         : LOADF(floats + lane + r * L);
            UNROLL for (int t = 0; t < T; t++) {
                F *a = acc[r][t];
                a[0] = ADD(a[0], a[1]);
                if (LANES == 4) a[0] = ADD(a[0], ADD(a[LANES - 2], a[LANES - 1]));
                total[r][t] = FMA(s, a[0], total[r][t]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T; t++)
        STOREF(out + (r * T + t) * L, MUL(total[r][t], SET(x[t]->back)));
}

/* Products of rows [row, end), at most UNIT and from a block's first, and T activations; results go to `slot`. */
#define FP8_ROWS(T) \
    CALLED void NAME(fp8_rows_##T)(const Gemm *m, const Job *job, int64_t row, int64_t end, const Prepared *const *x, \
                                   const int64_t *slot) { \
        float part[FR * TB * L]; \
        for (int64_t at = row; at < end; at += VECTORS(T) * L) { \
            NAME(fp8)(VECTORS(T), T, m, job->form, job->base, at, x, part); \
            for (int r = 0; r < VECTORS(T); r++) \
                for (int t = 0; t < T && at + r * L < end; t++) \
                    put(m, job, slot[t], at + r * L, least(L, end - at - r * L), part + (r * T + t) * L, 1); \
        } \
    }

FP8_ROWS(1)
FP8_ROWS(2)
#if TB >= 4
FP8_ROWS(4)
#endif

BY_SLOTS(rows_fp8, fp8_rows)

const Loops NAME(moepack_fp8) = {NAME(prepare_fp8), NAME(rows_fp8), 0};
