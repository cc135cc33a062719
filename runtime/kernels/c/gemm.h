/* Declarations that the CPU kernels share: a product's arguments, loops, BF16 numbers, threads. */
#ifndef MOEPACK_GEMM_H
#define MOEPACK_GEMM_H
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,fma")))
#define LEVELS_OF(of) {of##_plain, of##_avx2, of##_avx512}
#else
#define LEVELS_OF(of) {of##_plain}
#endif

enum { MIDPOINT, STORED, SYMMETRIC }; /* zero points: half the greatest code, one a group, 2^(bits-1) */
#define BLOCK 16 /* rows whose words are stored side by side */
#define UNIT 64 /* rows that one step of work computes */
#define AHEAD 48 /* cache lines that are fetched ahead of their use */
#define ROUND (24 << 20) /* the most bytes of activations in tiles at a time */

/* One matrix in one version: offsets of its parts in an extent. In BF16 (`bits` 16) `low` is the matrix, row-major. */
typedef struct {
    int64_t bits, group, zeros, low, high, scale, zero, bias, outer; /* bias, outer: -1 without one */
} Form;

/* Numbers of encodings whose codes are floating-point or a trellis', or whose scales are FP16; the others' are their bits.
 * Where scales have a byte, it is this number and SMALL. */
enum { MXFP4 = 17, NVFP4, MXFP8, FP8, FP8_ROW, HALF4, HALF8, TRELLIS2 = 28, TRELLIS3, SMALL = 32 };
enum { TRELLIS_BY = 26059, TRELLIS_ZERO = 217 }; /* the factor of states, and the levels' mean (pack/codec/trellis.py) */
enum { OF_BF16, OF_HALF, OF_BYTE }; /* scales of integer codes */

/* The number of an encoding with the same codes, and, if they are integers, BF16 scales. */
static inline int codes_of(const Form *f) {
    return (int)(f->bits > SMALL ? f->bits - SMALL : f->bits == HALF4 ? 4 : f->bits == HALF8 ? 8 : f->bits);
}

static inline int scales_of(const Form *f) {
    return f->bits > SMALL ? OF_BYTE : f->bits == HALF4 || f->bits == HALF8 ? OF_HALF : OF_BF16;
}

/* Whether codes are of two or three bits that make, with those before them in a row, the state of a trellis. */
static inline int is_trellis(int bits) { return bits == TRELLIS2 || bits == TRELLIS3; }

/* of(bits, ...) for each number of bits of integer codes. */
#define INTEGER_CODES(of, ...) of(1, __VA_ARGS__) of(2, __VA_ARGS__) of(3, __VA_ARGS__) \
    of(5, __VA_ARGS__) of(4, __VA_ARGS__) of(8, __VA_ARGS__)
#define AS_CASE(bits, none) case bits:

/* Whether there are kernels for a form. Every switch over codes has exactly these cases. */
static inline int known(const Form *f) {
    const int bits = codes_of(f);
    if (f->bits > SMALL && (f->outer < 0 || (bits > 8 && !is_trellis(bits)))) return 0;
    switch (bits) {
    case 16: return 1;
    case MXFP4:
    case MXFP8: return f->group == 32;
    case NVFP4: return f->group == 16;
    case FP8: return f->group == 32 || f->group == 128;
    case FP8_ROW: return f->group == 0;
    case TRELLIS2:
    case TRELLIS3: return f->group == 128;
    INTEGER_CODES(AS_CASE, ) return f->group == 32 || f->group == 64 || f->group == 128;
    }
    return 0;
}

/* Whether codes have their highest bit in a plane of its own. */
static inline int two_planes(int bits) { return bits == 3 || bits == 5 || bits == TRELLIS3; }

static inline int is_fp8(const Form *f) { return f->bits == MXFP8 || f->bits == FP8 || f->bits == FP8_ROW; }

/* Bits of a code in the low plane, by `codes_of`. */
static inline int low_bits(int bits) {
    return bits == 3 || is_trellis(bits) ? 2 : bits == 5 || bits == MXFP4 || bits == NVFP4 ? 4 : bits > 16 ? 8 : bits;
}

