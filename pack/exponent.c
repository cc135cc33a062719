/* The exponent codec's fast path: the same bytes as exponent.py, compiled. FORMAT.md, "Coded matrices".
 *
 * Plain C with two forms of each loop: one for any machine, and one for AVX-512 with VBMI, chosen when the library is
 * first used (moepack_exponent_level). Callers have checked the header and every offset (exponent.parse); what is
 * checked here is what only decoding shows. Nothing is allocated, nothing global is written after the first call.
 */
#include <stdint.h>
#include <string.h>

#define TILE 8192
#define LANES 32
#define ROW 128 /* weights that all lanes decode in one step: one quad each */
#define QUADS (TILE / ROW)
#define LANE_WORDS 9
#define CODED 0
#define RAW 1

enum { BAD_SIZE = 1, BAD_LANES = 2, BAD_PATCHES = 3, BAD_CODES = 4 };

typedef struct {
    uint32_t code[QUADS * LANES]; /* four code words, appended to one another */
    uint8_t length[QUADS * LANES];
} Quads;

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX512 1
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,bmi2")))
#endif

static int level = -1;

/* 0: plain C; 1: AVX-512. `limit` caps it, for tests and comparisons. */
int moepack_exponent_level(int limit) {
    int best = 0;
#ifdef HAVE_AVX512
    if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        best = 1;
#endif
    level = best < limit ? best : limit;
    return level;
}

static inline uint64_t spread(uint32_t x) { /* bytes b3 b2 b1 b0 to 16-bit fields */
    uint64_t y = x;
    y = (y | y << 16) & 0x0000FFFF0000FFFFull;
    return (y | y << 8) & 0x00FF00FF00FF00FFull;
}

/* ------------------------------------------------------------------ encode */

