/* Decodes the exponents of a tile in plain C and with AVX2 and BMI2; exponent_level.c chooses.
 *
 * A window of a lane's next bits gives as many symbols as it holds, up to six. A lane's items, a byte a symbol, go to
 * scratch memory one after another; then quads are brought to their places, and signs and mantissas are added.
 *
 * The floor: a window holds some 3.8 symbols of 2.6 bits and takes six operations; each waits 6 cycles for the one
 * before and, once in five, 10 for its bits: 0.6 cycles a symbol with four lanes abreast. The second step takes 0.15 with
 * AVX2. Measured on Zen 4: 0.73, 0.17, and 0.2 for what the two lose to one another in the cache. Eight lanes abreast
 * spill registers: 0.82 instead of 0.73.
 */
#include "exponent.h"

#define AT_ONCE 5 /* windows that 64 bits hold, from any bit of a byte on */
#define SYMBOLS (TILE / LANES)
#define MOST_BITS (8 * SYMBOLS) /* of a lane */
#define BEFORE 32 /* bytes that windows may write past a lane's last symbol, which is the first in memory */
#define STRIDE (BEFORE + SYMBOLS + 16)
#define WORDS (LANES * MOST_BITS / 32) /* of the longest tile */
/* Words past a tile's last that a lane of a damaged one may read: it goes on as long as others have symbols left, for 2860
 * bits, and may begin 2016 bits too far, where AVX-512 decoded the rows before. */
#define PAST 256

typedef struct {
    uint32_t words[PAST + WORDS]; /* the tile's, the last one first: any eight bytes hold 64 bits in order */
    uint8_t items[8 * STRIDE];
} Scratch;

typedef struct {
    const uint8_t *out, *plane;
} Next;

/* Fill the windows that begin with the `used` bits of `window`: these hold what `entry` says. */
static void fill_windows(Tables *tables, int codes, uint32_t window, uint32_t used, uint32_t count, uint64_t entry) {
    uint32_t end = window + (1u << (WINDOW_BITS - used));
    for (int s = 0; s < codes && count < 6 && used + tables->length[s] <= WINDOW_BITS; s++) {
        uint32_t both = used + tables->length[s];
        fill_windows(tables, codes, window, both, count + 1, entry | (uint64_t)tables->item[s] << (56 - 8 * count));
        window += 1u << (WINDOW_BITS - both);
    }
    for (; window < end; window++) tables->windows[window] = entry | count << 8 | used;
}

/* The tables that moepack_exponent_lanes looks up. A symbol's item is, of FP8, its exponent in place for a weight and its
 * length less one; of BF16, its number by code words. */
void moepack_exponent_tables(int form, const uint8_t *length_of, const uint8_t *exponent_of, Tables *tables) {
    int codes = 0;
    memset(tables->length, 0, sizeof tables->length);
    memset(tables->exponent, 0, sizeof tables->exponent);
    for (int w = 0; w < 256; w += 256 >> length_of[w], codes++) {
        tables->length[codes] = length_of[w];
        tables->exponent[codes] = exponent_of[w];
        tables->item[codes] = (uint8_t)(form == FP8 ? exponent_of[w] << 3 | (length_of[w] - 1) : codes);
    }
    fill_windows(tables, codes, 0, 0, 0, 0);
    for (int a = 0; a < 16; a++)
        for (int b = 0; b < 16; b++) {
            tables->pair[16 * a + b] = (uint32_t)tables->exponent[a] << 7 | (uint32_t)tables->exponent[b] << 23;
            tables->pair_length[16 * a + b] = (uint8_t)(tables->length[a] + tables->length[b]);
        }
}

INLINE uint64_t load_window(const uint8_t *from, uint32_t skip) { /* bit 0 marks where what is loaded ends */
    uint64_t w;
    memcpy(&w, from, 8);
    return (w | 1) << skip;
}

/* Decode `count` symbols of each of four lanes, and up to 30 more: their chains of look-ups do not wait for one another.
 * The symbols stand last to first and end at to[STRIDE * lane + 7 + count], so that an entry is stored as it is. `end` is
 * where the reversed words end. What `next` begins is fetched into the cache meanwhile. */
