/* The loops over experts' rows in plain C. */
#include "affine.h"

#define NAME(x) x##_plain
#define INLINE static inline __attribute__((always_inline))
#define CALLED static
#define L 1
#define RB 4
#define TB 2
#define R2 4
#define R4 4
#define F float
#define I uint32_t
#define T16 const float *
#define LOADI(p) (*(p))
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
#include "affine_rows.h"
