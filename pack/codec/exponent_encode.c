/* Encodes exponents: the same bytes as exponent.py, compiled. FORMAT.md, "Coded matrices".
 *
 * Each loop has two forms, plain C and AVX-512 with VBMI; exponent_level.c chooses. Nothing is allocated.
 */
#include "exponent.h"

#define SAMPLED 65536 /* from this number of weights on, the code is made from a quarter of them */

/* Add how often each exponent occurs in the blocks of 128 weights that the code is made of (exponent.sample). */
void moepack_exponent_sample(const uint16_t *bits, int64_t n, int64_t *counts) {
    uint32_t part[8][256];
    int64_t whole = n / ROW, groups = n < SAMPLED ? whole : whole / 4;
    memset(part, 0, sizeof part);
    for (int64_t g = 0; g < groups; g++) {
        int64_t block = n < SAMPLED ? g : 4 * g + ((uint32_t)g * 2654435761u >> 30);
        const uint16_t *from = bits + block * ROW;
        for (int i = 0; i < ROW; i += 8) {
            uint64_t a, b;
            memcpy(&a, from + i, 8);
            memcpy(&b, from + i + 4, 8);
            part[0][a >> 7 & 255]++, part[1][a >> 23 & 255]++, part[2][a >> 39 & 255]++, part[3][a >> 55 & 255]++;
            part[4][b >> 7 & 255]++, part[5][b >> 23 & 255]++, part[6][b >> 39 & 255]++, part[7][b >> 55 & 255]++;
        }
    }
    if (n < SAMPLED)
        for (int64_t i = whole * ROW; i < n; i++) part[0][bits[i] >> 7 & 255]++;
    for (int k = 0; k < 8; k++)
        for (int e = 0; e < 256; e++) counts[e] += part[k][e];
}

/* Code words, lengths and lane lengths of one row of 128 weights; patches go to *patch. */
static uint32_t *row_plain(const uint16_t *bits, int size, int at, const uint16_t *entry, uint16_t fill, uint32_t *code,
                           uint8_t *length, uint32_t *lane_bits, uint8_t *plane, uint32_t *patch) {
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t c = 0, l = 0;
        for (int k = 0; k < 4; k++) {
            int i = 4 * lane + k;
            uint16_t e = fill;
            if (i < size) {
                e = entry[bits[i] >> 7 & 255];
                plane[i] = (uint8_t)((bits[i] >> 8 & 0x80) | (bits[i] & 0x7F));
                if (e >> 12) *patch++ = (uint32_t)(at + i) | (uint32_t)(bits[i] >> 7 & 255) << 16;
            }
            c = c << (e & 15) | (e >> 4 & 255);
            l += e & 15;
        }
        code[lane] = c, length[lane] = (uint8_t)l;
        lane_bits[lane] += l;
    }
    return patch;
}

#ifdef HAVE_AVX512
static const uint8_t EVEN[64] = {
    0,  2,  4,  6,  8,  10, 12, 14,  16,  18,  20,  22,  24,  26,  28,  30,  32,  34,  36,  38,  40, 42,
    44, 46, 48, 50, 52, 54, 56, 58,  60,  62,  64,  66,  68,  70,  72,  74,  76,  78,  80,  82,  84, 86,
    88, 90, 92, 94, 96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};

