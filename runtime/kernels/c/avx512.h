/* Vectors of AVX-512 for affine_rows.h and tiles.h, after INLINE. */
#include <immintrin.h>

#define MM(x) _mm512_##x
#define SI(x) _mm512_##x##_si512
#define L 16
#define F __m512
#define I __m512i
#define LOADI(p) _mm512_loadu_si512(p)
#define BF16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define LOADB(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define LOADSB(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define LOADSH(p) _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define AS_FLOATS(a) _mm512_castsi512_ps(a)
#include "vectors.h"
