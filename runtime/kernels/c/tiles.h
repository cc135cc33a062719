/* Fills the tiles of affine_tiles.c: with activations, and with an expert's codes or weights. AVX-512 with VBMI and BF16. */
#define WIDE AVX512_BF16
#define INLINE WIDE static inline __attribute__((always_inline))
#define NAME(x) x
#include "avx512.h"
#include "codes.h"

/* ---- arranging activations in tiles */
INLINE __mmask32 of_step(int64_t cols, int64_t step) { /* the columns of a step inside the matrix */
    int64_t left = cols - step * STEP;
    return left >= STEP ? 0xFFFFFFFF : left <= 0 ? 0 : (1u << left) - 1;
}

INLINE void turn(__m512i v[16]) { /* 16 x 16 words, transposed */
    __m512i w[16];
    UNROLL for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        w[i] = _mm512_unpacklo_epi64(a, c), w[i + 1] = _mm512_unpackhi_epi64(a, c);
        w[i + 2] = _mm512_unpacklo_epi64(b, d), w[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(w[i], w[i + 4], 0x88), b = _mm512_shuffle_i32x4(w[i], w[i + 4], 0xDD);
        __m512i c = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0x88), d = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0xDD);
        v[i] = _mm512_shuffle_i32x4(a, c, 0x88), v[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
        v[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), v[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
}

/* Arrange the activations of up to 16 slots: as tiles B for BF16 weights, else A. Missing rows and columns become 0. */
WIDE static void arrange(const Gemm *m, const int64_t *slot, int64_t n, int turned, int64_t steps, uint8_t *out,
                         float *sums) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    const uint16_t *x[16];
    for (int i = 0; i < 16; i++) x[i] = (const uint16_t *)m->x + (i < n ? slot[i] / m->share * m->cols : 0);
    for (int64_t s = 0; s < steps; s++, out += TILE) {
        const __mmask32 mask = of_step(m->cols, s);
        __m512i v[16];
        UNROLL for (int i = 0; i < 16; i++) v[i] = _mm512_maskz_loadu_epi16(i < n ? mask : 0, x[i] + s * STEP);
        if (turned) turn(v);
        UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + 64 * i, v[i]);
        if (turned) continue;
        __m512 sum = _mm512_setzero_ps();
        turn(v);
        UNROLL for (int i = 0; i < 16; i++) sum = _mm512_dpbf16_ps(sum, (__m512bh)v[i], ones);
        _mm512_storeu_ps(sums + 16 * s, sum);
    }
}

/* Scales of group g of a block's 16 rows. */
INLINE __m512 scale_row(const Form *f, const uint8_t *base, int64_t block, int64_t groups, int64_t g) {
    const int64_t at = (block * groups + g) * BLOCK;
    const uint8_t *scale = base + f->scale;
    const int of = scales_of(f), item = f->bits == MXFP4 || f->bits == NVFP4 || of == OF_BYTE ? 1 : 2;
    switch (f->bits) {
    case MXFP8: return POW2(scale + at);
    case FP8: return SET(((const float *)scale)[block * groups + g]);
    case FP8_ROW: return LOADF((const float *)scale + block * BLOCK);
    }
    return SCALE(f->bits, of, scale + at * item);
}

/* ---- weights
 * The control of _mm512_multishift_epi64_epi8: of every 32-bit word it takes the eight bits from bit `at` on and those
 * from bit `at + apart` on, each into the low byte of a 16-bit number. These bytes begin with two successive columns'
 * codes, and are indices into a LUT of BF16 numbers. Bits count within a 64-bit lane, which has two rows' words. */
INLINE __m512i fields(int at, int apart) {
    uint64_t a = (uint64_t)at % 64, b = (uint64_t)(at + apart) % 64;
    return _mm512_set1_epi64((int64_t)(a | b << 16 | (a + 32) % 64 << 32 | (b + 32) % 64 << 48));
}

/* Unpack codes of 16 rows, steps [from, from + n), into tiles B that lie 2 tiles apart. Codes count from the middle of
 * their range, so that they are exact in BF16. A word of B has two successive columns of a row: one multishift makes
 * both indices, one permutation looks both up. It reads five bits of an index. The upper ones may belong to the codes
 * that follow, so the LUT repeats itself. The highest bit of codes of three or five bits is taken from the high plane. */
