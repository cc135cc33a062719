/* The search for trellis codes (FORMAT.md, "Trellis extents"): for each row a sequence of codes with little error.
 *
 * A survivor is a sequence of codes up to a column. Of all sequences whose last bits are the same (KEPT of them) the one with
 * the least error survives, with its state and with its own targets for the columns to come, which its errors move: reduced-
 * state sequence estimation with a processing of its own for each survivor (Raheli, Polydoros and Tzou, 1995). Survivor
 * number n ends in the bits of n, the last code in the lowest ones. Arithmetic has one order and no fused products, so every
 * instruction set chooses the same codes. */
#include <stdint.h>
#include <string.h>

#include "../../pack/codec/isa.h"

const char *moepack_search_sources = MOEPACK_SOURCES; /* the digest of the file that this library is made of */

enum { FACTOR = 26059, ZERO = 217, KEPT = 8, ALL = 1 << KEPT, LONGEST = 64 };

typedef struct {
    int64_t cols, taken, bits; /* columns of targets, at most LONGEST, and how many of them get their codes */
    const float *targets;      /* [rows, cols]: weights, and what the errors before add to them */
    const float *weights;      /* [rows, cols] */
    const float *scale;        /* [rows, cols], of a level */
    const float *inverse;      /* [rows, cols], 1 over the scale */
    const float *cost;         /* [cols], of squared distances to targets */
    const float *feed;         /* [cols, LONGEST]: what an error in one column adds to the targets of later ones */
    int32_t *state;            /* [rows]: low bits of the last eight codes as in a state; from bit 16 on their third bits */
    uint8_t *codes;            /* [rows, taken] */
} Search;

typedef struct {
    _Alignas(64) float cost[ALL], x[ALL]; /* x: the next column's target in levels */
    _Alignas(64) uint16_t low[ALL], high[ALL];
    _Alignas(64) float wrong[ALL]; /* target less level in the column before */
} Survivors;

typedef float Targets[ALL][LONGEST];

#define INLINE static inline __attribute__((always_inline))

/* One column: for each last code and each prefix p the best of the survivors before, which differ in their first bits. */
static void advance_plain(const int bits, float weight, const Survivors *from, Survivors *to) {
    const int ways = 1 << bits, prefixes = ALL >> bits;
    for (int s = 0; s < ways; s++)
        for (int p = 0; p < prefixes; p++) {
            float least = 3e38f, wrong = 0.0f;
            int low = 0, high = 0;
            for (int t = 0; t < ways; t++) {
                const int i = t * prefixes + p;
                const int new_low = from->low[i] >> 2 | (s & 3) << 14, new_high = from->high[i] >> 1 | (s >> 2) << 7;
                const int product = (new_low ^ new_high) * FACTOR;
                const int even = ((product & 0xFF) + (product >> 16 & 0xFF) + 1) >> 1;
                const int odd = ((product >> 8 & 0xFF) + (product >> 24 & 0xFF) + 1) >> 1;
                const float distance = from->x[i] - (float)(even + odd);
                const float square = distance * distance;
                const float added = square * weight;
                const float cost = from->cost[i] + added;
                if (cost < least) least = cost, wrong = distance, low = new_low, high = new_high;
            }
            to->cost[p * ways + s] = least;
            to->wrong[p * ways + s] = wrong;
            to->low[p * ways + s] = (uint16_t)low;
            to->high[p * ways + s] = (uint16_t)high;
        }
}

/* A weight less its value, of what its target is more than its level. */
INLINE float error_of(float wrong, float scale, float target, float weight) {
    const float more = wrong * scale;
    const float fed = target - weight;
    return more - fed;
}

/* The number of the survivor before from which survivor n comes. */
INLINE int source_of(const int bits, const Survivors *of, int n) {
    const int low = of->low[n], high = of->high[n];
    const int first = bits == 2 ? low >> 6 & 3 : (high >> 5 & 1) | (low >> 8 & 3) << 1; /* bits KEPT to KEPT + bits - 1 of its codes */
    return first << (KEPT - bits) | n >> bits;
}

