/* The search for trellis codes (FORMAT.md, "Trellis extents"): for each row a sequence of codes with little weighted error.
 *
 * A survivor is a sequence of codes up to a column. Of all sequences whose last bits are the same (KEPT of them) the one with
 * the least error survives, with its state: reduced-state sequence estimation (Duel-Hallen and Heegard, 1989), which is
 * Viterbi's algorithm where states have more bits than are told apart. Survivor number n ends in the bits of n, the last code
 * in the lowest ones. Arithmetic has one order and no fused products, so every instruction set chooses the same codes. */
#include <stdint.h>
#include <string.h>

#include "../../pack/codec/isa.h"

const char *moepack_search_sources = MOEPACK_SOURCES; /* the digest of the file that this library is made of */

enum { FACTOR = 26059, KEPT2 = 8, KEPT3 = 8, MOST = 1 << 8, LONGEST = 64 };

typedef struct {
    int64_t cols, taken, bits; /* columns of targets, at most LONGEST, and how many of them get their codes */
    const float *targets; /* [rows, cols], in levels */
    const float *weight;  /* [cols], of squared errors */
    int32_t *state;       /* [rows]: low bits of the last eight codes as in a state; from bit 16 on their third bits */
    uint8_t *codes;       /* [rows, taken] */
} Search;

typedef struct {
    _Alignas(64) float cost[MOST];
    _Alignas(64) uint16_t low[MOST], high[MOST];
} Survivors;

#define INLINE static inline __attribute__((always_inline))

/* One column: for each last code and each prefix p the best of the survivors before, which differ in their first
 * bits. */
static void advance_plain(const int bits, const int kept, float x, float weight, const Survivors *from, Survivors *to) {
    const int ways = 1 << bits, prefixes = 1 << (kept - bits);
    for (int s = 0; s < ways; s++)
        for (int p = 0; p < prefixes; p++) {
            float least = 3e38f;
            int low = 0, high = 0;
            for (int t = 0; t < ways; t++) {
                const int i = t * prefixes + p;
                const int new_low = from->low[i] >> 2 | (s & 3) << 14, new_high = from->high[i] >> 1 | (s >> 2) << 7;
                const int product = (new_low ^ new_high) * FACTOR;
                const int even = ((product & 0xFF) + (product >> 16 & 0xFF) + 1) >> 1;
                const int odd = ((product >> 8 & 0xFF) + (product >> 24 & 0xFF) + 1) >> 1;
                const float distance = x - (float)(even + odd);
                const float square = distance * distance;
                const float added = square * weight;
                const float cost = from->cost[i] + added;
                if (cost < least) least = cost, low = new_low, high = new_high;
            }
            to->cost[p * ways + s] = least;
            to->low[p * ways + s] = (uint16_t)low;
            to->high[p * ways + s] = (uint16_t)high;
        }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))

/* 16 numbers of each of `ways` vectors, interleaved: to[p * ways + s] = from[s][p]. */
AVX2 INLINE void interleave16(const int ways, const __m256i *from, uint16_t *to) {
    __m256i v[8], w[8];
    for (int s = 0; s < ways; s++) v[s] = from[s];
    for (int s = 0; s < ways; s += 2) { /* pairs of s, of p 0-3 | 8-11 and 4-7 | 12-15 */
        w[s] = _mm256_unpacklo_epi16(v[s], v[s + 1]);
        w[s + 1] = _mm256_unpackhi_epi16(v[s], v[s + 1]);
    }
    for (int s = 0; s < ways; s += 4)
        for (int half = 0; half < 2; half++) { /* fours of s, of two p a lane */
            v[s + 2 * half] = _mm256_unpacklo_epi32(w[s + half], w[s + 2 + half]);
            v[s + 2 * half + 1] = _mm256_unpackhi_epi32(w[s + half], w[s + 2 + half]);
        }
    if (ways == 4) {
        for (int i = 0; i < 4; i++) {
            _mm_store_si128((__m128i *)to + i, _mm256_castsi256_si128(v[i]));
            _mm_store_si128((__m128i *)to + 4 + i, _mm256_extracti128_si256(v[i], 1));
        }
        return;
    }
    for (int i = 0; i < 4; i++) { /* eights of s, of one p a lane */
        const __m256i first = _mm256_unpacklo_epi64(v[i], v[4 + i]), second = _mm256_unpackhi_epi64(v[i], v[4 + i]);
        _mm_store_si128((__m128i *)to + 2 * i, _mm256_castsi256_si128(first));
        _mm_store_si128((__m128i *)to + 2 * i + 1, _mm256_castsi256_si128(second));
        _mm_store_si128((__m128i *)to + 8 + 2 * i, _mm256_extracti128_si256(first, 1));
        _mm_store_si128((__m128i *)to + 8 + 2 * i + 1, _mm256_extracti128_si256(second, 1));
    }
}

