/* What codes and scales stand for, by the macros that affine_rows.h lists; affine_tiles.c has them too. */
#define E2M1_FIELDS 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 /* twice a code's value, plus 12 */
#define UNROLL _Pragma("GCC unroll 16")
/* Small floats by shifting their bits into a float's, whose exponent counts from another number: multiplied by a power of
 * two, they are what they were, denormal ones too. E8M0 is an exponent alone, and 0 stands for 2^-127. */
#define POW2(p) AS_FLOATS(MAXI(SHL(LOADB(p), 23), SETI(1 << 22)))
#define E4M3_SHIFTED(p) AS_FLOATS(AND(SHL(LOADSB(p), 20), SETI(0x87F00000))) /* times 2^-120 */
#define E4M3(p) MUL(E4M3_SHIFTED(p), SET(0x1p120f))
#define HALF(p) MUL(AS_FLOATS(AND(SHL(LOADSH(p), 13), SETI(0x8FFFE000))), SET(0x1p112f))
#define E3M5(p) AS_FLOATS(ADDI(SHL(LOADB(p), 18), SETI(0x3F800000))) /* from 1 on */
/* L scales: bytes of FP4, else by `scales_of`. */
#define SCALE(bits, of, at) \
    ((bits) == MXFP4     ? POW2(at) \
     : (bits) == NVFP4   ? E4M3(at) \
     : (of) == OF_BYTE   ? E3M5(at) \
     : (of) == OF_HALF   ? HALF((const uint16_t *)(at)) \
                         : BF16((const uint16_t *)(at)))
#define CODE_E4M3(w) AS_FLOATS(AND(SRA(SHL(w, 24), 4), SETI(0x87F00000))) /* the low byte, times 2^-120 */
#define E4M3_LOW(w) MUL(CODE_E4M3(w), SET(0x1p120f))

/* The next weight of a trellis in units of its scale. Its code's low bits are the lowest of *w, its third bit is that of
 * *h, and `state` has the windows over both; all move on. */
INLINE F NAME(next_level)(const int bits, I state[2], I *w, I *h) {
    state[0] = XOR(DROP(state[0], 2), SHL(AND(*w, SETI(3)), 14));
    *w = DROP(*w, 2);
    I whole = state[0];
    if (bits == TRELLIS3) {
        state[1] = XOR(DROP(state[1], 1), SHL(AND(*h, SETI(1)), 7));
        *h = DROP(*h, 1);
        whole = XOR(whole, state[1]);
    }
    return FLOATS(SUBI(LEVELS(whole), SETI(TRELLIS_ZERO)));
}