/* One step of a search behind a column's codes. */
typedef struct {
    const float *feed;               /* by later column */
    float scale, weight, inverse;    /* of the column, and of the next one the inverse scale */
    int next, cols;
} Step;

/* Moves the targets of columns [next, cols) of all survivors by their errors in the column before. */
static void move_plain(const int bits, const Step *m, Survivors *to, Targets *old, Targets *new) {
    for (int n = 0; n < ALL; n++) {
        const float *before = (*old)[source_of(bits, to, n)];
        const float error = error_of(to->wrong[n], m->scale, before[m->next - 1], m->weight);
        for (int c = m->next; c < m->cols; c++) {
            const float moved = error * m->feed[c];
            (*new)[n][c] = before[c] + moved;
        }
        const float levels = (*new)[n][m->next] * m->inverse;
        to->x[n] = levels + (float)ZERO;
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

/* Of 16 floats the numbers 0-3 | 8-11, and 4-7 | 12-15. */
#define LOW8(at) _mm256_permute2f128_ps(_mm256_load_ps(at), _mm256_load_ps((at) + 8), 0x20)
#define HIGH8(at) _mm256_permute2f128_ps(_mm256_load_ps(at), _mm256_load_ps((at) + 8), 0x31)

/* As advance_plain, 16 prefixes at a time. */
AVX2 INLINE void advance_avx2(const int bits, float weight, const Survivors *from, Survivors *to) {
    const int ways = 1 << bits, prefixes = ALL >> bits;
    const __m256i factor = _mm256_set1_epi16(FACTOR), ones = _mm256_set1_epi8(1), none = _mm256_setzero_si256();
    const __m256 by = _mm256_set1_ps(weight);
    for (int p = 0; p < prefixes; p += 16) {
        __m256 cost[16], wrong[16];
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
                const __m256 first = _mm256_sub_ps(LOW8(from->x + i), _mm256_cvtepi32_ps(_mm256_unpacklo_epi16(level, none)));
                const __m256 second = _mm256_sub_ps(HIGH8(from->x + i), _mm256_cvtepi32_ps(_mm256_unpackhi_epi16(level, none)));
                const __m256 old_first = LOW8(from->cost + i), old_second = HIGH8(from->cost + i);
                const __m256 new_first = _mm256_add_ps(old_first, _mm256_mul_ps(_mm256_mul_ps(first, first), by));
                const __m256 new_second = _mm256_add_ps(old_second, _mm256_mul_ps(_mm256_mul_ps(second, second), by));
                if (t == 0) {
                    cost[s] = new_first, cost[ways + s] = new_second;
                    wrong[s] = first, wrong[ways + s] = second;
                    low[s] = own_low, high[s] = own_high;
                    continue;
                }
                const __m256 less_first = _mm256_cmp_ps(new_first, cost[s], _CMP_LT_OQ);
                const __m256 less_second = _mm256_cmp_ps(new_second, cost[ways + s], _CMP_LT_OQ);
                const __m256i less = _mm256_packs_epi32(_mm256_castps_si256(less_first), _mm256_castps_si256(less_second));
                wrong[s] = _mm256_blendv_ps(wrong[s], first, less_first);
                wrong[ways + s] = _mm256_blendv_ps(wrong[ways + s], second, less_second);
                cost[s] = _mm256_min_ps(new_first, cost[s]);
                cost[ways + s] = _mm256_min_ps(new_second, cost[ways + s]);
                low[s] = _mm256_blendv_epi8(low[s], own_low, less);
                if (bits == 3) high[s] = _mm256_blendv_epi8(high[s], own_high, less);
            }
        }
        interleave32(ways, cost, to->cost + p * ways);
        interleave32(ways, wrong, to->wrong + p * ways);
        interleave16(ways, low, to->low + p * ways);
        if (bits == 3) interleave16(ways, high, to->high + p * ways);
    }
}