INLINE void four_lanes(const int form, const uint64_t *windows, const uint8_t *end, const uint32_t *position,
                       int64_t count, uint8_t *to, const Next *next, const uint32_t shift) {
#define FOUR(does) does(0) does(1) does(2) does(3)
#define BEGIN(k)                                                                                     \
    const uint8_t *from##k = end - (position[k] >> 3) - 8;                                           \
    uint64_t w##k = load_window(from##k, position[k] & 7);                                           \
    int64_t n##k = count;
#define LOOK_UP(k)                                                                                   \
    {                                                                                                \
        uint64_t e = windows[w##k >> shift];                                                         \
        w##k <<= e & 63;                                                                             \
        memcpy(to + STRIDE * k + n##k, &e, 8);                                                       \
        n##k -= e >> 8 & 255;                                                                        \
    }
#define LOAD(k)                                                                                      \
    {                                                                                                \
        uint32_t used = (uint32_t)__builtin_ctzll(w##k);                                             \
        from##k -= used >> 3;                                                                        \
        w##k = load_window(from##k, used & 7);                                                       \
        n##k = n##k > 0 ? n##k : 0;                                                                  \
    }
    const uint8_t *out = next->out, *plane = next->plane;
    FOUR(BEGIN)
    do {
        for (int i = 0; i < AT_ONCE; i++) {
            FOUR(LOOK_UP)
        }
        FOUR(LOAD)
        for (int i = 0; i < 2; i++, out += form * ROW, plane += form * ROW / 2) {
            __builtin_prefetch(out, 1);
            __builtin_prefetch(plane);
        }
    } while (n0 | n1 | n2 | n3);
#undef FOUR
#undef BEGIN
#undef LOOK_UP
#undef LOAD
}

/* The items of a quad, the first one last, and its other bits to weights. Returns the bits of its code words. */
INLINE uint32_t join(const int form, const Tables *tables, const uint8_t *items, const uint8_t *plane, uint8_t *out) {
    uint32_t s;
    memcpy(&s, items, 4);
    if (form == FP8) {
        uint16_t p;
        memcpy(&p, plane, 2);
        uint32_t x = (p | (uint32_t)p << 8) & 0x00FF00FF;
        x = (x | x << 4) & 0x0F0F0F0F;
        x = (x & 0x07070707) | (x & 0x08080808) << 4 | (__builtin_bswap32(s) & 0x78787878);
        memcpy(out, &x, 4);
        return 4 + ((s & 0x07070707) * 0x01010101 >> 24);
    }
    uint32_t p;
    memcpy(&p, plane, 4);
    s |= s >> 4;
    const uint32_t second = s & 255, first = s >> 16 & 255; /* of two symbols each */
    uint64_t x = spread(p);
    x = (x & 0x007F007F007F007Full) | (x & 0x0080008000800080ull) << 8;
    x |= (uint64_t)tables->pair[second] << 32 | tables->pair[first];
    memcpy(out, &x, 8);
    return tables->pair_length[first] + (uint32_t)tables->pair_length[second];
}

/* Put items of eight lanes, rows `from` up to `rows` of those decoded, to their places in the tile, which begin at
 * weight `at`, and add up the code lengths in `position`. */
INLINE void place(const int form, const Tables *tables, const uint8_t *items, const Tile *tile, int at, int from,
                  int rows, uint32_t *position) {
    for (int lane = 0; lane < 8; lane++) {
        const uint8_t *quad = items + STRIDE * lane + 4 * (rows - from) + 4;
        const int begin = at + ROW * from + 4 * lane, left = tile->size - (begin + ROW * (rows - 1 - from));
        const uint8_t *plane = tile->plane + form * begin / 2;
        uint8_t *out = tile->out + form * begin;
        uint32_t bits = 0;
#pragma GCC unroll 4
        for (int q = rows - from - (left < 4); q > 0; q--, quad -= 4, plane += form * ROW / 2, out += form * ROW)
            bits += join(form, tables, quad, plane, out);
        if (left < 4 && from < rows) { /* the last quad is not whole, or not in the tile */
            const size_t bytes = left > 0 ? (size_t)(form * left) : 0;
            uint8_t plane_part[4] = {0}, out_part[8];
            if (bytes) memcpy(plane_part, plane, (bytes + 1) / 2);
            bits += join(form, tables, quad, plane_part, out_part);
            if (bytes) memcpy(out, out_part, bytes);
        }
        position[lane] += bits;
    }
}

#ifdef HAVE_AVX512
/* The symbols of 32 weights, and their other bits, to weights. BF16: bytes 8 to 15 and 16 to 23 of `s` have changed
 * places. `low` and `high` give what a symbol adds to a weight's bytes. */
AVX2 INLINE void join_avx2(const int form, __m256i s, __m256i low, __m256i high, const uint8_t *plane, uint8_t *out) {
    const __m256i sign = _mm256_set1_epi8((char)0x80);
    if (form == FP8) {
        __m256i p = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)plane));
        p = _mm256_or_si256(p, _mm256_slli_epi16(p, 4));
        __m256i x = _mm256_and_si256(p, _mm256_set1_epi8(7));
        p = _mm256_and_si256(_mm256_slli_epi16(p, 4), sign);
        x = _mm256_or_si256(_mm256_or_si256(p, x), _mm256_and_si256(s, _mm256_set1_epi8(0x78)));
        _mm256_storeu_si256((__m256i *)out, x);
        return;
    }
    __m256i p = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)plane), 0xD8);
    __m256i a = _mm256_or_si256(_mm256_andnot_si256(sign, p), _mm256_shuffle_epi8(low, s));
    __m256i b = _mm256_or_si256(_mm256_and_si256(sign, p), _mm256_shuffle_epi8(high, s));
    _mm256_storeu_si256((__m256i *)out, _mm256_unpacklo_epi8(a, b));
    _mm256_storeu_si256((__m256i *)(out + 32), _mm256_unpackhi_epi8(a, b));
}