void moepack_exponent_histogram(const uint16_t *bits, int64_t n, int64_t *counts) {
    uint32_t part[8][256];
    while (n > 0) {
        int64_t chunk = n < (1 << 30) ? n : (1 << 30), i = 0;
        memset(part, 0, sizeof part);
        for (; i + 8 <= chunk; i += 8) {
            uint64_t a, b;
            memcpy(&a, bits + i, 8);
            memcpy(&b, bits + i + 4, 8);
            part[0][a >> 7 & 255]++, part[1][a >> 23 & 255]++, part[2][a >> 39 & 255]++, part[3][a >> 55 & 255]++;
            part[4][b >> 7 & 255]++, part[5][b >> 23 & 255]++, part[6][b >> 39 & 255]++, part[7][b >> 55 & 255]++;
        }
        for (; i < chunk; i++) part[0][bits[i] >> 7 & 255]++;
        for (int k = 0; k < 8; k++)
            for (int e = 0; e < 256; e++) counts[e] += part[k][e];
        bits += chunk, n -= chunk;
    }
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
typedef struct {
    __m512i t[4];
} Table;

AVX512 static inline Table load_table(const uint8_t *bytes) {
    Table t;
    for (int i = 0; i < 4; i++) t.t[i] = _mm512_loadu_si512(bytes + 64 * i);
    return t;
}

/* For every byte i of `index`, entry i of 256. */
AVX512 static inline __m512i look_up(const Table *t, __m512i index) {
    __m512i low = _mm512_permutex2var_epi8(t->t[0], index, t->t[1]);
    __m512i high = _mm512_permutex2var_epi8(t->t[2], index, t->t[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}

static const uint8_t EVEN[64] = {
    0,  2,  4,  6,  8,  10, 12, 14,  16,  18,  20,  22,  24,  26,  28,  30,  32,  34,  36,  38,  40, 42,
    44, 46, 48, 50, 52, 54, 56, 58,  60,  62,  64,  66,  68,  70,  72,  74,  76,  78,  80,  82,  84, 86,
    88, 90, 92, 94, 96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};

AVX512 static uint32_t *row_avx512(const uint16_t *bits, int at, const Table *codes, const Table *lengths,
                                   const uint16_t *entry, uint32_t *code, uint8_t *length, uint32_t *lane_bits,
                                   uint8_t *plane, uint32_t *patch) {
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
    (void)entry;
    return patch;
}

AVX512 static uint32_t *rows_avx512(const uint16_t *bits, int rows, const uint8_t *code_of, const uint8_t *length_of,
                                    const uint16_t *entry, Quads *q, uint32_t *lane_bits, uint8_t *plane,
                                    uint32_t *patch) {
    Table codes = load_table(code_of), lengths = load_table(length_of);
    for (int r = 0; r < rows; r++)
        patch = row_avx512(bits + ROW * r, ROW * r, &codes, &lengths, entry, q->code + LANES * r, q->length + LANES * r,
                           lane_bits, plane + ROW * r, patch);
    return patch;
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
        if (level > 0)
            patch = rows_avx512(b, r = size / ROW, code_of, length_of, entry, &quads, lane_bits, plane + begin, patch);
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
            uint32_t *at = out + LANE_WORDS;
            uint64_t acc = 0;
            uint32_t held = 0;
            for (int lane = 0; lane < LANES; lane++)
                for (int q = 0; q < rows; q++) {
                    uint32_t l = quads.length[LANES * q + lane];
                    acc = acc << l | quads.code[LANES * q + lane];
                    held += l;
                    *at = (uint32_t)(acc >> ((held - 32) & 63)); /* overwritten until 32 bits are held */
                    at += held >> 5;
                    held &= 31;
                }
            if (held) *at = (uint32_t)(acc << (32 - held));
            out += coded;
        }
        tile_end[t] = (uint32_t)(out - stream);
        patch_end[t] = (uint32_t)(patch - patches);
    }
}

/* ------------------------------------------------------------------ decode */

/* Two symbols by a 12-bit window: their exponents in place for two BF16 weights, and the length of both codes in bits
 * 0 to 5. SINGLE marks a first code so long that the second is not known from 12 bits: then it is of the first alone. */
#define PAIR_BITS 12
#define SINGLE 0x8000u
#define EXPONENTS 0x7F807F80u

static void fill_pairs(const uint8_t *length_of, const uint8_t *exponent_of, uint32_t *pair) {
    for (uint32_t w = 0; w < 1u << PAIR_BITS; w++) {
        uint32_t a = w >> (PAIR_BITS - 8), first = length_of[a];
        uint32_t b = (w << first >> (PAIR_BITS - 8)) & 255, second = length_of[b];
        pair[w] = (uint32_t)exponent_of[a] << 7;
        if (first + second <= PAIR_BITS)
            pair[w] |= (uint32_t)exponent_of[b] << 23 | (first + second);
        else
            pair[w] |= SINGLE | first;
    }
}

static inline uint32_t next_pair(const uint32_t *pair, const uint8_t *length_of, const uint8_t *exponent_of,
                                 uint64_t *window, uint32_t *at) {
    uint32_t t = pair[*window >> (64 - PAIR_BITS)];
    *window <<= t & 63;
    *at += t & 63;
    if (__builtin_expect(t & SINGLE, 0)) {
        uint32_t b = (uint32_t)(*window >> 56);
        *window <<= length_of[b];
        *at += length_of[b];
        t |= (uint32_t)exponent_of[b] << 23;
    }
    return t & EXPONENTS;
}

static inline uint64_t load_window(const uint32_t *payload, uint32_t at) {
    const uint32_t *p = payload + (at >> 5);
    return ((uint64_t)p[0] << 32 | p[1]) << (at & 31);
}

static inline void store_quad(uint32_t e01, uint32_t e23, const uint8_t *plane, uint16_t *out) {
    uint32_t p;
    memcpy(&p, plane, 4);
    uint64_t x = spread(p);
    x = (uint64_t)e23 << 32 | e01 | (x & 0x007F007F007F007Full) | (x & 0x0080008000800080ull) << 8;
    memcpy(out, &x, 8);
}

/* `rows` rows of a tile, any machine. Four lanes abreast: their chains of look-ups do not wait for one another.
 * `payload` may be read 66 words past the tile's last. */
static void lanes_plain(const uint32_t *pair, const uint8_t *length_of, const uint8_t *exponent_of,
                        const uint32_t *payload, uint32_t *position, int rows, int size, const uint8_t *plane,
                        uint16_t *out) {
    for (int lane = 0; lane < LANES; lane += 4) {
        uint32_t at0 = position[lane], at1 = position[lane + 1], at2 = position[lane + 2], at3 = position[lane + 3];
        for (int q = 0; q < rows; q++) {
            int i = ROW * q + 4 * lane;
            uint64_t w0 = load_window(payload, at0), w1 = load_window(payload, at1);
            uint64_t w2 = load_window(payload, at2), w3 = load_window(payload, at3);
            uint32_t a0 = next_pair(pair, length_of, exponent_of, &w0, &at0);
            uint32_t a1 = next_pair(pair, length_of, exponent_of, &w1, &at1);
            uint32_t a2 = next_pair(pair, length_of, exponent_of, &w2, &at2);
            uint32_t a3 = next_pair(pair, length_of, exponent_of, &w3, &at3);
            uint32_t b0 = next_pair(pair, length_of, exponent_of, &w0, &at0);
            uint32_t b1 = next_pair(pair, length_of, exponent_of, &w1, &at1);
            uint32_t b2 = next_pair(pair, length_of, exponent_of, &w2, &at2);
            uint32_t b3 = next_pair(pair, length_of, exponent_of, &w3, &at3);
            uint8_t plane_part[16] = {0};
            uint16_t out_part[16];
            int whole = i + 16 <= size;
            const uint8_t *p = plane + i;
            uint16_t *o = out + i;
            if (!whole) {
                if (i < size) memcpy(plane_part, p, (size_t)(size - i));
                p = plane_part, o = out_part;
            }
            store_quad(a0, b0, p, o);
            store_quad(a1, b1, p + 4, o + 4);
            store_quad(a2, b2, p + 8, o + 8);
            store_quad(a3, b3, p + 12, o + 12);
            if (!whole && i < size) memcpy(out + i, out_part, 2 * (size_t)(size - i));
        }
        position[lane] = at0, position[lane + 1] = at1, position[lane + 2] = at2, position[lane + 3] = at3;
    }
}

#ifdef HAVE_AVX512
/* Exponents of 64 weights and their sign-and-mantissa bytes to BF16. */
AVX512 static inline void join_avx512(__m512i e, const uint8_t *plane, uint16_t *out) {
    const __m512i first = _mm512_set_epi8(95, 31, 94, 30, 93, 29, 92, 28, 91, 27, 90, 26, 89, 25, 88, 24, 87, 23, 86, 22, 85,
                                          21, 84, 20, 83, 19, 82, 18, 81, 17, 80, 16, 79, 15, 78, 14, 77, 13, 76, 12, 75, 11,
                                          74, 10, 73, 9, 72, 8, 71, 7, 70, 6, 69, 5, 68, 4, 67, 3, 66, 2, 65, 1, 64, 0);
    __m512i p = _mm512_loadu_si512(plane);
    __m512i low = _mm512_ternarylogic_epi64(_mm512_set1_epi8(0x7F), p, _mm512_slli_epi16(e, 7), 0xCA);
    __m512i high = _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)0x80), p, _mm512_srli_epi16(e, 1), 0xCA);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(low, first, high));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi8(low, _mm512_add_epi8(first, _mm512_set1_epi8(32)), high));
}

