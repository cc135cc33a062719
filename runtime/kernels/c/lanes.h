/* Sums in lanes, and e^x in vector code, for the work between products (small.c, delta.c). */
#ifndef MOEPACK_LANES_H
#define MOEPACK_LANES_H
#include "gemm.h"

#define LANES 16
#define SMALL static inline __attribute__((always_inline))

/* The sum of LANES parts, halves added to halves: additions of one sum would each wait for the one before. */
SMALL float total(float *parts) {
    for (int i = 0; i < 8; i++) parts[i] += parts[i + 8];
    for (int i = 0; i < 4; i++) parts[i] += parts[i + 4];
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

/* e^x of x <= 0, within 2 units in the last place; 0 below -87. A loop of it becomes vector code, one of expf does not.
 * x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial in r is that of the Cephes library's expf. */
SMALL float exponential(float given) {
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
#endif