/* One product of all experts. A handle is an extent's address, a multiple of 64, with the version's number in its low 6 bits. */
typedef struct {
    int64_t rows, cols, experts, versions, slots, share; /* slot s reads activation s / share */
    int64_t x_bf16, out_bf16, tiles, threads;
    const void *x;
    const int64_t *index; /* the expert of every slot; a slot with an index past the last is skipped: no output */
    void *out;            /* [slots, rows] */
    const uint64_t *handles;
    const Form *forms;
    const int64_t *limits; /* by version: an expert with more slots runs in tiles, or is skipped without `tiles` */
} Gemm;

/* One matrix's part of a product: `count` slots, those at `order[first]` and after. */
typedef struct {
    const uint8_t *base;
    const Form *form;
    const uint16_t *bias; /* or 0 */
    void *out;            /* [slots, rows] */
    int64_t rows, first, count;
} Job;

/* Weights of rows [from, to) of one matrix of an affine version, transposed: out[c * ld + row - from]. `from` is a multiple
 * of 16; whole blocks are written. */
typedef struct {
    int64_t cols, from, to, ld, out_bf16, threads;
    const uint8_t *base;
    const Form *form;
    void *out;
} Unpack;

/* One activation, prepared; fields after `at` are set only if the versions in use read them. For float32 activations:
 * the numbers, sums over 32, 64 and 128 columns, and LUTs. For BF16 (affine_fixed.h): `fixed`, integers of 16 bits in
 * the order of planes of 1, 2, 4 and 8 bits, of FP4, of halves of words in planes of 2 and 4 bits, and of trellis codes,
 * `totals`, their sums over 32, 64 and 128 columns and -12 times those over 16 and 32, and `units`, by 128 columns the
 * value of a 1. For FP8 codes (fp8_rows.h): `scaled`, the numbers times a power of two, and `back`, which undoes it and
 * the codes' own. */
typedef struct {
    const void *at;
    float *x, *sums[3], *quads, *pairs, *units, *scaled, back;
    int32_t *totals[5], *fixed[8];
} Prepared;

/* One instruction set's loops for float32 activations (affine_rows.h), BF16 ones (affine_fixed.h), or FP8 codes and both
 * (fp8_rows.h). `prepare` takes one activation; `rows` computes rows [from, to), at most UNIT, of a job. Unpacking takes rows [row, row + n). */
typedef struct {
    void (*prepare)(const Gemm *, const void *, Prepared *);
    void (*rows)(const Gemm *, const Job *, int64_t, int64_t, const Prepared *const *, const int64_t *, int64_t);
    int tables; /* whether fixed[0] has tables: 12 bytes a column */
    int many;   /* activations of a pass by halves of words; 0 without such passes */
} Loops;

typedef void Unpacking(const Unpack *, int64_t, int64_t, uint8_t *);

extern const Loops moepack_floats_plain, moepack_floats_avx2, moepack_floats_avx512;
extern const Loops moepack_fixed_plain, moepack_fixed_avx2, moepack_fixed_avx512, moepack_fixed_vnni;
extern const Loops moepack_fp8_plain, moepack_fp8_avx2, moepack_fp8_avx512, moepack_fp8_bf16;
extern Unpacking moepack_unpack_plain, moepack_unpack_avx2, moepack_unpack_avx512;

/* A matrix that multiplies an input which it shares with others. */
typedef struct {
    int64_t rows;
    const uint8_t *base;
    const Form *form;
    const uint16_t *bias; /* or 0 */
    int64_t most[2];      /* tokens up to which the matrix runs from its packed bytes: float32, and BF16 activations */
} Dense;

int moepack_affine_product(const Gemm *m);
enum { SKIPPED, IN_TILES, FROM_BYTES };
int moepack_affine_dense(const Dense *of, int64_t n, int64_t cols, const void *x, void *out, int64_t tokens, int64_t bf16,
                         int64_t many, int64_t threads);

/* A token's experts, weighted and added in the order of its slots. */
typedef struct {
    int64_t tokens, top_k, cols, experts, from_bf16, out_bf16, round, threads; /* round: also weighted results */
    const void *from;     /* [tokens * top_k, cols] */
    const int64_t *index; /* the expert of each slot; slots with an index past the last are skipped */
    const float *gates;
    void *out; /* [tokens, cols] */
} Combine;

void moepack_affine_combine(const Combine *m);

