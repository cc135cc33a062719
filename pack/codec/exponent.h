/* Shared by the files of the compiled exponent codec. FORMAT.md, "Coded matrices" and "Coded FP8 codes". */
#ifndef MOEPACK_EXPONENT_H
#define MOEPACK_EXPONENT_H
#include <stdint.h>
#include <string.h>

#define TILE 8192
#define LANES 32
#define ROW 128 /* weights that all lanes decode in one step: one quad each */
#define QUADS (TILE / ROW)
#define LANE_WORDS 9
#define WIDE_WORDS 17
#define CODED 0
#define RAW 1
#define WIDE 2 /* coded, with the lanes' lengths in 16 bits: FP8 alone */
#define INLINE static inline __attribute__((always_inline))

/* The two forms of a weight, by its bytes: BF16, 8 bits of exponent, and FP8 E4M3, 4 bits. Functions take the form as a
 * constant and are compiled once for each. */
enum { FP8 = 1, BF16 = 2 };

enum { BAD_SIZE = 1, BAD_LANES = 2, BAD_PATCHES = 3, BAD_CODES = 4 };

typedef struct {
    const uint32_t *payload, *patch; /* payload may be read 66 words past the tile's last */
    const uint8_t *plane;
    uint8_t *out; /* BF16: on a multiple of 2 */
    int64_t patches;
    int size;
    uint32_t position[LANES], end[LANES];
} Tile;

/* What exponent_lanes.c looks up. */
#define WINDOW_BITS 11
typedef struct {
    /* By a lane's next bits: the bits of the code words that are whole (bits 0 to 7), their number (8 to 15), and their
     * items, the first one at the top. */
    uint64_t windows[1 << WINDOW_BITS];
    uint8_t length[16], exponent[16], item[16]; /* by symbol */
    uint32_t pair[256];                         /* by two symbols: their exponents in place for two BF16 weights */
    uint8_t pair_length[256];
} Tables;

void moepack_exponent_tables(int form, const uint8_t *length_of, const uint8_t *exponent_of, Tables *tables);
void moepack_exponent_lanes(int form, const Tables *tables, Tile *tile, int first);

typedef struct {
    uint32_t code[QUADS * LANES]; /* four code words, appended to one another */
    uint8_t length[QUADS * LANES];
} Quads;

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX512 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,bmi,bmi2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,bmi2")))
#endif

extern int moepack_exponent_loops; /* 0: plain C; 1: AVX2 and BMI2; 2: AVX-512 (exponent_level.c) */

static inline uint64_t spread(uint32_t x) { /* bytes b3 b2 b1 b0 to 16-bit fields */
    uint64_t y = x;
    y = (y | y << 16) & 0x0000FFFF0000FFFFull;
    return (y | y << 8) & 0x00FF00FF00FF00FFull;
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

/* Replace every byte i of `index` by entry i of the table's 256. */
AVX512 static inline __m512i look_up(const Table *t, __m512i index) {
    __m512i low = _mm512_permutex2var_epi8(t->t[0], index, t->t[1]);
    __m512i high = _mm512_permutex2var_epi8(t->t[2], index, t->t[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}
#endif
#endif
