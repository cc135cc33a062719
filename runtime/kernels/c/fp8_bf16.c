/* FP8 codes times BF16 activations by AVX-512 BF16 with VBMI: BF16 holds E4M3 exactly, so a byte looks up both bytes of
 * its number, and one instruction multiplies two columns. Activations below 2^-126 count as 0.
 *
 * On a Zen 4 the processor's own fetching takes about 0.9 times as long as hints, and one stream of codes is faster than
 * two or four (1.1 to 1.3 times as long). On a Sapphire Rapids it takes 1.5 times as long as hints. */
#include "gemm.h"

#if defined(HAVE_X86) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 16")
#define WIDE AVX512_BF16
#define INLINE WIDE static inline __attribute__((always_inline))

static uint8_t bytes[2][128]; /* by code without its sign: the lower and upper byte of the BF16 number */

__attribute__((constructor)) static void make_bytes(void) {
    for (int code = 0; code < 128; code++) {
        const uint32_t word = (uint32_t)code << 20;
        float value;
        memcpy(&value, &word, 4);
        const uint16_t bits = narrow(value * 0x1p120f);
        bytes[0][code] = (uint8_t)bits, bytes[1][code] = (uint8_t)(bits >> 8);
    }
}

static void prepare(const Gemm *m, const void *from, Prepared *p) {
    const uint32_t not_a_number = 0x7FC00000;
    const uint16_t *x = from;
    memcpy(p->scaled, from, (size_t)m->cols * 2); /* as they are, filled up to whole words of codes */
    memset((uint16_t *)p->scaled + m->cols, 0, 8);
    p->back = 1;
    for (int64_t c = 0; c < m->cols; c++)
        if ((x[c] & 0x7F80) == 0x7F80) memcpy(&p->back, &not_a_number, 4);
}

/* Products of 16 rows from `row` on and T activations, into out[t * 16]. A sum's lanes are rows 4i and 4i + 1, or 4i + 2
 * and 4i + 3, of two pairs of columns each. */
INLINE void products(const int T, const Gemm *m, const Form *f, const uint8_t *base, int64_t row, const Prepared *const *x,
                     float *out) {
    const int64_t words = ceil_div(m->cols, 4), step = f->bits == FP8_ROW ? words : f->group / 4;
    const int64_t groups = ceil_div(words, step), block = row / BLOCK;
    const uint32_t *codes = (const uint32_t *)(base + f->low) + block * words * BLOCK;
    const uint8_t *powers = base + f->scale + block * groups * BLOCK;
    const float *floats = (const float *)(base + f->scale) + block * groups * (f->bits == FP8_ROW ? BLOCK : 1);
    const __m512i low[2] = {_mm512_loadu_si512(bytes[0]), _mm512_loadu_si512(bytes[0] + 64)};
    const __m512i high[2] = {_mm512_loadu_si512(bytes[1]), _mm512_loadu_si512(bytes[1] + 64)};
    const int hints = moepack_hints;
    __m512 total[4];
    UNROLL for (int t = 0; t < T; t++) total[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        const int64_t to = least((g + 1) * step, words);
        __m512 acc[4][2][2]; /* by even and odd words, so that additions do not wait for one another; by rows */
        UNROLL for (int t = 0; t < T; t++) UNROLL for (int k = 0; k < 4; k++) acc[t][k / 2][k % 2] = _mm512_setzero_ps();
        for (int64_t w = g * step; w < to; w += 2)
            UNROLL for (int k = 0; k < 2; k++) {
                if (w + k >= to) break;
                if (hints) _mm_prefetch((const char *)(codes + (w + k + AHEAD) * BLOCK), _MM_HINT_T0);
                __m512i v = _mm512_loadu_si512(codes + (w + k) * BLOCK);
                __asm__("" : "+v"(v)); /* or else GCC loads the line for each use */
                const __m512i upper = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], v, high[1]), v,
                                                                _mm512_set1_epi8((char)0x80), 0xF8);
                const __m512i lower = _mm512_permutex2var_epi8(low[0], v, low[1]);
                const __m512bh a = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
                const __m512bh b = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
                UNROLL for (int t = 0; t < T; t++) {
                    int64_t four;
                    memcpy(&four, (const uint16_t *)x[t]->scaled + 4 * (w + k), 8);
                    const __m512bh by = (__m512bh)_mm512_set1_epi64(four);
                    acc[t][k][0] = _mm512_dpbf16_ps(acc[t][k][0], a, by);
                    acc[t][k][1] = _mm512_dpbf16_ps(acc[t][k][1], b, by);
                }
            }
        __m512 s; /* each branch reads its own section alone: the others are longer */
        if (f->bits == FP8) {
            s = _mm512_set1_ps(floats[g]);
        } else if (f->bits == FP8_ROW) {
            s = _mm512_loadu_ps(floats);
        } else {
            const __m512i power = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(powers + g * BLOCK)));
            s = _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(power, 23), _mm512_set1_epi32(1 << 22)));
        }
        UNROLL for (int t = 0; t < T; t++) {
            const __m512 a = _mm512_add_ps(acc[t][0][0], acc[t][1][0]), b = _mm512_add_ps(acc[t][0][1], acc[t][1][1]);
            total[t] = _mm512_fmadd_ps(s, _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD)), total[t]);
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        _mm512_storeu_ps(out + t * BLOCK, _mm512_mul_ps(total[t], _mm512_set1_ps(x[t]->back)));
}

WIDE static void rows(const Gemm *m, const Job *job, int64_t row, int64_t end, const Prepared *const *x, const int64_t *slot,
                      int64_t n) {
    float part[4 * BLOCK];
    for (int64_t t = 0; t < n;) {
        const int many = n - t >= 4 ? 4 : n - t >= 2 ? 2 : 1;
        for (int64_t at = row; at < end; at += BLOCK) {
            if (many == 4) products(4, m, job->form, job->base, at, x + t, part);
            else if (many == 2) products(2, m, job->form, job->base, at, x + t, part);
            else products(1, m, job->form, job->base, at, x + t, part);
            for (int i = 0; i < many; i++) put(m, job, slot[t + i], at, least(BLOCK, end - at), part + i * BLOCK, 1);
        }
        t += many;
    }
}

const Loops moepack_fp8_bf16 = {prepare, rows, 0};
#else
const Loops moepack_fp8_bf16 = {0, 0, 0};
#endif