/* The same of floats: from[s] has p 0-3 | 8-11, from[ways + s] p 4-7 | 12-15. */
AVX2 INLINE void interleave32(const int ways, const __m256 *from, float *to) {
    for (int half = 0; half < 2; half++)
        for (int s = 0; s < ways; s += 4) {
            const __m256 *v = from + half * ways + s;
            const __m256 a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpacklo_ps(v[2], v[3]);
            const __m256 c = _mm256_unpackhi_ps(v[0], v[1]), d = _mm256_unpackhi_ps(v[2], v[3]);
            const __m256 rows[4] = {_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE),
                                    _mm256_shuffle_ps(c, d, 0x44), _mm256_shuffle_ps(c, d, 0xEE)};
            for (int p = 0; p < 4; p++) {
                _mm_store_ps(to + (4 * half + p) * ways + s, _mm256_castps256_ps128(rows[p]));
                _mm_store_ps(to + (8 + 4 * half + p) * ways + s, _mm256_extractf128_ps(rows[p], 1));
            }
        }
}

/* As advance_plain, 16 prefixes at a time. */
AVX2 INLINE void advance_avx2(const int bits, const int kept, float given, float weight, const Survivors *from,
                              Survivors *to) {
    const int ways = 1 << bits, prefixes = 1 << (kept - bits);
    const __m256i factor = _mm256_set1_epi16(FACTOR), ones = _mm256_set1_epi8(1), none = _mm256_setzero_si256();
    const __m256 x = _mm256_set1_ps(given), by = _mm256_set1_ps(weight);
    for (int p = 0; p < prefixes; p += 16) {
        __m256 cost[16];
        __m256i low[8], high[8];
        for (int s = 0; s < ways; s++) {
            const __m256i new_low = _mm256_set1_epi16((short)((s & 3) << 14)), new_high = _mm256_set1_epi16((short)((s >> 2) << 7));
            for (int t = 0; t < ways; t++) {
                const int i = t * prefixes + p;
                const __m256i before = _mm256_load_si256((const __m256i *)(from->low + i));
                const __m256i own_low = _mm256_or_si256(_mm256_srli_epi16(before, 2), new_low);
                __m256i state = own_low, own_high = none;
                if (bits == 3) {
                    own_high = _mm256_or_si256(_mm256_srli_epi16(_mm256_load_si256((const __m256i *)(from->high + i)), 1), new_high);
                    state = _mm256_xor_si256(own_low, own_high);
                }
                const __m256i bytes = _mm256_avg_epu8(_mm256_mullo_epi16(state, factor), _mm256_mulhi_epu16(state, factor));
                const __m256i level = _mm256_maddubs_epi16(bytes, ones);
                const __m256 first = _mm256_sub_ps(x, _mm256_cvtepi32_ps(_mm256_unpacklo_epi16(level, none)));
                const __m256 second = _mm256_sub_ps(x, _mm256_cvtepi32_ps(_mm256_unpackhi_epi16(level, none)));
                const __m256 left = _mm256_load_ps(from->cost + i), right = _mm256_load_ps(from->cost + i + 8);
                const __m256 old_first = _mm256_permute2f128_ps(left, right, 0x20), old_second = _mm256_permute2f128_ps(left, right, 0x31);
                const __m256 new_first = _mm256_add_ps(old_first, _mm256_mul_ps(_mm256_mul_ps(first, first), by));
                const __m256 new_second = _mm256_add_ps(old_second, _mm256_mul_ps(_mm256_mul_ps(second, second), by));
                if (t == 0) {
                    cost[s] = new_first, cost[ways + s] = new_second, low[s] = own_low, high[s] = own_high;
                    continue;
                }
                const __m256i less_first = _mm256_castps_si256(_mm256_cmp_ps(new_first, cost[s], _CMP_LT_OQ));
                const __m256i less_second = _mm256_castps_si256(_mm256_cmp_ps(new_second, cost[ways + s], _CMP_LT_OQ));
                const __m256i less = _mm256_packs_epi32(less_first, less_second);
                cost[s] = _mm256_min_ps(new_first, cost[s]);
                cost[ways + s] = _mm256_min_ps(new_second, cost[ways + s]);
                low[s] = _mm256_blendv_epi8(low[s], own_low, less);
                if (bits == 3) high[s] = _mm256_blendv_epi8(high[s], own_high, less);
            }
        }
        interleave32(ways, cost, to->cost + p * ways);
        interleave16(ways, low, to->low + p * ways);
        if (bits == 3) interleave16(ways, high, to->high + p * ways);
    }
}
#endif