INLINE void codes(const int bits, const Gemm *m, const Form *f, const uint8_t *base, int64_t row, int64_t from, int64_t n,
                  uint8_t *out) {
    const int p = low_bits(bits); /* bits of a code in the low plane, and words of a step there */
    const int64_t all = ceil_div(m->cols, 32 / p), block = row / BLOCK;
    const uint32_t *low = (const uint32_t *)(base + f->low) + block * all * BLOCK;
    const uint32_t *high = (const uint32_t *)(base + f->high) + block * ceil_div(m->cols, 32) * BLOCK;
    uint16_t numbers[32] = {0};
    for (int i = 0; i < 32 && bits < 8; i++) numbers[i] = narrow((float)(i % (1 << bits)) - (float)((1 << bits) - 1) / 2);
    const __m512i table = _mm512_loadu_si512(numbers), mask = _mm512_set1_epi16((short)((1 << p) - 1));
    for (int64_t s = from; s < from + n; s++, out += 2 * TILE) {
        __m512i h = two_planes(bits) ? _mm512_loadu_si512(high + s * BLOCK) : _mm512_setzero_si512();
        UNROLL for (int k = 0; k < p; k++) {
            const int64_t word = s * p + k;
            __m512i w = word < all ? _mm512_loadu_si512(low + word * BLOCK) : _mm512_setzero_si512();
            _mm_prefetch((const char *)(low + (word + 24) * BLOCK), _MM_HINT_T0);
            UNROLL for (int i = 0; i < 16 / p; i++) {
                const int pair = k * (16 / p) + i;
                if (p == 8) { /* no table holds 256: halves of floats, whose lower ones are 0, as codes have 8 bits */
                    const __m512i one = _mm512_srli_epi32(w, 16 * i), two = _mm512_srli_epi32(w, 16 * i + 8);
                    __m512i even = _mm512_castps_si512(bits == 8 ? CODE8(one) : E4M3_LOW(one));
                    __m512i odd = _mm512_castps_si512(bits == 8 ? CODE8(two) : E4M3_LOW(two));
                    _mm512_storeu_si512(out + 64 * pair, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
                    continue;
                }
                __m512i at = _mm512_multishift_epi64_epi8(fields(2 * p * i, p), w);
                if (two_planes(bits)) {
                    __m512i above = _mm512_multishift_epi64_epi8(fields(2 * pair + 64 - p, 1), h);
                    at = _mm512_ternarylogic_epi64(mask, at, above, 0xCA);
                }
                _mm512_storeu_si512(out + 64 * pair, _mm512_permutexvar_epi16(at, table));
            }
        }
    }
}

/* As codes(), but scale * (code - zero) in float32, rounded to BF16, without an outer scale. BF16 holds FP4 codes and
 * MXFP8's times their scales exactly, and trellis codes have no other tiles. Of others it is used for so many tokens that
 * scaling their sums takes longer than scaling weights. A word gives a column of 16 rows at a time; two columns are rounded and interleaved. */
INLINE void weights(const int bits, const Gemm *m, const Form *f, const uint8_t *base, int64_t row, int64_t from, int64_t n,
                   uint8_t *out) {
    const int p = low_bits(bits), words = p, width = bits > 8 ? p : bits; /* words of a step in the low plane */
    const int64_t group = f->group ? f->group : m->cols;
    const int64_t all = ceil_div(m->cols, 32 / p), groups = ceil_div(m->cols, group), block = row / BLOCK;
    const uint32_t *low = (const uint32_t *)(base + f->low) + block * all * BLOCK;
    const uint32_t *high = (const uint32_t *)(base + f->high) + block * ceil_div(m->cols, 32) * BLOCK;
    const uint8_t *zero = base + f->zero + block * groups * BLOCK;
    const __m512 codes = bits == MXFP4 || bits == NVFP4
                             ? _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6)
                         : p == 4 ? _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -.5f, .5f, 1.5f, 2.5f,
                                                    3.5f, 4.5f, 5.5f, 6.5f, 7.5f)
                         : bits == 1 ? _mm512_setr4_ps(-.5f, .5f, -.5f, .5f)
                                     : _mm512_setr4_ps(-1.5f, -.5f, .5f, 1.5f);
    const float top = bits == 3 ? 2.f : 8.f; /* of three or five bits the high plane's part */
    const __m512 far = _mm512_setr4_ps(-top, top, -top, top);
    const __m512 unit = _mm512_set1_ps(1.0f / (1 << (8 - width))), middle = _mm512_set1_ps(-(float)((1 << width) - 1) / 2);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i state[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}; /* of a trellis: windows over the codes before */
    if (is_trellis(bits) && from) {
        state[0] = _mm512_srli_epi32(_mm512_loadu_si512(low + (from * words - 1) * BLOCK), 16);
        if (bits == TRELLIS3) state[1] = _mm512_srli_epi32(_mm512_loadu_si512(high + (from - 1) * BLOCK), 24);
    }
    for (int64_t s = from; s < from + n; s++, out += 2 * TILE) {
        const int64_t g = s * STEP / group;
        __m512 by = scale_row(f, base, block, groups, g);
        __m512 less = _mm512_setzero_ps();
        if (f->zeros == SYMMETRIC) less = _mm512_mul_ps(by, _mm512_set1_ps(0.5f));
        if (f->zeros == STORED) {
            less = _mm512_mul_ps(by, _mm512_fmadd_ps(BYTES(zero + g * BLOCK), unit, middle));
        }
        __m512i h = two_planes(bits) ? _mm512_loadu_si512(high + s * BLOCK) : _mm512_setzero_si512();
        UNROLL for (int k = 0; k < words; k++) {
            const int64_t word = s * words + k;
            __m512i w = word < all ? _mm512_loadu_si512(low + word * BLOCK) : _mm512_setzero_si512();
            _mm_prefetch((const char *)(low + (word + 24) * BLOCK), _MM_HINT_T0);
            if (bits == NVFP4 && k == 2) by = scale_row(f, base, block, groups, least(g + 1, groups - 1));
            UNROLL for (int i = 0; i < 16 / words; i++) {
                __m512 v[2];
                UNROLL for (int j = 0; j < 2; j++) {
                    __m512 code = bits == 8          ? CODE8(w)
                                  : p == 8           ? E4M3_LOW(w)
                                  : is_trellis(bits) ? next_level(bits, state, &w, &h)
                                                     : _mm512_permutexvar_ps(w, codes);
                    if (bits == 3 || bits == 5) {
                        code = _mm512_add_ps(code, _mm512_permutexvar_ps(h, far));
                        h = _mm512_srli_epi32(h, 1);
                    }
                    if (!is_trellis(bits)) w = _mm512_srli_epi32(w, p);
                    v[j] = _mm512_fmsub_ps(by, code, less);
                }
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]);
                _mm512_storeu_si512(out + 64 * (k * (16 / words) + i), _mm512_permutexvar_epi16(pairs, both));
            }
        }
    }
}

