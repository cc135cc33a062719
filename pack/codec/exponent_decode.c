/* Decodes exponents: the same weights as exponent.py, compiled. FORMAT.md, "Coded matrices" and "Coded FP8 codes".
 *
 * The loops over a tile are here with AVX-512 and VBMI, elsewhere in plain C and AVX2 (exponent_lanes.c). Callers have
 * checked the header and every offset (exponent.parse); errors that only decoding can find are checked here. Nothing is
 * allocated.
 */
#include "exponent.h"

#ifdef HAVE_AVX512
/* Exponents of 64 weights and their sign-and-mantissa bytes to BF16. */
AVX512 static inline void join_bf16_avx512(__m512i e, const uint8_t *plane, uint8_t *out) {
    const __m512i first = _mm512_set_epi8(95, 31, 94, 30, 93, 29, 92, 28, 91, 27, 90, 26, 89, 25, 88, 24, 87, 23, 86, 22, 85,
                                          21, 84, 20, 83, 19, 82, 18, 81, 17, 80, 16, 79, 15, 78, 14, 77, 13, 76, 12, 75, 11,
                                          74, 10, 73, 9, 72, 8, 71, 7, 70, 6, 69, 5, 68, 4, 67, 3, 66, 2, 65, 1, 64, 0);
    __m512i p = _mm512_loadu_si512(plane);
    __m512i low = _mm512_ternarylogic_epi64(_mm512_set1_epi8(0x7F), p, _mm512_slli_epi16(e, 7), 0xCA);
    __m512i high = _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)0x80), p, _mm512_srli_epi16(e, 1), 0xCA);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(low, first, high));
    _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi8(low, _mm512_add_epi8(first, _mm512_set1_epi8(32)), high));
}

/* Exponents of 64 codes and their nibbles to FP8. */
AVX512 static inline void join_fp8_avx512(__m512i e, const uint8_t *plane, uint8_t *out) {
    __m512i p = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)plane));
    p = _mm512_or_si512(p, _mm512_slli_epi16(p, 4)); /* the nibbles in the low halves of bytes, other bits above */
    __m512i rest = _mm512_ternarylogic_epi64(_mm512_set1_epi8(7), p, _mm512_slli_epi16(e, 3), 0xCA);
    p = _mm512_slli_epi16(p, 4);
    _mm512_storeu_si512(out, _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)0x80), p, rest, 0xCA));
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

/* Code lengths are looked up by six bits, in one permutation of 64 bytes, which does not tell 8 from 7. Code words are
 * canonical: windows from `eight` up begin with a code of 8 bits, those below with a shorter one. */
typedef struct {
    Table exponents;
    __m512i lengths, eight;
    __mmask16 any_eight;
} Decoder;

AVX512 static inline Decoder make_decoder(const uint8_t *length_of, const uint8_t *exponent_of) {
    uint8_t by_six[64];
    uint32_t bound = 0;
    for (int w = 0; w < 256; w++) bound += length_of[w] < 8;
    for (int w = 0; w < 64; w++) by_six[w] = length_of[4 * w] < 7 ? length_of[4 * w] : 7;
    Decoder d = {load_table(exponent_of), _mm512_loadu_si512(by_six), _mm512_set1_epi32((int)(bound << 24)),
                 bound < 256 ? 0xFFFF : 0};
    return d;
}

/* Whole rows of one tile or of two at once: a step waits for the one before, and two tiles fill each other's waits
 * (12.5 against 8.4 GB/s of BF16 measured). */
AVX512 INLINE void lanes_avx512(const int form, const Decoder *d, const int tiles, Tile *tile, int rows) {
    const __m512i reverse = _mm512_set4_epi32(0x0C0D0E0F, 0x08090A0B, 0x04050607, 0x00010203);
    const __mmask64 first_bytes = 0x1111111111111111ull;
    __m512i pos[4];
    for (int g = 0; g < 2 * tiles; g++) pos[g] = _mm512_loadu_si512(tile[g / 2].position + 16 * (g & 1));
    for (int q = 0; q < rows; q++) {
        __m512i w[4], tops[4];
        for (int g = 0; g < 2 * tiles; g++) w[g] = windows(tile[g / 2].payload, pos[g]), tops[g] = w[g];
        for (int k = 0; k < 4; k++)
            for (int g = 0; g < 2 * tiles; g++) {
                __m512i length = _mm512_maskz_permutexvar_epi8(first_bytes, _mm512_srli_epi32(w[g], 26), d->lengths);
                __mmask16 eight = _mm512_mask_cmpge_epu32_mask(d->any_eight, w[g], d->eight);
                length = _mm512_mask_add_epi32(length, eight, length, _mm512_set1_epi32(1));
                tops[g] = _mm512_shldi_epi32(tops[g], w[g], 8); /* collects the top bytes, which give the exponents */
                w[g] = _mm512_sllv_epi32(w[g], length);
                pos[g] = _mm512_add_epi32(pos[g], length);
            }
        for (int g = 0; g < 2 * tiles; g++) {
            int at = ROW * q + 64 * (g & 1);
            __m512i e = look_up(&d->exponents, _mm512_shuffle_epi8(tops[g], reverse));
            if (form == BF16)
                join_bf16_avx512(e, tile[g / 2].plane + at, tile[g / 2].out + 2 * at);
            else
                join_fp8_avx512(e, tile[g / 2].plane + at / 2, tile[g / 2].out + at);
        }
    }
    for (int g = 0; g < 2 * tiles; g++) _mm512_storeu_si512(tile[g / 2].position + 16 * (g & 1), pos[g]);
}