/* `place` for four rows at a time, as long as they are whole. Returns the rows placed. */
AVX2 INLINE int place_avx2(const int form, const Tables *tables, const uint8_t *items, const Tile *tile, int at,
                           int rows, uint32_t *position) {
    static const uint8_t FIRST[2][4] = {{0, 1, 2, 3}, {0, 1, 4, 5}}, SECOND[2][4] = {{4, 5, 6, 7}, {2, 3, 6, 7}};
    const uint8_t *first = FIRST[form == BF16], *second = SECOND[form == BF16];
    const __m256i lengths = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)tables->length));
    const __m256i e = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)tables->exponent));
    const __m256i low = _mm256_and_si256(_mm256_slli_epi16(e, 7), _mm256_set1_epi8((char)0x80));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(e, 1), _mm256_set1_epi8(0x7F));
    const __m256i reverse = _mm256_broadcastsi128_si256(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    int q = 0;
    for (; q + 4 <= rows && at + ROW * (q + 3) + 32 <= tile->size; q += 4) {
        __m256i s[4], t[4];
        for (int k = 0; k < 4; k++) {
            __m128i a = _mm_loadu_si128((const __m128i *)(items + STRIDE * first[k] + 4 * (rows - q) - 8));
            __m128i b = _mm_loadu_si128((const __m128i *)(items + STRIDE * second[k] + 4 * (rows - q) - 8));
            s[k] = _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1), reverse);
            __m256i l = form == FP8 ? _mm256_and_si256(s[k], _mm256_set1_epi8(7)) : _mm256_shuffle_epi8(lengths, s[k]);
            sums[k] = _mm256_add_epi64(sums[k], _mm256_sad_epu8(l, _mm256_setzero_si256()));
        }
        for (int k = 0; k < 2; k++) {
            t[k] = _mm256_unpacklo_epi32(s[2 * k], s[2 * k + 1]);
            t[k + 2] = _mm256_unpackhi_epi32(s[2 * k], s[2 * k + 1]);
        }
        for (int k = 0; k < 4; k++) {
            const __m256i *u = t + (k & 2);
            int i = at + ROW * (q + k);
            join_avx2(form, k & 1 ? _mm256_unpackhi_epi64(u[0], u[1]) : _mm256_unpacklo_epi64(u[0], u[1]), low, high,
                      tile->plane + form * i / 2, tile->out + form * i);
        }
    }
    for (int k = 0; k < 4; k++) {
        uint64_t sum[4];
        _mm256_storeu_si256((__m256i *)sum, sums[k]);
        const uint32_t ones = form == FP8 ? 4 * (uint32_t)q : 0; /* FP8's items have lengths less one */
        position[first[k]] += (uint32_t)(sum[0] + sum[1]) + ones;
        position[second[k]] += (uint32_t)(sum[2] + sum[3]) + ones;
    }
    return q;
}

