/* Encodes exponents: the same bytes as exponent.py, compiled. FORMAT.md, "Coded matrices" and "Coded FP8 codes".
 *
 * Each loop is there in plain C, with AVX2, and with AVX-512 and VBMI; exponent_level.c chooses. Nothing is allocated.
 */
#include "exponent.h"

#define SAMPLED 65536 /* from this number of weights on, the code is made from a quarter of them */
#define AHEAD 16      /* blocks: those that are fetched while others are counted */

INLINE uint32_t exponent_at(const int form, const uint8_t *bits, int64_t i) {
    uint16_t b;
    if (form == FP8) return bits[i] >> 3 & 15;
    memcpy(&b, bits + 2 * i, 2);
    return b >> 7 & 255;
}

/* The block of 128 weights that is counted as number g (exponent.sample). */
static inline int64_t sampled(int64_t g, int64_t n) {
    return n < SAMPLED ? g : 4 * g + ((uint32_t)g * 2654435761u >> 30);
}

/* Add how often each exponent occurs in the blocks of 128 weights that the code is made of (exponent.sample). */
INLINE void count(const int form, const uint8_t *bits, int64_t n, int64_t *counts) {
    uint32_t part[8][256];
    int64_t whole = n / ROW, groups = n < SAMPLED ? whole : whole / 4;
    memset(part, 0, sizeof part);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *from = bits + form * ROW * sampled(g, n);
        for (int i = 0; i < form * ROW && g + AHEAD < groups; i += 64) /* the processor does not see where they are */
            __builtin_prefetch(bits + form * ROW * sampled(g + AHEAD, n) + i);
        for (int i = 0; i < form * ROW; i += 16) {
            uint64_t a, b;
            memcpy(&a, from + i, 8);
            memcpy(&b, from + i + 8, 8);
            if (form == FP8) {
                for (int k = 0; k < 8; k++) part[k][a >> (8 * k + 3) & 15]++, part[k][b >> (8 * k + 3) & 15]++;
            } else {
                for (int k = 0; k < 4; k++) part[k][a >> (16 * k + 7) & 255]++, part[k + 4][b >> (16 * k + 7) & 255]++;
            }
        }
    }
    if (n < SAMPLED)
        for (int64_t i = whole * ROW; i < n; i++) part[0][exponent_at(form, bits, i)]++;
    for (int k = 0; k < 8; k++)
        for (int e = 0; e < 256; e++) counts[e] += part[k][e];
}

void moepack_exponent_sample(const uint8_t *bits, int64_t form, int64_t n, int64_t *counts) {
    if (form == BF16)
        count(BF16, bits, n, counts);
    else
        count(FP8, bits, n, counts);
}

/* Code words, lengths and lane lengths of one row of 128 weights; patches go to *patch. */
INLINE uint32_t *row_of(const int form, const uint8_t *bits, int size, int at, const uint16_t *entry, uint16_t fill,
                        uint32_t *code, uint8_t *length, uint32_t *lane_bits, uint8_t *plane, uint32_t *patch) {
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t c = 0, l = 0;
        for (int k = 0; k < 4; k++) {
            int i = 4 * lane + k;
            uint16_t e = fill;
            if (i < size) {
                uint32_t exponent = exponent_at(form, bits, i);
                e = entry[exponent];
                if (form == FP8 && !(i & 1))
                    plane[i / 2] = (uint8_t)((bits[i] >> 4 & 8) | (bits[i] & 7));
                else if (form == FP8)
                    plane[i / 2] = (uint8_t)(plane[i / 2] | (bits[i] & 0x80) | (bits[i] & 7) << 4);
                else
                    plane[i] = (uint8_t)((bits[2 * i + 1] & 0x80) | (bits[2 * i] & 0x7F));
                if (e >> 12) *patch++ = (uint32_t)(at + i) | exponent << 16;
            }
            c = c << (e & 15) | (e >> 4 & 255);
            l += e & 15;
        }
        code[lane] = c, length[lane] = (uint8_t)l;
        lane_bits[lane] += l;
    }
    return patch;
}

static uint32_t *row_plain(int form, const uint8_t *bits, int size, int at, const uint16_t *entry, uint16_t fill,
                           uint32_t *code, uint8_t *length, uint32_t *lane_bits, uint8_t *plane, uint32_t *patch) {
    if (form == BF16) return row_of(BF16, bits, size, at, entry, fill, code, length, lane_bits, plane, patch);
    if (size == ROW) return row_of(FP8, bits, ROW, at, entry, fill, code, length, lane_bits, plane, patch);
    return row_of(FP8, bits, size, at, entry, fill, code, length, lane_bits, plane, patch);
}