/* Rotates the first `turned` numbers of each head of BF16 rows in place, halves against halves, rounded as torch does:
 * x cos + turn(x) sin, with turn(x) = (-second half, first half). */
typedef struct {
    uint16_t *x;               /* [rows][heads][cols] */
    const uint16_t *cos, *sin; /* [rows][angles]: one for each number, or as many as half of them, for both halves */
    int64_t rows, heads, cols, turned, angles;
} Rope;

void moepack_rope(const Rope *m);

/* Rows of BF16 over their root mean square, times a weight; small.c has the forms. */
void moepack_affine_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t cols, int64_t form,
                         double epsilon);

/* Vectors by batch, head and token, a row each; steps count bytes. A row of 8 or 4 bits has the codes of all numbers, and
 * then a BF16 scale of every GROUP_8 or GROUP_4 of them. In 4 bits a group's second half lies above its first, and rows are
 * rotated: so are then q and `out`, by the caller. */
typedef struct {
    const uint8_t *at; /* 0: there are none */
    int64_t cols, bits, batch, head, token;
} Rows;

/* out[b][t][g * heads + h] = sum over j of softmax(scale * (q . k_j + q2 . k2_j)) v_j. `heads` heads of q share each of
 * `groups` heads of k and v. */
typedef struct {
    Rows q, q2, k, k2, v; /* q2 and k2: a second part of queries and keys. q and q2 are BF16 */
    const uint8_t *mask;  /* which keys a token sees; 0: all, or with `causal` those up to its own */
    const float *sinks;   /* a head's logit that belongs to no key; 0: none */
    uint16_t *out;        /* [batch][tokens][groups * heads][v.cols] */
    int64_t batch, groups, heads, tokens, length, causal;
    int64_t mask_at[2]; /* of batch and token */
    float scale;
} Attend;

int moepack_affine_attend(const Attend *m, int64_t threads);

/* A router's choice of experts by its logits; `scores` and what follows are those of Routing, runtime/kernels/forms.py. */
typedef struct {
    int64_t tokens, experts, top_k, scores, normed, sorted, groups, kept, two;
    float scale;
    int64_t logits_bf16, gates_bf16;
    const void *logits; /* [tokens][experts] */
    const float *bias;  /* [experts], or 0 */
    int64_t *index;     /* [tokens][top_k] */
    void *gates;        /* [tokens][top_k] */
} Route;

int moepack_route(const Route *m);

/* out [rows][cols] = silu(x[:, :cols]) * x[:, cols:] of BF16 rows, both factors rounded as torch does. */
void moepack_silu_gate(const uint16_t *x, uint16_t *out, int64_t rows, int64_t cols);

void moepack_pair_gate(const uint16_t *x, uint16_t *out, int64_t n, float limit, float alpha);
void moepack_rows(const float *weight, const float *x, float *out, int64_t tokens, int64_t rows, int64_t cols, int64_t threads);

/* Rotates a row of BF16 or float32 numbers by Hadamard's matrix alone, in blocks of the largest power of two that divides
 * `cols`, from 16 to 256; others stay as they are. Twice, the row is as before. */
void moepack_hadamard(void *row, int64_t cols, int bf16);


