/* The loops over experts' rows in plain C. */
#include <math.h>

#include "gemm.h"

#define NAME(x) x##_plain
#define INLINE static inline __attribute__((always_inline))
#define CALLED static
#define WHOLE
#define L 1
#define RB 4
#define TB 2
#define R2 4
#define R4 4
#define F float
#define I uint32_t
#define T16 const float *
#define LOADI(p) load_plain(p)
#define LOADF(p) (*(p))
#define STOREF(p, v) (*(p) = (v))
#define LOADT(p) (p)
#define SET(v) (v)
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define FMA(a, b, c) ((a) * (b) + (c))
#define NFMA(a, b, c) ((c) - (a) * (b))
#define SUM(a) (a)
#define DROP(w, n) ((w) >> (n))
#define SRA16(w, n) sra16_plain(w, n)
#define LOOKUP(t, w) ((t)[(w) & 15])
#define CODE4(w) ((float)(int)((w) & 15) - 7.5f)
#define CODE8(w) ((float)(int)((w) & 255) - 127.5f)
#define BF16(p) widen(*(p))
#define STOREB(p, v) (*(p) = narrow(v))
#define STOREB2(p, v, w) (STOREB(p, v), STOREB((p) + 1, w))
#define BYTES(p) ((float)*(p))
#define STREAM(p) (void)(p)
#define SETI(v) ((uint32_t)(v))
#define AND(a, b) ((a) & (b))
#define SHL(a, n) ((uint32_t)(a) << (n))
#define SRA(a, n) ((uint32_t)((int32_t)(a) >> (n)))
#define ADDI(a, b) ((a) + (b))
#define MAXI(a, b) ((a) > (b) ? (a) : (b))
#define LOADB(p) ((uint32_t)*(p))
#define LOADSB(p) ((uint32_t)(int8_t)*(p))
#define LOADSH(p) ((uint32_t)(int16_t)*(p))
#define AS_FLOATS(a) float_plain(a)
#define XOR(a, b) ((a) ^ (b))
#define SUBI(a, b) ((a) - (b))
#define FLOATS(a) ((float)(int32_t)(a))
#define LEVELS(a) (level_plain((a) & 0xFFFF) | level_plain((a) >> 16) << 16)

static inline uint32_t load_plain(const void *at) { /* two BF16 numbers need not lie on a multiple of 4 */
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

static inline float float_plain(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t level_plain(uint32_t state) {
    const uint32_t made = state * TRELLIS_BY, even = made & 0xFF00FF, odd = made >> 8 & 0xFF00FF;
    return (((even & 0xFF) + (even >> 16) + 1) >> 1) + (((odd & 0xFF) + (odd >> 16) + 1) >> 1);
}

static inline uint32_t sra16_plain(uint32_t word, int n) {
    return ((uint32_t)((int32_t)word >> n) & 0xFFFF0000) | (uint16_t)((int16_t)word >> n);
}

/* Halves are widened by shifts: of products of 16-bit numbers GCC 12.2 for aarch64 (-O3, not -O2; Clang 14 neither) makes a
 * vector loop over words that gives other sums for one activation, without undefined behaviour in this source. */
static inline int32_t dot_plain(uint32_t fields, uint32_t x) {
    const int32_t low = (int32_t)(fields << 16) >> 16, high = (int32_t)fields >> 16;
    return low * ((int32_t)(x << 16) >> 16) + high * ((int32_t)x >> 16);
}

/* Two 16-bit fields of E2M1 codes, the first from bit `down` on: twice their values, plus 12. */
static inline uint32_t fp4_plain(uint32_t word, int down) {
    static const uint8_t of[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return of[word >> down & 15] | (uint32_t)of[word >> (down + 16) & 15] << 16;
}
#include "affine_rows.h"

#define PARTS 1
#define FR 4
#define MULI(a, b) ((a) * (b))
#define DOT(acc, fields, x) ((acc) + (uint32_t)dot_plain(fields, x))
#define DOT16 DOT
#define SHL16(a, n) (((a) & 0xFFFF0000) << (n) | (uint16_t)((a) << (n)))
#define DROP16(a, n) (((a) >> (n) & 0xFFFF0000) | (uint16_t)(a) >> (n))
#define FUSED(a, b, c) fmaf(a, b, c)
#define FP4(v, k) fp4_plain(v, 4 * (k))
#define HALVES(v, odd) widen((uint16_t)((odd) ? (v) >> 16 : (v)))
#define ARRANGE(to, from, order) \
    for (int i = 0; i < 32; i++) ((int16_t *)(to))[i] = (from)[(order)[i]]
#include "affine_fixed.h"
#include "fp8_rows.h"
