/* The loops over experts' rows for AVX-512 (F, BW, VL, DQ). */
#include "gemm.h"

#ifdef HAVE_X86
#define NAME(x) x##_avx512
#define INLINE AVX512 static inline __attribute__((always_inline))
#define CALLED AVX512 static
#define WHOLE AVX512
#include "avx512.h"
#define RB 4
#define TB 4
#define R2 4
#define R4 4
#define T16 __m512
#define LOADT(p) _mm512_loadu_ps(p)
#define SUM(a) _mm512_reduce_add_ps(a)
#define LOOKUP(t, w) _mm512_permutexvar_ps(w, t)
#define CODE4(w) \
    _mm512_permutexvar_ps(w, _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f, 3.5f, \
                                            4.5f, 5.5f, 6.5f, 7.5f))
#define STOREB2(p, v, w) store_bf16_avx512(p, v, w)
#define STOREB(p, v) _mm256_storeu_si256((__m256i *)(p), narrow_avx512(v))

/* Rounds as narrow() does, but not NaN, into the high halves. The processor's own conversion drops denormals. */
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

#define FR 1
#define PARTS 1
#define PAIRS(bytes, x) _mm512_maddubs_epi16(bytes, x)
#define ADDH(a, b) _mm512_add_epi16(a, b)
#define FP4_BYTES(v) _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_FIELDS)), v)
#define DOT(acc, fields, x) _mm512_add_epi32(acc, _mm512_madd_epi16(fields, x))
#define DOT16 DOT
#define ARRANGE(to, from, order) \
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(order), _mm512_loadu_si512(from)))
#include "affine_fixed.h"
#include "fp8_rows.h"

/* The same loops for VNNI and VBMI, whose products multiply bytes and add four of them at once. */
#undef NAME
#undef INLINE
#undef CALLED
#undef PARTS
#undef DOT
#undef DOT16
#undef PAIRS
#undef ADDH
#undef FP4_BYTES
#undef ARRANGE
#define NAME(x) x##_vnni
#define VNNI "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,fma"
#define INLINE __attribute__((target(VNNI))) static inline __attribute__((always_inline))
#define CALLED __attribute__((target(VNNI))) static
#define PARTS 2
#define DOT(acc, fields, x) _mm512_dpbusd_epi32(acc, fields, x)
#define DOT16(acc, fields, x) _mm512_dpwssd_epi32(acc, fields, x)
#define ARRANGE(to, from, order) \
    _mm512_storeu_si512(to, _mm512_permutexvar_epi8(_mm512_loadu_si512(order), _mm512_loadu_si512(from)))
/* A permutation reads 6 bits of an index: the code, and two of the next one, for which the table repeats itself. */
#define FP4(v, k) \
    _mm512_permutexvar_epi8(_mm512_srli_epi32(v, 4 * (k)), _mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_FIELDS)))
#define THIRD(low, high, half, k) third_vnni(low, high, 2 * k, 16 * half + k + 62)

/* Codes of three bits, one in each byte: bit 2 is bit `at`, at + 4, at + 8 or at + 12 of a 32-bit word of `high`, the
 * others come from `low`, from bit `down` on. Positions count within a 64-bit lane, which holds two rows' words. */
INLINE __m512i third_vnni(__m512i low, __m512i high, int down, int at) {
    uint64_t where = 0;
    UNROLL for (int b = 0; b < 8; b++) where |= (uint64_t)((at + b / 4 * 32 + b % 4 * 4) % 64) << 8 * b;
    const __m512i above = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((int64_t)where), high);
    const __m512i both = _mm512_ternarylogic_epi64(_mm512_set1_epi8(3), _mm512_srli_epi32(low, down), above, 0xCA);
    return _mm512_and_si512(both, _mm512_set1_epi8(7));
}
#include "affine_fixed.h"
#endif