typedef void Advance(int, int, float, float, const Survivors *, Survivors *);

INLINE void search(const int bits, const int kept, Advance *advance, const Search *m, int64_t first, int64_t last) {
    const int all = 1 << kept, mask = (1 << bits) - 1;
    Survivors made[LONGEST + 1];
    for (int64_t row = first; row < last; row++) {
        const int low = m->state[row] & 0xFFFF, high = m->state[row] >> 16;
        int begin = 0; /* the codes before, the last one in the lowest bits */
        for (int i = 7; i >= 0; i--) begin = begin << bits | (low >> (14 - 2 * i) & 3) | (bits == 3 ? (high >> (7 - i) & 1) << 2 : 0);
        for (int i = 0; i < all; i++) made[0].cost[i] = 1e30f, made[0].low[i] = (uint16_t)low, made[0].high[i] = (uint16_t)high;
        made[0].cost[begin & (all - 1)] = 0.0f;
        for (int64_t c = 0; c < m->cols; c++) {
            advance(bits, kept, m->targets[row * m->cols + c], m->weight[c], &made[c], &made[c + 1]);
        }
        int at = 0;
        const Survivors *end = &made[m->cols];
        for (int i = 1; i < all; i++)
            if (end->cost[i] < end->cost[at]) at = i;
        for (int64_t c = m->cols - 1; c >= 0; c--) {
            const Survivors *here = &made[c + 1];
            if (c == m->taken - 1) m->state[row] = here->low[at] | (bits == 3 ? here->high[at] << 16 : 0);
            if (c < m->taken) m->codes[row * m->taken + c] = (uint8_t)(at & mask);
            int codes = 0; /* of the last eight, those that tell survivors before apart */
            for (int i = (kept + bits - 1) / bits; i >= 0; i--)
                codes = codes << bits | (here->low[at] >> (14 - 2 * i) & 3) | (bits == 3 ? (here->high[at] >> (7 - i) & 1) << 2 : 0);
            at = codes >> bits & (all - 1);
        }
    }
}

static void search_plain(const Search *m, int64_t first, int64_t last) {
    if (m->bits == 2)
        search(2, KEPT2, advance_plain, m, first, last);
    else
        search(3, KEPT3, advance_plain, m, first, last);
}

#ifdef AVX2
AVX2 static void search_avx2(const Search *m, int64_t first, int64_t last) {
    if (m->bits == 2)
        search(2, KEPT2, advance_avx2, m, first, last);
    else
        search(3, KEPT3, advance_avx2, m, first, last);
}
#endif

int64_t moepack_search_level(void) { return isa_level(); }

/* Rows [first, last), by the instructions of a level of isa.h. */
void moepack_search(const Search *m, int64_t first, int64_t last, int64_t level) {
#ifdef AVX2
    if (level >= ISA_AVX2) {
        search_avx2(m, first, last);
        return;
    }
#endif
    (void)level;
    search_plain(m, first, last);
}
