/* The loops over experts' rows for AVX2 with FMA. */
#include "gemm.h"

#ifdef HAVE_X86
#include <immintrin.h>

typedef struct {
    __m256 low, high;
} Table8;
#define NAME(x) x##_avx2
#define INLINE __attribute__((target("avx2,fma"))) static inline __attribute__((always_inline))
#define CALLED __attribute__((target("avx2,fma"))) static
#define WHOLE __attribute__((target("avx2,fma")))
#define L 8
#define RB 4
#define TB 2
#define R2 4
#define R4 4
#define F __m256
#define I __m256i
#define T16 Table8
#define LOADI(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOADF(p) _mm256_loadu_ps(p)
#define STOREF(p, v) _mm256_storeu_ps(p, v)
#define LOADT(p) ((Table8){_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8)})
#define SET(v) _mm256_set1_ps(v)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define NFMA(a, b, c) _mm256_fnmadd_ps(a, b, c)
#define SUM(a) sum_avx2(a)
#define DROP(w, n) _mm256_srli_epi32(w, n)
#define SRA16(w, n) _mm256_srai_epi16(w, n)
#define LOOKUP(t, w) look_up_avx2(t, w)
#define CODE4(w) _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(w, _mm256_set1_epi32(15))), _mm256_set1_ps(7.5f))
#define CODE8(w) \
    _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(w, _mm256_set1_epi32(255))), _mm256_set1_ps(127.5f))
#define BF16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define STOREB(p, v) store_bf16_avx2(p, v)
#define STOREB2(p, v, w) (STOREB(p, v), STOREB((p) + 8, w))
#define BYTES(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define STREAM(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#define SETI(v) _mm256_set1_epi32((int)(v))
#define AND(a, b) _mm256_and_si256(a, b)
#define SHL(a, n) _mm256_slli_epi32(a, n)
#define SRA(a, n) _mm256_srai_epi32(a, n)
#define MAXI(a, b) _mm256_max_epi32(a, b)
#define LOADB(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define LOADSB(p) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define LOADSH(p) _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define AS_FLOATS(a) _mm256_castsi256_ps(a)

INLINE __m256 look_up_avx2(Table8 t, __m256i w) { /* a permutation uses 3 index bits; the fourth chooses one of two */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, w), _mm256_permutevar8x32_ps(t.high, w),
                            _mm256_castsi256_ps(_mm256_slli_epi32(w, 28)));
}

INLINE void store_bf16_avx2(uint16_t *to, __m256 v) { /* rounds as narrow() does, but not NaN */
    __m256i w = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
    w = _mm256_srli_epi32(_mm256_add_epi32(w, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(w, w), 8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}

INLINE float sum_avx2(__m256 a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
#include "affine_rows.h"

#define PARTS 1
#define FR 2
#define ADDI(a, b) _mm256_add_epi32(a, b)
#define SUBI(a, b) _mm256_sub_epi32(a, b)
#define MULI(a, b) _mm256_mullo_epi32(a, b)
#define DOT(acc, fields, x) _mm256_add_epi32(acc, _mm256_madd_epi16(fields, x))
#define FLOATS(a) _mm256_cvtepi32_ps(a)
#define FUSED(a, b, c) _mm256_fmadd_ps(a, b, c)
#define HALVES(v, odd) \
    _mm256_castsi256_ps(odd ? _mm256_and_si256(v, _mm256_set1_epi32(-65536)) : _mm256_slli_epi32(v, 16))
#define PAIRS(bytes, x) _mm256_maddubs_epi16(bytes, x)
#define ADDH(a, b) _mm256_add_epi16(a, b)
#define FP4_BYTES(v) \
    _mm256_shuffle_epi8(_mm256_setr_epi8(E2M1_FIELDS, E2M1_FIELDS), _mm256_and_si256(v, _mm256_set1_epi8(15)))
#define ARRANGE(to, from, order) \
    for (int i = 0; i < 32; i++) ((int16_t *)(to))[i] = (from)[(order)[i]]
#include "affine_fixed.h"
#include "fp8_rows.h"
#endif