/* 32-bit windows at 16 bit positions: two words each, shifted together. */
AVX512 static inline __m512i windows(const uint32_t *payload, __m512i position) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i word = _mm512_srli_epi32(position, 5);
    __m512i a = _mm512_i32gather_epi64(_mm512_castsi512_si256(word), payload, 4);
    __m512i b = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(word, 1), payload, 4);
    __m512i w0 = _mm512_permutex2var_epi32(a, even, b);
    __m512i w1 = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    return _mm512_shldv_epi32(w0, w1, position);
}

/* The same as lanes_plain for `rows` whole rows; two tables of 256 bytes: code lengths and exponents by window. */
AVX512 static void lanes_avx512(const uint8_t *length_of, const uint8_t *exponent_of, const uint32_t *payload,
                                uint32_t *position, int rows, const uint8_t *plane, uint16_t *out) {
    const Table lengths = load_table(length_of), exponents = load_table(exponent_of);
    const __m512i reverse = _mm512_set4_epi32(0x0C0D0E0F, 0x08090A0B, 0x04050607, 0x00010203);
    __m512i pos[2] = {_mm512_loadu_si512(position), _mm512_loadu_si512(position + 16)};
    for (int q = 0; q < rows; q++)
        for (int h = 0; h < 2; h++) {
            __m512i w = windows(payload, pos[h]), tops = _mm512_setzero_si512();
            for (int k = 0; k < 4; k++) {
                __m512i length = _mm512_srli_epi32(look_up(&lengths, w), 24);
                tops = _mm512_shldi_epi32(tops, w, 8); /* the windows' top bytes are what the exponents follow from */
                w = _mm512_sllv_epi32(w, length);
                pos[h] = _mm512_add_epi32(pos[h], length);
            }
            __m512i e = look_up(&exponents, _mm512_shuffle_epi8(tops, reverse));
            join_avx512(e, plane + ROW * q + 64 * h, out + ROW * q + 64 * h);
        }
    _mm512_storeu_si512(position, pos[0]);
    _mm512_storeu_si512(position + 16, pos[1]);
}
#endif