#ifdef HAVE_AVX512
static const uint8_t EVEN[64] = {
    0,  2,  4,  6,  8,  10, 12, 14,  16,  18,  20,  22,  24,  26,  28,  30,  32,  34,  36,  38,  40, 42,
    44, 46, 48, 50, 52, 54, 56, 58,  60,  62,  64,  66,  68,  70,  72,  74,  76,  78,  80,  82,  84, 86,
    88, 90, 92, 94, 96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};

/* The exponents of 64 weights; their other bits go to `plane`. */
AVX512 INLINE __m512i split_avx512(const int form, const uint8_t *bits, uint8_t *plane) {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    __m512i a = _mm512_loadu_si512(bits);
    if (form == FP8) {
        __m512i s = _mm512_srli_epi16(_mm512_and_si512(a, sign), 4);
        __m512i p = _mm512_ternarylogic_epi64(_mm512_set1_epi8(7), a, s, 0xCA);
        p = _mm512_maddubs_epi16(p, _mm512_set1_epi16(0x1001)); /* the second nibble above the first */
        _mm256_storeu_si256((__m256i *)plane, _mm512_cvtepi16_epi8(p));
        return _mm512_and_si512(_mm512_srli_epi16(a, 3), _mm512_set1_epi8(15));
    }
    const __m512i even = _mm512_loadu_si512(EVEN), odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    __m512i b = _mm512_loadu_si512(bits + 64);
    __m512i low = _mm512_permutex2var_epi8(a, even, b), high = _mm512_permutex2var_epi8(a, odd, b);
    _mm512_storeu_si512(plane, _mm512_ternarylogic_epi64(sign, high, low, 0xCA));
    /* exponent: the low seven bits of `high`, then bit 7 of `low` */
    return _mm512_ternarylogic_epi64(_mm512_set1_epi8(1), _mm512_srli_epi16(low, 7), _mm512_slli_epi16(high, 1), 0xCA);
}

AVX512 INLINE uint32_t *row_avx512(const int form, const uint8_t *bits, int at, const Table *codes,
                                   const Table *lengths, uint32_t *code, uint8_t *length, uint32_t *lane_bits,
                                   uint8_t *plane, uint32_t *patch) {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i byte = _mm512_set1_epi16(0xFF), half = _mm512_set1_epi32(0xFFFF);
    for (int h = 0; h < 2; h++) {
        __m512i e = split_avx512(form, bits + form * 64 * h, plane + form * 32 * h);
        __m512i c = look_up(codes, e), l = look_up(lengths, e);
        uint64_t escaped = _mm512_movepi8_mask(l); /* bit 7 of a length marks the escape */
        if (form == BF16 && escaped) {
            l = _mm512_andnot_si512(sign, l);
            do {
                int i = 64 * h + __builtin_ctzll(escaped);
                *patch++ = (uint32_t)(at + i) | exponent_at(form, bits, i) << 16;
            } while (escaped &= escaped - 1);
        }
        __m512i l1 = _mm512_srli_epi16(l, 8), l2 = _mm512_add_epi16(_mm512_and_si512(l, byte), l1);
        __m512i c2 = _mm512_or_si512(_mm512_sllv_epi16(_mm512_and_si512(c, byte), l1), _mm512_srli_epi16(c, 8));
        __m512i l3 = _mm512_srli_epi32(l2, 16), l4 = _mm512_add_epi32(_mm512_and_si512(l2, half), l3);
        __m512i c4 = _mm512_or_si512(_mm512_sllv_epi32(_mm512_and_si512(c2, half), l3), _mm512_srli_epi32(c2, 16));
        _mm512_storeu_si512(code + 16 * h, c4);
        _mm_storeu_si128((__m128i *)(length + 16 * h), _mm512_cvtepi32_epi8(l4));
        _mm512_storeu_si512(lane_bits + 16 * h, _mm512_add_epi32(_mm512_loadu_si512(lane_bits + 16 * h), l4));
    }
    return patch;
}

AVX512 INLINE uint32_t *all_rows(const int form, const uint8_t *bits, int rows, const uint8_t *code_of,
                                 const uint8_t *length_of, Quads *q, uint32_t *lane_bits, uint8_t *plane,
                                 uint32_t *patch) {
    Table codes = load_table(code_of), lengths = load_table(length_of);
    for (int r = 0; r < rows; r++)
        patch = row_avx512(form, bits + form * ROW * r, ROW * r, &codes, &lengths, q->code + LANES * r,
                           q->length + LANES * r, lane_bits, plane + form * ROW / 2 * r, patch);
    return patch;
}

