/* Root mean square normalisation of BF16 rows, in one pass over each, as models' own modules do it in eight operations.
 *
 * Sums are float32 in LANES parts, so the mean differs from torch's in its last bit or two; whether results agree with a
 * module's is for the caller to see (dense/norms.py).
 */
#include <math.h>

#include "affine.h"

#define LANES 32

/* How the weight comes in: rounded to BF16 before it, in float32 after it, or as 1 + weight in float32. */
enum { ROUNDED, WIDE, PLUS_ONE };

/* out[rows][cols] of x[rows][cols], weight[cols], all BF16; rows are `x_row` numbers apart in x. */
void moepack_affine_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t cols, int64_t x_row,
                         int64_t form, double epsilon) {
    for (int64_t r = 0; r < rows; r++, x += x_row, out += cols) {
        float sums[LANES] = {0}, sum = 0.0f;
        int64_t c = 0;
        for (; c + LANES <= cols; c += LANES)
            for (int i = 0; i < LANES; i++) {
                float v = widen(x[c + i]);
                sums[i] += v * v;
            }
        for (; c < cols; c++) sums[c % LANES] += widen(x[c]) * widen(x[c]);
        for (int i = 0; i < LANES; i++) sum += sums[i];
        const float by = 1.0f / sqrtf(sum / (float)cols + (float)epsilon);
        if (form == ROUNDED)
            for (c = 0; c < cols; c++) out[c] = narrow(widen(weight[c]) * widen(narrow(widen(x[c]) * by)));
        else if (form == WIDE)
            for (c = 0; c < cols; c++) out[c] = narrow(widen(weight[c]) * (widen(x[c]) * by));
        else
            for (c = 0; c < cols; c++) out[c] = narrow((1.0f + widen(weight[c])) * (widen(x[c]) * by));
    }
}