/* Decode tiles `first` up to `last` of a checked coded matrix of n weights into `out` (the matrix's beginning).
 * The stream must be readable 66 words past its end. Returns 0, or 8 * tile + what is bad. */
int64_t moepack_exponent_decode(const uint8_t *length_of, const uint8_t *exponent_of, const uint32_t *tile_start,
                                const uint32_t *patch_start, const uint32_t *patches, const uint32_t *stream,
                                const uint8_t *plane, uint16_t *out, int64_t n, int64_t first, int64_t last) {
    uint32_t pair[1 << PAIR_BITS];
    if (level < 1 || last * TILE > n) fill_pairs(length_of, exponent_of, pair);
    for (int64_t t = first; t < last; t++) {
        int64_t begin = t * TILE;
        int size = n - begin < TILE ? (int)(n - begin) : TILE, rows = (size + ROW - 1) / ROW, done = 0;
        const uint32_t *words = stream + tile_start[t], *patch = patches + patch_start[t];
        const uint8_t *p = plane + begin;
        uint16_t *o = out + begin;
        int64_t count = (int64_t)tile_start[t + 1] - tile_start[t], n_patches = (int64_t)patch_start[t + 1] - patch_start[t];
        if (count < 1) return 8 * t + BAD_SIZE;
        uint32_t mode = words[0] >> 16, base = words[0] & 0xFFFF;
        if (mode == RAW) {
            if (count != 1 + (size + 3) / 4 || base || n_patches) return 8 * t + BAD_SIZE;
            const uint8_t *e = (const uint8_t *)(words + 1);
            for (int i = 0; i < size; i++)
                o[i] = (uint16_t)((p[i] & 0x80) << 8 | (uint32_t)e[i] << 7 | (p[i] & 0x7F));
            continue;
        }
        if (mode != CODED || count < LANE_WORDS) return 8 * t + BAD_SIZE;
        const uint8_t *delta = (const uint8_t *)(words + 1);
        uint32_t position[LANES], end[LANES], total = 0;
        for (int lane = 0; lane < LANES; lane++) {
            position[lane] = total;
            end[lane] = total += base + delta[lane];
        }
        if (count != LANE_WORDS + ((int64_t)total + 31) / 32) return 8 * t + BAD_LANES;
        const uint32_t *payload = words + LANE_WORDS;
#ifdef HAVE_AVX512
        if (level > 0) lanes_avx512(length_of, exponent_of, payload, position, done = size / ROW, p, o);
#endif
        if (done < rows)
            lanes_plain(pair, length_of, exponent_of, payload, position, rows - done, size - ROW * done, p + ROW * done,
                        o + ROW * done);
        if (memcmp(position, end, sizeof end)) return 8 * t + BAD_CODES;
        for (int64_t i = 0; i < n_patches; i++) {
            uint32_t where = patch[i] & 0xFFFF;
            if ((int)where >= size || patch[i] >> 24) return 8 * t + BAD_PATCHES;
            o[where] = (uint16_t)((o[where] & 0x807F) | (patch[i] >> 16) << 7);
        }
    }
    return 0;
}