AVX2 INLINE void move_avx2(const int bits, const Step *m, Survivors *to, Targets *old, Targets *new) {
    const int first = m->next & ~7;
    __m256 feed[LONGEST / 8];
    for (int c = first; c < m->cols; c += 8) feed[c / 8] = _mm256_loadu_ps(m->feed + c);
    for (int n = 0; n < ALL; n++) {
        const float *before = (*old)[source_of(bits, to, n)];
        const float fed = before[m->next - 1] - m->weight;
        const float more = to->wrong[n] * m->scale;
        const __m256 error = _mm256_set1_ps(more - fed);
        for (int c = first; c < m->cols; c += 8)
            _mm256_store_ps((*new)[n] + c, _mm256_add_ps(_mm256_load_ps(before + c), _mm256_mul_ps(error, feed[c / 8])));
        const float levels = (before[m->next] + _mm256_cvtss_f32(error) * m->feed[m->next]) * m->inverse;
        to->x[n] = levels + (float)ZERO;
    }
}
#endif

typedef void Advance(int, float, const Survivors *, Survivors *);
typedef void Move(int, const Step *, Survivors *, Targets *, Targets *);

/* The codes before and at a survivor's column, the last one in the lowest bits: of the last eight, those of KEPT + `bits` bits. */
INLINE int last_codes(const int bits, int low, int high) {
    int codes = 0;
    for (int i = (KEPT + bits - 1) / bits; i >= 0; i--)
        codes = codes << bits | (low >> (14 - 2 * i) & 3) | (bits == 3 ? (high >> (7 - i) & 1) << 2 : 0);
    return codes;
}

INLINE void search(const int bits, Advance *advance, Move *move, const Search *m, int64_t row) {
    const int cols = (int)m->cols;
    const float *targets = m->targets + row * cols, *scale = m->scale + row * cols, *inverse = m->inverse + row * cols;
    const float *weights = m->weights + row * cols;
    const int low = m->state[row] & 0xFFFF, high = m->state[row] >> 16;
    Survivors made[LONGEST + 1];
    _Alignas(64) Targets own[2];
    for (int n = 0; n < ALL; n++) {
        made[0].cost[n] = 1e30f, made[0].low[n] = (uint16_t)low, made[0].high[n] = (uint16_t)high;
        memcpy(own[0][n], targets, sizeof(float) * (size_t)cols);
        const float levels = targets[0] * inverse[0];
        made[0].x[n] = levels + (float)ZERO;
    }
    made[0].cost[last_codes(bits, low, high) & (ALL - 1)] = 0.0f;
    for (int c = 0; c < cols; c++) {
        Survivors *to = &made[c + 1];
        const float square = scale[c] * scale[c];
        advance(bits, m->cost[c] * square, &made[c], to);
        if (c + 1 == cols) break;
        const Step step = {m->feed + c * LONGEST, scale[c], weights[c], inverse[c + 1], c + 1, cols};
        move(bits, &step, to, &own[c % 2], &own[1 - c % 2]);
    }
    int at = 0;
    for (int n = 1; n < ALL; n++)
        if (made[cols].cost[n] < made[cols].cost[at]) at = n;
    for (int c = cols - 1; c >= 0; c--) {
        const Survivors *here = &made[c + 1];
        if (c == m->taken - 1) m->state[row] = here->low[at] | (bits == 3 ? here->high[at] << 16 : 0);
        if (c < m->taken) m->codes[row * m->taken + c] = (uint8_t)(at & ((1 << bits) - 1));
        at = source_of(bits, here, at);
    }
}

static void search_plain(const Search *m, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (m->bits == 2)
            search(2, advance_plain, move_plain, m, row);
        else
            search(3, advance_plain, move_plain, m, row);
}

#ifdef AVX2
AVX2 static void search_avx2(const Search *m, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (m->bits == 2)
            search(2, advance_avx2, move_avx2, m, row);
        else
            search(3, advance_avx2, move_avx2, m, row);
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
