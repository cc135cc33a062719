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
#define LOOKUP(t, w) ((t)[(w) & 15])
#define CODE4(w) ((float)(int)((w) & 15) - 7.5f)
#define CODE8(w) ((float)(int)((w) & 255) - 127.5f)
#define BF16(p) widen(*(p))
#define STOREB(p, v) (*(p) = narrow(v))
#define STOREB2(p, v, w) (STOREB(p, v), STOREB((p) + 1, w))
#define BYTES(p) ((float)*(p))
#define STREAM(p) (void)(p)

static inline uint32_t load_plain(const void *at) { /* two BF16 numbers need not lie on a multiple of 4 */
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

static inline int32_t dot_plain(uint32_t fields, uint32_t x) {
    return (int16_t)fields * (int16_t)x + (int16_t)(fields >> 16) * (int16_t)(x >> 16);
}
#include "affine_rows.h"

#define PARTS 1
#define FR 4
#define SETI(v) ((uint32_t)(v))
#define LOADB(p) ((uint32_t)*(p))
#define AND(a, b) ((a) & (b))
#define ADDI(a, b) ((a) + (b))
#define SUBI(a, b) ((a) - (b))
#define MULI(a, b) ((a) * (b))
#define SHL(a, n) ((a) << (n))
#define DOT(acc, fields, x) ((acc) + (uint32_t)dot_plain(fields, x))
#define FLOATS(a) ((float)(int32_t)(a))
#define FUSED(a, b, c) fmaf(a, b, c)
#define HALVES(v, odd) widen((uint16_t)((odd) ? (v) >> 16 : (v)))
#define ARRANGE(to, from, order) \
    for (int i = 0; i < 32; i++) ((int16_t *)(to))[i] = (from)[(order)[i]]
#include "affine_fixed.h"