/* Memory that is kept between calls, and grows as they need. */
typedef struct {
    uint8_t *at;
    size_t size;
} Arena;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline uint16_t narrow(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(word >> 16 | 0x40);
    return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

/* e^x of x <= 0, within 2 units in the last place; 0 below -87. A loop of it becomes vector code, one of expf does not.
 * x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial in r is that of the Cephes library's expf. */
static inline __attribute__((always_inline)) float exponential(float given) {
    const float x = given > -87.0f ? given : -87.0f;
    const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number */
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    const union {
        int32_t bits;
        float value;
    } power = {.bits = (int32_t)((uint32_t)((int32_t)n + 127) << 23)};
    return given > -87.0f ? (y * r * r + r + 1.0f) * power.value : given != given ? given : 0.0f;
}

static inline float outer_of(const Form *f, const uint8_t *base, int64_t row) { /* the second scale of a row's block */
    return ((const float *)(base + f->outer))[row / BLOCK];
}

/* Add the bias to n results, `stride` apart, and store them for one slot from row `row` on. */
static inline void put(const Gemm *m, const Job *job, int64_t slot, int64_t row, int64_t n, const float *from, int stride) {
    const uint16_t *bias = job->bias ? job->bias + row : 0;
    int64_t at = slot * job->rows + row;
    for (int64_t i = 0; i < n; i++) {
        float value = bias ? from[i * stride] + widen(bias[i]) : from[i * stride];
        if (m->out_bf16)
            ((uint16_t *)job->out)[at + i] = narrow(value);
        else
            ((float *)job->out)[at + i] = value;
    }
}

/* Make room for `size` bytes, aligned to pages; contents are lost. Returns 0, or 1 when memory is short. */
static inline int grow(Arena *arena, size_t size) {
    if (arena->size >= size) return 0;
    free(arena->at);
    arena->at = 0, arena->size = 0;
    void *at;
    if (posix_memalign(&at, 4096, size)) return 1;
    arena->at = at, arena->size = size;
    return 0;
}

/* For each of `heads` heads, `tokens` rows of x times a matrix of its own: out = M x for M [out_cols][in], or with `sums`
 * out = M^T x for M [in][out_cols]. M is BF16 at matrix + head * matrix_at[0], rows matrix_at[1] apart; or it is unpacked
 * from rows [first + head * matrix_at[0], ...) of a packed matrix, of which it then is the transpose. */
typedef struct {
    const uint16_t *x, *matrix;
    uint16_t *out;
    int64_t heads, tokens, in, out_cols, sums;
    int64_t x_at[2], out_at[2], matrix_at[2]; /* x, out: of head and token */
    const uint8_t *base;                      /* of a packed matrix; 0: M is BF16 */
    const Form *form;
    int64_t first;
} Heads;

/* Returns 0; 1 when memory is short; 2 for a form without a kernel. */
int moepack_affine_heads(const Heads *m, int64_t threads);

/* Call `work` on `threads` threads at once. A call may begin when others have done all the work. */
void moepack_parallel(void (*work)(void *), void *argument, int threads);

/* Call `piece` with every number below n, on up to `threads` threads, each of which has `each` bytes from `rooms` on. */
typedef void Piece(const void *of, int64_t number, void *room);
void moepack_pieces(Piece *piece, const void *of, int64_t n, int64_t threads, void *rooms, size_t each);

/* The loops in use (product.c). */
extern const Loops *moepack_floats, *moepack_fixed, *moepack_fp8[2]; /* fp8: for float32 and BF16 activations */
extern Unpacking *moepack_unpacking;
/* Whether hints to fetch lines ahead are given where the processor follows a stream by itself. On one thread of a Sapphire
 * Rapids BF16, 8 and 4 bits with AVX2 take 0.79, 0.73 and 0.71 times as long with hints; on a Zen 4 1.1 to 1.2 times. On
 * a Zen 3 experts of 4 bits take 0.8 to 0.9 times as long with them, on one thread and on two, and BF16 as long. */
extern int moepack_hints;

/* Run jobs straight from their bytes. `seat`: a zero for each activation. Returns 0; 1 when memory is short. */
int moepack_direct_product(const Gemm *m, Job *jobs, int64_t n, int64_t slots, const int64_t *order, int64_t *seat,
                           Arena *arena);

/* The most bytes of an arena that n jobs of `slots` slots in `tasks` tasks take. */
size_t moepack_direct_kept(const Gemm *m, int64_t slots, int64_t n, int64_t tasks);

typedef struct Delta Delta; /* delta.c */

/* Runs linear attention by the gated delta rule. Returns 0; or 1 when memory is short, having done nothing. */
int moepack_delta(const Delta *m, int64_t threads);

/* The index of the functions of LEVELS_OF that are used, and whether the processor multiplies BF16 (product.c). */
extern int moepack_vectors, moepack_bf16;

/* Use tiles up to `limit`, which the processor has: 0 none, 1 AVX-512 BF16, 2 AMX. Returns the level in use. */
int moepack_tiles_level(int limit);

/* Run jobs of many slots, BF16 activations; unpacks weights into tiles. Returns 0; 1 when memory is short. */
int moepack_tiles_product(const Gemm *m, const Job *jobs, int64_t n, const int64_t *order, Arena *arena);

/* The most bytes of an arena that moepack_tiles_product takes if no expert has more than `most` slots. */
size_t moepack_tiles_kept(const Gemm *m, int64_t most);
#endif
