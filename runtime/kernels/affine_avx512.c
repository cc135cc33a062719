/* The loops over experts' rows for AVX-512 (F, BW, VL, DQ). */
#include "affine.h"

#ifdef HAVE_X86
#include <immintrin.h>

#define NAME(x) x##_avx512
#define INLINE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) static inline __attribute__((always_inline))
#define CALLED __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) static
#define L 16
#define RB 4
#define TB 4
#define R2 4
#define R4 4
#define F __m512
#define I __m512i
#define T16 __m512
#define LOADI(p) _mm512_loadu_si512(p)
#define LOADF(p) _mm512_loadu_ps(p)
#define STOREF(p, v) _mm512_storeu_ps(p, v)
#define LOADT(p) _mm512_loadu_ps(p)
#define SET(v) _mm512_set1_ps(v)
#define ADD(a, b) _mm512_add_ps(a, b)
#define SUB(a, b) _mm512_sub_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define NFMA(a, b, c) _mm512_fnmadd_ps(a, b, c)
#define SUM(a) _mm512_reduce_add_ps(a)
#define DROP(w, n) _mm512_srli_epi32(w, n)
#define LOOKUP(t, w) _mm512_permutexvar_ps(w, t)
#define CODE4(w) \
    _mm512_permutexvar_ps(w, _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f, 3.5f, \
                                            4.5f, 5.5f, 6.5f, 7.5f))
#define CODE8(w) \
    _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_and_si512(w, _mm512_set1_epi32(255))), _mm512_set1_ps(127.5f))
#define BF16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define STOREB2(p, v, w) store_bf16_avx512(p, v, w)
#define STOREB(p, v) _mm256_storeu_si256((__m256i *)(p), narrow_avx512(v))
#define BYTES(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define STREAM(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)

/* As narrow(), of numbers, the results in the high halves; the processor's own conversion drops denormal ones. */
INLINE __m512i rounded_avx512(__m512 v) {
    __m512i w = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(w, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(w, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}

INLINE __m256i narrow_avx512(__m512 v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_avx512(v), 16)); }

INLINE void store_bf16_avx512(uint16_t *to, __m512 v, __m512 w) {
    const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                          21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(rounded_avx512(v), high, rounded_avx512(w)));
}
#include "affine_rows.h"
#endif
