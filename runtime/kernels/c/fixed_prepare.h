/* How activations become integers, for affine_fixed.h, which includes this file and explains both. */

/* The index of each element's source within 32 columns, for planes of 1, 2, 4 and 8 bits. Field k of a word holds the
 * word's columns k, k + FIELDS, ... */
#if PARTS == 2
static uint8_t NAME(orders)[4][64];
#else
static uint16_t NAME(orders)[4][32];
#endif

#ifdef PAIRS
static uint8_t NAME(byte_orders)[3][64]; /* as with two PARTS, for planes of 1, 2 and 4 bits */
#endif

/* The source of element i of a plane of p bits, whose fields are multiplied as `parts` parts. */
static int NAME(source)(const int p, const int parts, const int i) {
    const int each = 2 * parts, word32 = i / each, fields = 16 / parts / p; /* elements of a 32-bit word; fields of one */
    const int field = word32 / parts, part = word32 % parts, column = field / fields * (32 / p);
    const int at = column + field % fields + i % each * fields;
    return parts == 2 ? 2 * at + 1 - part : at;
}

__attribute__((constructor)) static void NAME(make_orders)(void) {
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 32 * PARTS; i++) NAME(orders)[k][i] = NAME(source)(1 << k, PARTS, i);
#ifdef PAIRS
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 64; i++) NAME(byte_orders)[k][i] = (uint8_t)NAME(source)(1 << k, 2, i);
#endif
}


CALLED void NAME(prepare_fixed)(const Gemm *m, const void *from, Prepared *p) {
    const int64_t cols = m->cols;
    p->at = from;
    if (!p->units) return;
    for (int64_t b = 0; b * FIXED < cols; b++) {
        const uint16_t *x = (const uint16_t *)from + b * FIXED;
        const int64_t n = least(FIXED, cols - b * FIXED), padded = 32 * ceil_div(n, 32);
        int16_t fixed[FIXED] = {0};
        uint16_t most = 0;
        for (int64_t c = 0; c < n; c++) {
            const uint16_t size = x[c] & 0x7FFF;
            most = size > most ? size : most;
        }
        const int power = most >> 7 < 15 ? 15 : most >> 7; /* of the greatest, 127 added; below 2^-112 unit stays normal */
        const uint32_t by = (uint32_t)(268 - power) << 23, unit = most < 0x7F80 ? (uint32_t)(power - 14) << 23 : 0x7FC00000;
        memcpy(p->units + b, &unit, 4);
        if (most && most < 0x7F80) {
            float factor;
            memcpy(&factor, &by, 4);
            for (int64_t c = 0; c < n; c++) {
                const float shifted = widen(x[c]) * factor + 12582912.0f; /* 3 * 2^22: rounds to even in the last bits */
                int32_t word;
                memcpy(&word, &shifted, 4);
                word -= 0x4B400000;
                fixed[c] = (int16_t)(word > 32639 ? 32639 : word); /* 127 * 256 + 127 */
            }
        }
        for (int k = 0; k < (p->fixed[4] || p->fixed[6] ? 5 : 3); k++) { /* the last two are for FP4 */
            const int width = k < 3 ? 32 << k : 16 << (k - 3);
            for (int64_t g = 0; g * width < n; g++) {
                int32_t sum = 0;
                for (int c = 0; c < width; c++) sum += fixed[g * width + c];
                p->totals[k][b * (FIXED / width) + g] = k < 3 ? sum : -12 * sum;
            }
        }
#if PARTS == 2 || defined(PAIRS)
        int16_t halves[FIXED]; /* both bytes signed */
        for (int c = 0; c < FIXED; c++) halves[c] = (int16_t)(((fixed[c] + 128) & 0xFF00) | (fixed[c] & 0xFF));
#else
        const int16_t *halves = fixed;
#endif
        if (p->fixed[7]) /* for trellis codes: words of two columns that are eight apart */
            for (int64_t c = 0; c < padded; c += 16) {
                int16_t *to = (int16_t *)(p->fixed[7] + (b * FIXED + c) / 2);
                for (int i = 0; i < 8; i++) to[2 * i] = fixed[c + i], to[2 * i + 1] = fixed[c + i + 8];
            }
        for (int k = 0; k < 7; k++) {
            if (!p->fixed[k]) continue;
#ifdef TABLES
            if (k == 0) {
                MAKE_TABLES(fixed, padded, (uint8_t *)p->fixed[0] + b * FIXED * 12);
                continue;
            }
#endif
            for (int64_t c = 0; c < padded; c += 32) {
                int32_t *to = p->fixed[k] + (b * FIXED + c) / 2;
#ifdef PAIRS
                if (k < 3 || k == 4)
                    for (int i = 0; i < 64; i++)
                        ((int8_t *)to)[i] = ((const int8_t *)(halves + c))[NAME(byte_orders)[k == 4 ? 2 : k][i]];
                else if (k == 3)
                    ARRANGE(to, fixed + c, NAME(orders)[3]);
#if MANY
                else
                    TURN(to, fixed + c, k == 5 ? 8 : 4);
#endif
#else
                ARRANGE(to, halves + c, NAME(orders)[k == 4 ? 2 : k]);
#endif
            }
        }
    }
}