AVX2 static void four_avx2(int form, const uint64_t *windows, const uint8_t *end, const uint32_t *position, int count,
                           uint8_t *to, const Next *next) {
    uint32_t shift = 64 - WINDOW_BITS;
    __asm__("" : "+r"(shift)); /* in a register, so that one operation copies and shifts */
    if (form == BF16)
        four_lanes(BF16, windows, end, position, count, to, next, shift);
    else
        four_lanes(FP8, windows, end, position, count, to, next, shift);
}

AVX2 static int place_form_avx2(int form, const Tables *tables, const uint8_t *items, const Tile *tile, int at,
                                int rows, uint32_t *position) {
    if (form == BF16) return place_avx2(BF16, tables, items, tile, at, rows, position);
    return place_avx2(FP8, tables, items, tile, at, rows, position);
}
#endif

/* Write `words` words, the first one last, before `end`. Up to seven more may be read and written. */
INLINE void reverse_words(const uint32_t *words, int count, uint32_t *end) {
    for (int i = 0; i < count; i += 8)
        for (int k = 0; k < 8; k++) end[-1 - i - k] = words[i + k];
}

#ifdef HAVE_AVX512
AVX2 static void reverse_words_avx2(const uint32_t *words, int count, uint32_t *end) {
    const __m256i order = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    for (int i = 0; i < count; i += 8)
        _mm256_storeu_si256((__m256i *)(end - i - 8),
                            _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)(words + i)), order));
}
#endif

/* Decode the rows of a tile from `first` on. A lane that is too long for its symbols is left, and its position with it,
 * which is then not where the lane ends. */
void moepack_exponent_lanes(int form, const Tables *tables, Tile *tile, int first) {
    const int rows = (tile->size + ROW - 1) / ROW - first, words = (int)(((int64_t)tile->end[LANES - 1] + 31) / 32);
    Scratch s;
    for (int lane = 0; lane < LANES; lane++)
        if (tile->end[lane] - (lane ? tile->end[lane - 1] : 0) > MOST_BITS) return;
    uint32_t *end = s.words + PAST + WORDS;
#ifdef HAVE_AVX512
    if (moepack_exponent_loops > 0)
        reverse_words_avx2(tile->payload, words, end);
    else
#endif
        reverse_words(tile->payload, words, end);
    memset(end - words - PAST, 0, 4 * PAST);
    for (int lane = 0; lane < LANES; lane += 8) {
        uint32_t *position = tile->position + lane;
        for (int i = words * lane / LANES; i < words * (lane + 8) / LANES; i += 16) /* what the next tile begins with */
            __builtin_prefetch(tile->payload + words + i);
        int at = ROW * first + 4 * lane, placed = 0, after = lane + 8 < LANES ? at + 32 : TILE;
        for (int k = 0; k < 8; k += 4) {
            int i = after + ROW * rows / 2 * (k > 0);
            const Next next = {tile->out + form * i, tile->plane + form * i / 2};
            uint8_t *to = s.items + BEFORE + STRIDE * k;
#ifdef HAVE_AVX512
            if (moepack_exponent_loops > 0)
                four_avx2(form, tables->windows, (uint8_t *)end, position + k, 4 * rows, to, &next);
            else
#endif
                four_lanes(form, tables->windows, (uint8_t *)end, position + k, 4 * rows, to, &next, 64 - WINDOW_BITS);
        }
#ifdef HAVE_AVX512
        if (moepack_exponent_loops > 0)
            placed = place_form_avx2(form, tables, s.items + BEFORE, tile, at, rows, position);
#endif
        if (form == BF16)
            place(BF16, tables, s.items + BEFORE, tile, at, placed, rows, position);
        else
            place(FP8, tables, s.items + BEFORE, tile, at, placed, rows, position);
    }
}