AVX512 static uint32_t *rows_avx512(int form, const uint8_t *bits, int rows, const uint8_t *code_of,
                                    const uint8_t *length_of, Quads *q, uint32_t *lane_bits, uint8_t *plane,
                                    uint32_t *patch) {
    if (form == BF16) return all_rows(BF16, bits, rows, code_of, length_of, q, lane_bits, plane, patch);
    return all_rows(FP8, bits, rows, code_of, length_of, q, lane_bits, plane, patch);
}
#endif

#ifdef HAVE_AVX512
/* The code by 16 exponents at a time, where it has any of them. Codes stand at their bytes' top. Both are the difference
 * (XOR) to the escape, which is of all other exponents; bit 7 of its length marks it. */
typedef struct {
    int count;
    uint8_t first[16], code[16][16], length[16][16], no_code, no_length;
} Pages;

static void make_pages(const uint8_t *code_of, const uint8_t *length_of, Pages *pages) {
    memset(pages, 0, sizeof *pages);
    for (int e = 0; e < 256; e++)
        if (length_of[e] & 0x80) pages->no_length = length_of[e], pages->no_code = code_of[e];
    int escape = pages->no_length & 15;
    pages->no_code = (uint8_t)(pages->no_code << (8 - escape));
    for (int e = 0; e < 256; e += 16) {
        int p = pages->count, used = 0;
        for (int i = 0; i < 16; i++) {
            uint8_t length = length_of[e + i];
            used |= length ^ pages->no_length;
            pages->length[p][i] = length ^ pages->no_length;
            pages->code[p][i] = (uint8_t)(code_of[e + i] << (8 - (length & 15))) ^ pages->no_code;
        }
        pages->first[p] = (uint8_t)e;
        pages->count += used != 0;
    }
}

/* The exponents of 32 weights; their other bits go to `plane`. */
AVX2 INLINE __m256i split_avx2(const int form, const uint8_t *bits, uint8_t *plane) {
    const __m256i sign = _mm256_set1_epi8((char)0x80), byte = _mm256_set1_epi16(0xFF);
    __m256i a = _mm256_loadu_si256((const __m256i *)bits);
    if (form == FP8) {
        __m256i s = _mm256_srli_epi16(_mm256_and_si256(a, sign), 4);
        __m256i p = _mm256_or_si256(s, _mm256_and_si256(a, _mm256_set1_epi8(7)));
        p = _mm256_maddubs_epi16(p, _mm256_set1_epi16(0x1001)); /* the second nibble above the first */
        p = _mm256_permute4x64_epi64(_mm256_packus_epi16(p, p), 0x08);
        _mm_storeu_si128((__m128i *)plane, _mm256_castsi256_si128(p));
        return _mm256_and_si256(_mm256_srli_epi16(a, 3), _mm256_set1_epi8(15));
    }
    __m256i b = _mm256_loadu_si256((const __m256i *)(bits + 32));
    __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
    __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    low = _mm256_permute4x64_epi64(low, 0xD8), high = _mm256_permute4x64_epi64(high, 0xD8);
    __m256i p = _mm256_or_si256(_mm256_and_si256(sign, high), _mm256_andnot_si256(sign, low));
    _mm256_storeu_si256((__m256i *)plane, p);
    /* exponent: the low seven bits of `high`, then bit 7 of `low` */
    __m256i last = _mm256_and_si256(_mm256_srli_epi16(low, 7), _mm256_set1_epi8(1));
    return _mm256_or_si256(_mm256_add_epi8(high, high), last);
}

/* Code words of 32 weights, four of a quad appended to one another, go to `code`; returns the quads' lengths. */
AVX2 INLINE __m256i quads_avx2(__m256i c, __m256i l, uint32_t *code) {
    const __m256i power = _mm256_setr_epi8(0, -128, 64, 32, 16, 8, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0, /* 2^(8 - length) */
                                           0, -128, 64, 32, 16, 8, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0);
    const __m256i second = _mm256_set1_epi16((short)0xFF00), third = _mm256_set1_epi32((int)0xFFFF0000);
    __m256i p = _mm256_slli_epi16(_mm256_shuffle_epi8(power, l), 8);
    __m256i c2 = _mm256_mulhi_epu16(_mm256_and_si256(c, second), p); /* shifted down by the first one's length */
    c2 = _mm256_or_si256(_mm256_slli_epi16(c, 8), c2);
    __m256i l2 = _mm256_maddubs_epi16(l, _mm256_set1_epi8(1));
    __m256i c4 = _mm256_srlv_epi32(_mm256_and_si256(c2, third), _mm256_andnot_si256(third, l2));
    c4 = _mm256_or_si256(_mm256_slli_epi32(c2, 16), c4);
    __m256i l4 = _mm256_madd_epi16(l2, _mm256_set1_epi16(1));
    _mm256_storeu_si256((__m256i *)code, _mm256_srlv_epi32(c4, _mm256_sub_epi32(_mm256_set1_epi32(32), l4)));
    return l4;
}