/* Unpack up to 32 rows from `row` on into tiles B; the tiles of the two blocks of rows alternate. */
#define PANEL_CASE(bits, name) \
    case bits: name(bits, m, f, base, row, from, n, out); break;
#define PANEL(name, more) \
    WIDE static void name##_panel(const Gemm *m, const Form *f, const uint8_t *base, int64_t rows, int64_t row, int64_t from, \
                                  int64_t n, uint8_t *out) { \
        for (int k = 0; k < 2 && row < rows; k++, row += BLOCK, out += TILE) switch (codes_of(f)) { \
            INTEGER_CODES(PANEL_CASE, name) \
            case FP8: \
            case FP8_ROW: \
            PANEL_CASE(MXFP8, name) \
            PANEL_CASE(MXFP4, name) \
            PANEL_CASE(NVFP4, name) \
            more \
            } \
    }

PANEL(codes, )
PANEL(weights, PANEL_CASE(TRELLIS2, weights) PANEL_CASE(TRELLIS3, weights))

/* Copy 32 rows of a BF16 matrix into tiles A; tiles of the two blocks alternate. Missing rows and columns become 0. */
WIDE static void copy_panel(const Gemm *m, const uint16_t *weight, int64_t rows, int64_t row, int64_t from, int64_t n,
                            uint8_t *out) {
    for (int r = 0; r < 32; r++) {
        const uint16_t *at = weight + (row + r) * m->cols;
        uint8_t *to = out + r / 16 * TILE + r % 16 * 64;
        for (int64_t s = from; s < from + n; s++, to += 2 * TILE) {
            __mmask32 mask = row + r < rows ? of_step(m->cols, s) : 0;
            _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(mask, at + s * STEP));
        }
    }
}
