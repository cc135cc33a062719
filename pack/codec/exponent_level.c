/* The instruction set that the exponent codec's loops use. */
#include "exponent.h"
#include "isa.h"

int moepack_exponent_loops = 0;
const char *moepack_exponent_sources = MOEPACK_SOURCES; /* the digest of the files that this library is made of */

/* 0: plain C; 1: AVX2; 2: AVX-512. Returns the level taken: the best up to `limit`. */
int moepack_exponent_level(int limit) {
    int best = 0;
#ifdef HAVE_AVX512
    if (isa_level() >= ISA_AVX2 && __builtin_cpu_supports("bmi2")) best = 1;
    if (isa_level() >= ISA_AVX512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        best = 2;
#endif
    moepack_exponent_loops = best < limit ? best : limit;
    return moepack_exponent_loops;
}

int moepack_isa_level(void) { return isa_level(); }