AVX2 INLINE uint32_t *all_rows_avx2(const int form, const uint8_t *bits, int rows, const Pages *pages, Quads *q,
                                    uint32_t *lane_bits, uint8_t *plane, uint32_t *patch) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm256_set1_epi8((char)0x80);
    __m256i total[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int r = 0; r < rows; r++) {
        __m256i l4[4];
        for (int h = 0; h < 4; h++) {
            int at = ROW * r + 32 * h;
            __m256i e = split_avx2(form, bits + form * at, plane + form * at / 2);
            __m256i c = _mm256_set1_epi8((char)pages->no_code), l = _mm256_set1_epi8((char)pages->no_length);
            for (int p = 0; p < pages->count; p++) {
                __m256i i = _mm256_sub_epi8(e, _mm256_set1_epi8((char)pages->first[p]));
                i = _mm256_adds_epu8(i, _mm256_set1_epi8(0x70)); /* bit 7 of an exponent that is not on the page */
                __m128i codes = _mm_loadu_si128((const __m128i *)pages->code[p]);
                __m128i lengths = _mm_loadu_si128((const __m128i *)pages->length[p]);
                c = _mm256_xor_si256(c, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), i));
                l = _mm256_xor_si256(l, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(lengths), i));
            }
            uint32_t escaped = (uint32_t)_mm256_movemask_epi8(l);
            if (form == BF16 && escaped) {
                l = _mm256_andnot_si256(sign, l);
                do {
                    int i = at + __builtin_ctz(escaped);
                    *patch++ = (uint32_t)i | exponent_at(form, bits, i) << 16;
                } while (escaped &= escaped - 1);
            }
            l4[h] = quads_avx2(c, l, q->code + LANES * r + 8 * h);
            total[h] = _mm256_add_epi32(total[h], l4[h]);
        }
        __m256i l = _mm256_packus_epi16(_mm256_packs_epi32(l4[0], l4[1]), _mm256_packs_epi32(l4[2], l4[3]));
        _mm256_storeu_si256((__m256i *)(q->length + LANES * r), _mm256_permutevar8x32_epi32(l, order));
    }
    for (int h = 0; h < 4; h++) _mm256_storeu_si256((__m256i *)(lane_bits + 8 * h), total[h]);
    return patch;
}

AVX2 static uint32_t *rows_avx2(int form, const uint8_t *bits, int rows, const Pages *pages, Quads *q,
                                uint32_t *lane_bits, uint8_t *plane, uint32_t *patch) {
    if (form == BF16) return all_rows_avx2(BF16, bits, rows, pages, q, lane_bits, plane, patch);
    return all_rows_avx2(FP8, bits, rows, pages, q, lane_bits, plane, patch);
}
#endif

/* The lanes' bits, lane after lane, as words; two quads at a time. One word past the last may be written. */
INLINE void append(Quads *quads, int rows, uint32_t *out) {
    uint64_t held = 0;
    uint32_t at = 0;
    if (rows & 1) memset(quads->length + LANES * rows, 0, LANES), memset(quads->code + LANES * rows, 0, 4 * LANES);
    for (int lane = 0; lane < LANES; lane++)
        for (const uint32_t *code = quads->code + lane, *end = code + LANES * rows; code < end; code += 2 * LANES) {
            const uint8_t *length = quads->length + (code - quads->code);
            uint32_t second = length[LANES], both = length[0] + second, after = at + both;
            uint64_t c = ((uint64_t)code[0] << second | code[LANES]) << (-both & 63); /* from bit 63 down */
            held |= c >> (at & 63);
            uint64_t words = held << 32 | held >> 32, rest = c << 1 << (~at & 63);
            memcpy(out + (at >> 6) * 2, &words, 8);
            held = (at ^ after) & 64 ? rest : held;
            at = after;
        }
    if (at & 63) out[(at >> 6) * 2] = (uint32_t)(held >> 32);
    if ((at & 63) > 32) out[(at >> 6) * 2 + 1] = (uint32_t)held;
}

#ifdef HAVE_AVX512
AVX2 static void append_avx2(Quads *quads, int rows, uint32_t *out) { /* for BMI2's one-operation shifts */
    append(quads, rows, out);
}
#endif

