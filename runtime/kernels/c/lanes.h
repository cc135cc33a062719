/* Sums in lanes, for the work between products (small.c, states.h). */
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
#endif
