/* Encodes exponents: the same bytes as exponent.py, compiled. FORMAT.md, "Coded matrices" and "Coded FP8 codes".
 *
 * Each loop is there in plain C and with AVX-512 and VBMI; exponent_level.c chooses. Nothing is allocated.
 */
#include "exponent.h"

#define SAMPLED 65536 /* from this number of weights on, the code is made from a quarter of them */

INLINE uint32_t exponent_at(const int form, const uint8_t *bits, int64_t i) {
    uint16_t b;
    if (form == FP8) return bits[i] >> 3 & 15;
    memcpy(&b, bits + 2 * i, 2);
    return b >> 7 & 255;
}

/* Add how often each exponent occurs in the blocks of 128 weights that the code is made of (exponent.sample). */
INLINE void count(const int form, const uint8_t *bits, int64_t n, int64_t *counts) {
    uint32_t part[8][256];
    int64_t whole = n / ROW, groups = n < SAMPLED ? whole : whole / 4;
    memset(part, 0, sizeof part);
    for (int64_t g = 0; g < groups; g++) {
        int64_t block = n < SAMPLED ? g : 4 * g + ((uint32_t)g * 2654435761u >> 30);
        const uint8_t *from = bits + form * block * ROW;
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

/* The lanes' bits, lane after lane, as words. */
INLINE void append(const Quads *quads, int rows, uint32_t *out) {
    uint64_t acc = 0;
    uint32_t held = 0;
    for (int lane = 0; lane < LANES; lane++)
        for (int q = 0; q < rows; q++) {
            uint32_t l = quads->length[LANES * q + lane];
            acc = acc << l | quads->code[LANES * q + lane];
            held += l;
            *out = (uint32_t)(acc >> ((held - 32) & 63)); /* overwritten until 32 bits are held */
            out += held >> 5;
            held &= 31;
        }
    if (held) *out = (uint32_t)(acc << (32 - held));
}

#ifdef HAVE_AVX512
AVX512 static void append_avx512(const Quads *quads, int rows, uint32_t *out) { /* for AVX-512's one-operation shifts */
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
#endif
    for (int64_t begin = 0, t = 0; begin < n; begin += TILE, t++) {
        int size = n - begin < TILE ? (int)(n - begin) : TILE, rows = (size + ROW - 1) / ROW, r = 0;
        const uint8_t *b = bits + form * begin;
        uint8_t *p = plane + form * begin / 2;
        uint32_t lane_bits[LANES] = {0}, *first_patch = patch;
#ifdef HAVE_AVX512
        if (moepack_exponent_loops > 1)
            patch = rows_avx512(form, b, r = size / ROW, code_of, length_of, &quads, lane_bits, p, patch);
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
            if (moepack_exponent_loops > 1)
                append_avx512(&quads, rows, out + head);
            else
#endif
                append(&quads, rows, out + head);
            out += coded;
        }
        tile_end[t] = (uint32_t)(out - stream);
        patch_end[t] = (uint32_t)(patch - patches);
    }
}