AVX512 static void one_avx512(int form, const uint8_t *length_of, const uint8_t *exponent_of, Tile *tile, int rows) {
    Decoder d = make_decoder(length_of, exponent_of);
    if (form == BF16)
        lanes_avx512(BF16, &d, 1, tile, rows);
    else
        lanes_avx512(FP8, &d, 1, tile, rows);
}

AVX512 static void two_avx512(int form, const uint8_t *length_of, const uint8_t *exponent_of, Tile *tile) {
    Decoder d = make_decoder(length_of, exponent_of);
    if (form == BF16)
        lanes_avx512(BF16, &d, 2, tile, QUADS);
    else
        lanes_avx512(FP8, &d, 2, tile, QUADS);
}
#endif

typedef struct {
    const uint32_t *tile_start, *patch_start, *patches, *stream;
    const uint8_t *plane;
    uint8_t *out;
    int64_t n;
    int form;
} Matrix;

/* Decode a raw tile. Returns 0 or the number of an error. */
static int raw_tile(int form, const uint32_t *words, int64_t count, int size, Tile *tile) {
    const uint8_t *e = (const uint8_t *)(words + 1), *p = tile->plane;
    if (count != 1 + (form * (int64_t)size + 7) / 8 || words[0] & 0xFFFF || tile->patches) return BAD_SIZE;
    tile->size = 0;
    if (form == FP8) {
        for (int i = 0; i < size; i++) {
            int half = i & 1 ? 4 : 0, x = p[i / 2] >> half;
            tile->out[i] = (uint8_t)((x & 8) << 4 | (e[i / 2] >> half & 15) << 3 | (x & 7));
        }
        return 0;
    }
    uint16_t *out = (uint16_t *)tile->out;
    for (int i = 0; i < size; i++) out[i] = (uint16_t)((p[i] & 0x80) << 8 | (uint32_t)e[i] << 7 | (p[i] & 0x7F));
    return 0;
}

/* Find and check a tile. A raw one is decoded here; `size` is then 0. Returns 0 or the number of an error. */
static int open_tile(const Matrix *m, int64_t t, Tile *tile) {
    int64_t begin = t * TILE, count = (int64_t)m->tile_start[t + 1] - m->tile_start[t];
    int size = m->n - begin < TILE ? (int)(m->n - begin) : TILE;
    const uint32_t *words = m->stream + m->tile_start[t];
    tile->patch = m->patches + m->patch_start[t];
    tile->patches = (int64_t)m->patch_start[t + 1] - m->patch_start[t];
    tile->plane = m->plane + begin * m->form / 2;
    tile->out = m->out + begin * m->form;
    if (count < 1) return BAD_SIZE;
    uint32_t mode = words[0] >> 16, base = words[0] & 0xFFFF, total = 0;
    if (mode == RAW) return raw_tile(m->form, words, count, size, tile);
    int wide = mode == WIDE && m->form == FP8, head = wide ? WIDE_WORDS : LANE_WORDS;
    if ((mode != CODED && !wide) || count < head || (wide && base)) return BAD_SIZE;
    const uint8_t *delta = (const uint8_t *)(words + 1);
    for (int lane = 0; lane < LANES; lane++) {
        tile->position[lane] = total;
        tile->end[lane] = total += wide ? words[1 + lane / 2] >> 16 * (lane & 1) & 0xFFFF : base + delta[lane];
    }
    tile->payload = words + head;
    tile->size = size;
    return count == head + ((int64_t)total + 31) / 32 ? 0 : BAD_LANES;
}

static int close_tile(int form, const Tile *tile) {
    if (memcmp(tile->position, tile->end, sizeof tile->end)) return BAD_CODES;
    if (form == FP8) return tile->patches ? BAD_PATCHES : 0;
    uint16_t *out = (uint16_t *)tile->out;
    for (int64_t i = 0; i < tile->patches; i++) {
        uint32_t where = tile->patch[i] & 0xFFFF;
        if ((int)where >= tile->size || tile->patch[i] >> 24) return BAD_PATCHES;
        out[where] = (uint16_t)((out[where] & 0x807F) | (tile->patch[i] >> 16) << 7);
    }
    return 0;
}