AVX512 static uint32_t *row_avx512(const uint16_t *bits, int at, const Table *codes, const Table *lengths,
                                   uint32_t *code, uint8_t *length, uint32_t *lane_bits, uint8_t *plane,
                                   uint32_t *patch) {
    const __m512i even = _mm512_loadu_si512(EVEN), odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    const __m512i sign = _mm512_set1_epi8((char)0x80), byte = _mm512_set1_epi16(0xFF), half = _mm512_set1_epi32(0xFFFF);
    for (int h = 0; h < 2; h++) {
        __m512i a = _mm512_loadu_si512(bits + 64 * h), b = _mm512_loadu_si512(bits + 64 * h + 32);
        __m512i low = _mm512_permutex2var_epi8(a, even, b), high = _mm512_permutex2var_epi8(a, odd, b);
        _mm512_storeu_si512(plane + 64 * h, _mm512_ternarylogic_epi64(sign, high, low, 0xCA));
        /* exponent: the low seven bits of `high`, then bit 7 of `low` */
        __m512i e = _mm512_ternarylogic_epi64(_mm512_set1_epi8(1), _mm512_srli_epi16(low, 7), _mm512_slli_epi16(high, 1),
                                              0xCA);
        __m512i c = look_up(codes, e), l = look_up(lengths, e);
        uint64_t escaped = _mm512_movepi8_mask(l); /* bit 7 of a length marks the escape */
        if (escaped) {
            l = _mm512_andnot_si512(sign, l);
            do {
                int i = 64 * h + __builtin_ctzll(escaped);
                *patch++ = (uint32_t)(at + i) | (uint32_t)(bits[i] >> 7 & 255) << 16;
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

AVX512 static uint32_t *rows_avx512(const uint16_t *bits, int rows, const uint8_t *code_of, const uint8_t *length_of,
                                    Quads *q, uint32_t *lane_bits, uint8_t *plane, uint32_t *patch) {
    Table codes = load_table(code_of), lengths = load_table(length_of);
    for (int r = 0; r < rows; r++)
        patch = row_avx512(bits + ROW * r, ROW * r, &codes, &lengths, q->code + LANES * r, q->length + LANES * r,
                           lane_bits, plane + ROW * r, patch);
    return patch;
}
#endif

/* The lanes' bits, lane after lane, as words. */
static inline __attribute__((always_inline)) void append(const Quads *quads, int rows, uint32_t *out) {
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

/* Encode whole tiles and the partial last one. entry[exponent] is escape << 12 | code word << 4 | length; `fill` is the
 * entry that fills up a partial tile. tile_end and patch_end are counted from the beginning of stream and patches. */
void moepack_exponent_encode(const uint16_t *bits, int64_t n, const uint16_t *entry, uint16_t fill, uint32_t *stream,
                             uint32_t *tile_end, uint32_t *patch_end, uint32_t *patches, uint8_t *plane) {
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
        const uint16_t *b = bits + begin;
        uint32_t lane_bits[LANES] = {0}, *first_patch = patch;
#ifdef HAVE_AVX512
        if (moepack_exponent_loops > 0)
            patch = rows_avx512(b, r = size / ROW, code_of, length_of, &quads, lane_bits, plane + begin, patch);
#endif
        for (; r < rows; r++)
            patch = row_plain(b + ROW * r, size - ROW * r < ROW ? size - ROW * r : ROW, ROW * r, entry, fill,
                              quads.code + LANES * r, quads.length + LANES * r, lane_bits, plane + begin + ROW * r, patch);
        uint32_t base = lane_bits[0], most = base, total = 0;
        for (int lane = 0; lane < LANES; lane++) {
            total += lane_bits[lane];
            if (lane_bits[lane] < base) base = lane_bits[lane];
            if (lane_bits[lane] > most) most = lane_bits[lane];
        }
        int64_t coded = LANE_WORDS + (total + 31) / 32, raw = 1 + (size + 3) / 4;
        if (most - base > 255 || coded + (patch - first_patch) >= raw) {
            patch = first_patch;
            uint8_t *to = (uint8_t *)(out + 1);
            out[0] = (uint32_t)RAW << 16;
            out[raw - 1] = 0;
            for (int i = 0; i < size; i++) to[i] = (uint8_t)(b[i] >> 7);
            out += raw;
        } else {
            uint8_t *delta = (uint8_t *)(out + 1);
            out[0] = base;
            for (int lane = 0; lane < LANES; lane++) delta[lane] = (uint8_t)(lane_bits[lane] - base);
#ifdef HAVE_AVX512
            if (moepack_exponent_loops > 0)
                append_avx512(&quads, rows, out + LANE_WORDS);
            else
#endif
                append(&quads, rows, out + LANE_WORDS);
            out += coded;
        }
        tile_end[t] = (uint32_t)(out - stream);
        patch_end[t] = (uint32_t)(patch - patches);
    }
}
