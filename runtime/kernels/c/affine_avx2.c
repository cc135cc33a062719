/* The loops over experts' rows for AVX2 with FMA. */
#include "gemm.h"

#ifdef HAVE_X86
#include <immintrin.h>

typedef struct {
    __m256 low, high;
} Table8;
#define NAME(x) x##_avx2
#define INLINE AVX2 static inline __attribute__((always_inline))
#define CALLED AVX2 static
#define WHOLE AVX2
#define MM(x) _mm256_##x
#define SI(x) _mm256_##x##_si256
#define L 8
#define RB 4
#define TB 2
#define R2 4
#define R4 4
#define F __m256
#define I __m256i
#define T16 Table8
#include "vectors.h"
#define LOADI(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOADT(p) ((Table8){_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8)})
#define SUM(a) sum_avx2(a)
#define LOOKUP(t, w) look_up_avx2(t, w)
#define CODE4(w) _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(w, _mm256_set1_epi32(15))), _mm256_set1_ps(7.5f))
#define BF16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define STOREB(p, v) store_bf16_avx2(p, v)
#define STOREB2(p, v, w) (STOREB(p, v), STOREB((p) + 8, w))
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
#define MANY 4
#define DOT(acc, fields, x) _mm256_add_epi32(acc, _mm256_madd_epi16(fields, x))
#define DOT16 DOT
#define PAIRS(bytes, x) _mm256_maddubs_epi16(bytes, x)
#define ADDH(a, b) _mm256_add_epi16(a, b)
#define FP4_BYTES(v) _mm256_shuffle_epi8(_mm256_setr_epi8(E2M1_FIELDS, E2M1_FIELDS), v)
#define ARRANGE(to, from, order) \
    for (int i = 0; i < 32; i++) ((int16_t *)(to))[i] = (from)[(order)[i]]
#define TURN(to, from, n) \
    for (int i = 0; i < 32; i += 2 * (n)) \
        for (int j = 0; j < (n); j += 4) { /* four words */ \
            const __m128i a = _mm_loadl_epi64((const __m128i *)((from) + i + j)); \
            const __m128i b = _mm_loadl_epi64((const __m128i *)((from) + i + j + (n))); \
            _mm_storeu_si128((__m128i *)((to) + i / 2 + j), _mm_unpacklo_epi16(a, b)); \
        }
#define MAKE_TABLES(x, n, to) make_tables(x, n, to)
#define TABLES(words, n, tables, sum) look_up_rows(words, n, tables, sum)

/* Of each four columns the 16 sums that one bit each makes, plus 2^17 and so of 18 bits, in three parts of 6 bits: bytes
 * of a table for a look-up, of which four add up in a byte. By 32 columns: from columns 0 and 8, 4 and 12, 16 and 24, 20
 * and 28 on, a table of each part side by side. */
CALLED void make_tables(const int16_t *x, int64_t columns, uint8_t *to) {
    const __m256i first = _mm256_setr_epi32(0, -1, 0, -1, 0, -1, 0, -1), second = _mm256_setr_epi32(0, 0, -1, -1, 0, 0, -1, -1);
    const __m256i six = SETI(63);
    for (int64_t c = 0; c < columns; c += c % 16 ? 12 : 4, to += 96) {
        const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)(x + c)),
                                                _mm_loadl_epi64((const __m128i *)(x + c + 8)));
        const __m256i four = _mm256_cvtepi16_epi32(both);
        __m256i u[4];
        u[0] = _mm256_add_epi32(SETI(1 << 17), _mm256_and_si256(_mm256_shuffle_epi32(four, 0x00), first));
        u[0] = _mm256_add_epi32(u[0], _mm256_and_si256(_mm256_shuffle_epi32(four, 0x55), second));
        u[1] = _mm256_add_epi32(u[0], _mm256_shuffle_epi32(four, 0xAA));
        u[2] = _mm256_add_epi32(u[0], _mm256_shuffle_epi32(four, 0xFF));
        u[3] = _mm256_add_epi32(u[1], _mm256_shuffle_epi32(four, 0xFF));
        UNROLL for (int part = 0; part < 3; part++) {
            __m256i v[4];
            UNROLL for (int i = 0; i < 4; i++) v[i] = _mm256_and_si256(_mm256_srli_epi32(u[i], 6 * part), six);
            _mm256_storeu_si256((__m256i *)to + part, _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]),
                                                                          _mm256_packus_epi32(v[2], v[3])));
        }
    }
}

/* even[0] + 64 even[1] + 4096 even[2], in 16 bits each, both lanes added: words 0 to 3 of a lane, then 4 to 7. */
INLINE __m256i weighted(const __m256i part[3]) {
    const __m256i none = _mm256_setzero_si256(), by = _mm256_set1_epi32(64 << 16 | 1);
    __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(part[0], part[1]), by);
    __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(part[0], part[1]), by);
    low = _mm256_add_epi32(low, _mm256_slli_epi32(_mm256_unpacklo_epi16(part[2], none), 12));
    high = _mm256_add_epi32(high, _mm256_slli_epi32(_mm256_unpackhi_epi16(part[2], none), 12));
    return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

/* A word's bytes are moved such that a lane has the same byte of 16 rows, whose halves look up what four weights add. */
INLINE void look_up_rows(const uint32_t *words, int64_t n, const uint8_t *tables, __m256i sum[2]) {
    const __m256i gather = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13,
                                            2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i four = _mm256_set1_epi8(15);
    __m256i all[3], odd[3]; /* sums of 16 bits: of bytes with the next one's 256 times, of odd bytes */
    UNROLL for (int i = 0; i < 3; i++) all[i] = odd[i] = _mm256_setzero_si256();
    for (int64_t w = 0; w < n; w++, words += BLOCK, tables += 384) {
        STREAM(words + AHEAD * BLOCK);
        const __m256i a = _mm256_shuffle_epi8(LOADI(words), gather), b = _mm256_shuffle_epi8(LOADI(words + 8), gather);
        const __m256i bytes[2] = {_mm256_permute4x64_epi64(_mm256_unpacklo_epi32(a, b), 0xD8),
                                  _mm256_permute4x64_epi64(_mm256_unpackhi_epi32(a, b), 0xD8)};
        __m256i part[3];
        UNROLL for (int k = 0; k < 4; k++) {
            const __m256i at = _mm256_and_si256(k % 2 ? _mm256_srli_epi16(bytes[k / 2], 4) : bytes[k / 2], four);
            UNROLL for (int i = 0; i < 3; i++) {
                const __m256i found = _mm256_shuffle_epi8(LOADI(tables + k * 96 + i * 32), at);
                part[i] = k ? _mm256_add_epi8(part[i], found) : found;
            }
        }
        UNROLL for (int i = 0; i < 3; i++) {
            all[i] = _mm256_add_epi16(all[i], part[i]);
            odd[i] = _mm256_add_epi16(odd[i], _mm256_srli_epi16(part[i], 8));
        }
    }
    UNROLL for (int i = 0; i < 3; i++) all[i] = _mm256_sub_epi16(all[i], _mm256_slli_epi16(odd[i], 8));
    const __m256i x = weighted(all), y = weighted(odd), less = SETI(n * 8 << 17); /* 8 look-ups of a word */
    sum[0] = _mm256_sub_epi32(_mm256_unpacklo_epi32(x, y), less);
    sum[1] = _mm256_sub_epi32(_mm256_unpackhi_epi32(x, y), less);
}
#include "affine_fixed.h"
#include "fp8_rows.h"
#endif