/* Decode tiles `first` up to `last` of a checked coded matrix of n weights into `out` (the matrix's beginning).
 * The stream must be readable 66 words past its end. Returns 0, or 8 * tile + the number of an error. */
int64_t moepack_exponent_decode(const uint8_t *length_of, const uint8_t *exponent_of, const uint32_t *tile_start,
                                const uint32_t *patch_start, const uint32_t *patches, const uint32_t *stream,
                                const uint8_t *plane, uint8_t *out, int64_t form, int64_t n, int64_t first,
                                int64_t last) {
    const Matrix m = {tile_start, patch_start, patches, stream, plane, out, n, (int)form};
    Tables tables;
    Tile tile[2];
    int bad;
    if (first < last && (moepack_exponent_loops < 2 || last * TILE > n))
        moepack_exponent_tables(m.form, length_of, exponent_of, &tables);
    for (int64_t t = first; t < last; t++) {
        if ((bad = open_tile(&m, t, tile))) return 8 * t + bad;
        if (!tile->size) continue;
        int rows = (tile->size + ROW - 1) / ROW, done = 0;
#ifdef HAVE_AVX512
        if (moepack_exponent_loops > 1 && tile->size == TILE && t + 1 < last && (t + 2) * TILE <= n) {
            if ((bad = open_tile(&m, t + 1, tile + 1))) return 8 * (t + 1) + bad;
            if (tile[1].size) {
                two_avx512(m.form, length_of, exponent_of, tile);
                if ((bad = close_tile(m.form, tile))) return 8 * t + bad;
                t++;
                if ((bad = close_tile(m.form, tile + 1))) return 8 * t + bad;
                continue;
            }
        }
        if (moepack_exponent_loops > 1) one_avx512(m.form, length_of, exponent_of, tile, done = tile->size / ROW);
#endif
        if (done < rows) moepack_exponent_lanes(m.form, &tables, tile, done);
        if ((bad = close_tile(m.form, tile))) return 8 * t + bad;
    }
    return 0;
}

/* ------------------------------------------------------------------ a matrix opened once, decoded in parts */

#define GUARD (LANE_WORDS * TILE / LANES / 32 + 2) /* words a damaged tile could read past the end of the stream */

/* A coded matrix whose header and offsets were checked, and the place for its weights. */
typedef struct {
    Matrix m;
    uint8_t length_of[256], exponent_of[256];
} Opened;

int64_t moepack_exponent_opened(void) { return (int64_t)sizeof(Opened); }

static int rises(const uint32_t *start, int64_t tiles, uint32_t total) {
    if (start[0] || start[tiles] != total) return 0;
    for (int64_t t = 0; t < tiles; t++)
        if (start[t + 1] < start[t]) return 0;
    return 1;
}

/* Check as exponent.parse does, and make the tables. Returns 0, or 1 for a matrix that is malformed, or so small that too
 * few bytes follow its stream. `data` is on a multiple of 4. */
int64_t moepack_exponent_open(const uint8_t *data, int64_t size, int64_t weights, uint8_t *out, Opened *to) {
    uint32_t head[4];
    if (size < 48 || weights < 4 * GUARD) return 1;
    memcpy(head, data, sizeof head);
    const int64_t tiles = head[1], words = head[2], patches = head[3];
    if (head[0] != weights || tiles != (weights + TILE - 1) / TILE) return 1;
    if (48 + 4 * (2 * (tiles + 1) + patches + words) + weights != size) return 1;
    const uint8_t *exponent = data + 16, *length = data + 32;
    uint32_t kraft = 0;
    for (int s = 0; s < 16; s++) {
        if (length[s] > 8) return 1;
        if (length[s]) kraft += 1u << (8 - length[s]);
    }
    if (kraft != 256) return 1;
    uint32_t at = 0; /* canonical: by length, then by symbol */
    for (int l = 1; l <= 8; l++)
        for (int s = 0; s < 16; s++)
            if (length[s] == l)
                for (uint32_t end = at + (1u << (8 - l)); at < end; at++)
                    to->length_of[at] = (uint8_t)l, to->exponent_of[at] = exponent[s];
    const uint32_t *first = (const uint32_t *)(data + 48);
    to->m = (Matrix){first, first + tiles + 1, first + 2 * (tiles + 1), 0, 0, out, weights, BF16};
    to->m.stream = to->m.patches + patches;
    to->m.plane = (const uint8_t *)(to->m.stream + words);
    return !rises(to->m.tile_start, tiles, (uint32_t)words) || !rises(to->m.patch_start, tiles, (uint32_t)patches);
}

/* Decode tiles `first` up to `last` of an opened matrix; as moepack_exponent_decode. */
int64_t moepack_exponent_part(const void *opened, int64_t first, int64_t last) {
    const Opened *o = opened;
    return moepack_exponent_decode(o->length_of, o->exponent_of, o->m.tile_start, o->m.patch_start, o->m.patches,
                                   o->m.stream, o->m.plane, o->m.out, o->m.form, o->m.n, first, last);
}