/* Write a tile's exponents as they are: bytes, or FP8's nibbles. Returns the words written. */
static int64_t raw_tile(int form, const uint8_t *bits, int size, uint32_t *out) {
    int64_t words = 1 + (form * (int64_t)size + 7) / 8;
    uint8_t *to = (uint8_t *)(out + 1);
    memset(out, 0, 4 * (size_t)words);
    out[0] = (uint32_t)RAW << 16;
    for (int i = 0; i < size; i++) {
        if (form == BF16)
            to[i] = (uint8_t)exponent_at(BF16, bits, i);
        else
            to[i / 2] |= (uint8_t)(exponent_at(FP8, bits, i) << 4 * (i & 1));
    }
    return words;
}

/* Write the first words of a coded tile: its mode and the lengths of its lanes. */
static void lane_lengths(const uint32_t *lane_bits, uint32_t base, int wide, uint32_t *out) {
    uint8_t *delta = (uint8_t *)(out + 1);
    if (wide) memset(out, 0, 4 * WIDE_WORDS);
    out[0] = wide ? (uint32_t)WIDE << 16 : base;
    for (int lane = 0; lane < LANES; lane++) {
        if (wide)
            out[1 + lane / 2] |= lane_bits[lane] << 16 * (lane & 1);
        else
            delta[lane] = (uint8_t)(lane_bits[lane] - base);
    }
}

/* Encode whole tiles and the partial last one. entry[exponent] is escape << 12 | code word << 4 | length; `fill` is the
 * entry that fills up a partial tile. tile_end and patch_end are counted from the beginning of stream and patches. */
void moepack_exponent_encode(const uint8_t *bits, int64_t bytes, int64_t n, const uint16_t *entry, uint16_t fill,
                             uint32_t *stream, uint32_t *tile_end, uint32_t *patch_end, uint32_t *patches,
                             uint8_t *plane) {
    const int form = (int)bytes;
    uint32_t *out = stream, *patch = patches;
    Quads quads;
#ifdef HAVE_AVX512
    uint8_t code_of[256], length_of[256];
    for (int e = 0; e < 256; e++) {
        code_of[e] = (uint8_t)(entry[e] >> 4 & 255);
        length_of[e] = (uint8_t)((entry[e] & 15) | (entry[e] >> 12 ? 0x80 : 0));
    }
    Pages pages;
    make_pages(code_of, length_of, &pages);
#endif
    for (int64_t begin = 0, t = 0; begin < n; begin += TILE, t++) {
        int size = n - begin < TILE ? (int)(n - begin) : TILE, rows = (size + ROW - 1) / ROW, r = 0;
        const uint8_t *b = bits + form * begin;
        uint8_t *p = plane + form * begin / 2;
        uint32_t lane_bits[LANES] = {0}, *first_patch = patch;
#ifdef HAVE_AVX512
        if (moepack_exponent_loops > 1)
            patch = rows_avx512(form, b, r = size / ROW, code_of, length_of, &quads, lane_bits, p, patch);
        else if (moepack_exponent_loops > 0)
            patch = rows_avx2(form, b, r = size / ROW, &pages, &quads, lane_bits, p, patch);
#endif
        for (; r < rows; r++)
            patch = row_plain(form, b + form * ROW * r, size - ROW * r < ROW ? size - ROW * r : ROW, ROW * r, entry,
                              fill, quads.code + LANES * r, quads.length + LANES * r, lane_bits,
                              p + form * ROW / 2 * r, patch);
        uint32_t base = lane_bits[0], most = base, total = 0;
        for (int lane = 0; lane < LANES; lane++) {
            total += lane_bits[lane];
            if (lane_bits[lane] < base) base = lane_bits[lane];
            if (lane_bits[lane] > most) most = lane_bits[lane];
        }
        int far = most - base > 255, head = far && form == FP8 ? WIDE_WORDS : LANE_WORDS;
        int64_t coded = head + (total + 31) / 32, raw = 1 + (form * (int64_t)size + 7) / 8;
        if ((far && form == BF16) || coded + (patch - first_patch) >= raw) {
            patch = first_patch;
            out += raw_tile(form, b, size, out);
        } else {
            lane_lengths(lane_bits, base, head == WIDE_WORDS, out);
#ifdef HAVE_AVX512
            if (moepack_exponent_loops > 0)
                append_avx2(&quads, rows, out + head);
            else
#endif
                append(&quads, rows, out + head);
            out += coded;
        }
        tile_end[t] = (uint32_t)(out - stream);
        patch_end[t] = (uint32_t)(patch - patches);
    }
}
