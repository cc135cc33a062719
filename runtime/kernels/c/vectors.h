/* What AVX2's and AVX-512's loops call alike, by MM(x), an intrinsic of their width, and SI(x), one on whole vectors. The
 * instruction set's C file includes this file after INLINE, F and I; affine_rows.h and affine_fixed.h explain. */
#define LOADF(p) MM(loadu_ps)(p)
#define STOREF(p, v) MM(storeu_ps)(p, v)
#define SET(v) MM(set1_ps)(v)
#define ADD(a, b) MM(add_ps)(a, b)
#define SUB(a, b) MM(sub_ps)(a, b)
#define MUL(a, b) MM(mul_ps)(a, b)
#define FMA(a, b, c) MM(fmadd_ps)(a, b, c)
#define NFMA(a, b, c) MM(fnmadd_ps)(a, b, c)
#define FUSED FMA
#define FLOATS(a) MM(cvtepi32_ps)(a)
#define SETI(v) MM(set1_epi32)((int)(v))
#define ADDI(a, b) MM(add_epi32)(a, b)
#define SUBI(a, b) MM(sub_epi32)(a, b)
#define MULI(a, b) MM(mullo_epi32)(a, b)
#define MAXI(a, b) MM(max_epi32)(a, b)
#define AND(a, b) SI(and)(a, b)
#define XOR(a, b) SI(xor)(a, b)
#define DROP(w, n) MM(srli_epi32)(w, n)
#define SHL(a, n) MM(slli_epi32)(a, n)
#define SRA(a, n) MM(srai_epi32)(a, n)
#define SHL16(a, n) MM(slli_epi16)(a, n)
#define DROP16(a, n) MM(srli_epi16)(a, n)
#define SRA16(w, n) MM(srai_epi16)(w, n)
#define STREAM(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#define CODE8(w) SUB(FLOATS(AND(w, SETI(255))), SET(127.5f))
#define BYTES(p) FLOATS(LOADB(p))
#define HALVES(v, odd) AS_FLOATS(odd ? AND(v, SETI(-65536)) : SHL(v, 16))
#define LEVELS(a) levels(a)

INLINE I levels(I states) {
    const I by = MM(set1_epi16)(TRELLIS_BY);
    const I means = MM(avg_epu8)(MM(mullo_epi16)(states, by), MM(mulhi_epu16)(states, by));
    return MM(maddubs_epi16)(means, MM(set1_epi8)(1));
}
