/* Viterbi's algorithm over a bit-shift trellis (QTIP, Tseng et al., 2024, section 3), and products from its codes.
 *
 * A state is the last `state_bits` bits of a stream that gains `bits` bits a weight; each state has a value. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The path with the least squared error for each of `count` sequences of `length` targets: its values.
 * Returns 0, or 1 where memory is short. The first state is free. */
static inline int fit(const float *target, float *fitted, long count, long length, int state_bits, const int bits,
                      const float *value) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const long states = 1L << state_bits, prefixes = states >> bits, ways = 1L << bits;
    float *cost = aligned_alloc(64, 2 * states * sizeof(float));
    float *best = aligned_alloc(64, prefixes * sizeof(float));
    uint8_t *from = aligned_alloc(64, length * prefixes);
    if (!cost || !best || !from) {
        free(cost), free(best), free(from);
        return 1;
    }
    for (long n = 0; n < count; n++) {
        float *now = cost;
        memset(now, 0, states * sizeof(float));
        for (long step = 0; step < length; step++) {
            uint8_t *way = from + step * prefixes;
            for (long p = 0; p < prefixes; p += 8) {
                __m256 least = _mm256_load_ps(now + p);
                __m256i which = _mm256_setzero_si256();
                for (long t = 1; t < ways; t++) {
                    const __m256 other = _mm256_load_ps(now + t * prefixes + p);
                    const __m256 less = _mm256_cmp_ps(other, least, _CMP_LT_OQ);
                    least = _mm256_min_ps(other, least);
                    which = _mm256_blendv_epi8(which, _mm256_set1_epi32((int)t), _mm256_castps_si256(less));
                }
                _mm256_store_ps(best + p, least);
                const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(which), _mm256_extracti128_si256(which, 1));
                _mm_storel_epi64((__m128i *)(way + p), _mm_packus_epi16(pairs, pairs));
            }
            const __m256 x = _mm256_set1_ps(target[n * length + step]);
            for (long s = 0; s < states; s += 8) {
                const __m256i prefix = _mm256_srlv_epi32(_mm256_add_epi32(_mm256_set1_epi32(s & ((8 << bits) - 1)), lane),
                                                         _mm256_set1_epi32(bits));
                const __m256 least = _mm256_permutevar8x32_ps(_mm256_load_ps(best + ((s >> bits) & ~7L)), prefix);
                const __m256 wrong = _mm256_sub_ps(x, _mm256_load_ps(value + s));
                _mm256_store_ps(now + s, _mm256_fmadd_ps(wrong, wrong, least));
            }
        }
        long state = 0;
        for (long s = 1; s < states; s++)
            if (now[s] < now[state]) state = s;
        for (long step = length - 1; step >= 0; step--) {
            fitted[n * length + step] = value[state];
            const long prefix = state >> bits;
            state = (long)from[step * prefixes + prefix] * prefixes + prefix;
        }
    }
    free(cost), free(best), free(from);
    return 0;
}

int trellis_fit(const float *target, float *fitted, long count, long length, int state_bits, int bits,
                const float *value) {
    if (bits == 2) return fit(target, fitted, count, length, state_bits, 2, value);
    return fit(target, fitted, count, length, state_bits, 3, value);
}

/* Rows of 2-bit codes times one vector of int16, by AVX2: eight streams a row, states of 16 bits, values the sum of
 * the four bytes of state * 34038481 + 76625530 (QTIP's "1MAD"), less 510. `codes` holds, for each row and 64 weights,
 * eight uint16 with the next eight weights of each stream; a stream begins with 16 bits of zeros. */
void trellis_product(const uint16_t *codes, const int16_t *x, int32_t *out, long rows, long cols) {
    const __m256i factor = _mm256_set1_epi32(34038481), add = _mm256_set1_epi32(76625530);
    const __m256i low = _mm256_set1_epi32(0xffff), ones = _mm256_set1_epi8(1);
    long total = 0;
    for (long c = 0; c < cols; c++) total += x[2 * c];
    for (long r = 0; r < rows; r++) {
        __m256i state = _mm256_setzero_si256(), sum = _mm256_setzero_si256();
        for (long c = 0; c < cols; c += 64, codes += 8) {
            const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)codes));
            state = _mm256_or_si256(_mm256_slli_epi32(state, 16), next);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                __m256i s = _mm256_and_si256(_mm256_srli_epi32(state, 14 - 2 * i), low);
                s = _mm256_add_epi32(_mm256_mullo_epi32(s, factor), add);
                /* Each lane's weight meets its own input: x repeats it in both halves of 32 bits. */
                const __m256i in = _mm256_loadu_si256((const __m256i *)(x + 2 * (c + 8 * i)));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(s, ones), in));
            }
        }
        int32_t parts[8];
        _mm256_storeu_si256((__m256i *)parts, sum);
        out[r] = 0;
        for (int i = 0; i < 8; i++) out[r] += parts[i];
        out[r] -= (int32_t)(510 * total);
    }
}

/* The same of another code, of 16 streams a row: the halves of state * 27107 are two bytes each, and a value is the sum
 * of the first bytes' rounded mean and of the second bytes' one, less 255. Multiplications of 16 bits have twice the
 * lanes. */
void trellis_product_halves(const uint16_t *codes, const int16_t *x, int32_t *out, long rows, long cols) {
    const __m256i factor = _mm256_set1_epi16(27107), ones = _mm256_set1_epi8(1);
    long total = 0;
    for (long c = 0; c < cols; c++) total += x[c];
    for (long r = 0; r < rows; r++) {
        __m256i before = _mm256_setzero_si256(), sum = _mm256_setzero_si256();
        for (long c = 0; c < cols; c += 128, codes += 16) {
            const __m256i next = _mm256_loadu_si256((const __m256i *)codes);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m256i old = _mm256_slli_epi16(before, 2 * i + 2), new = _mm256_srli_epi16(next, 14 - 2 * i);
                const __m256i state = _mm256_or_si256(old, new);
                const __m256i low = _mm256_mullo_epi16(state, factor), high = _mm256_mulhi_epu16(state, factor);
                const __m256i value = _mm256_maddubs_epi16(_mm256_avg_epu8(low, high), ones);
                const __m256i in = _mm256_loadu_si256((const __m256i *)(x + c + 16 * i));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(value, in));
            }
            before = next;
        }
        int32_t parts[8];
        _mm256_storeu_si256((__m256i *)parts, sum);
        out[r] = 0;
        for (int i = 0; i < 8; i++) out[r] += parts[i];
        out[r] -= (int32_t)(255 * total);
    }
}
