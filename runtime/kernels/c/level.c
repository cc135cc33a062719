/* The choice of loops for this processor. */
#include "../../../pack/codec/isa.h"
#include "gemm.h"

const Loops *moepack_floats = &moepack_floats_plain, *moepack_fixed = &moepack_fixed_plain;
const Loops *moepack_fp8[2] = {&moepack_fp8_plain, &moepack_fp8_plain};
Unpacking *moepack_unpacking = moepack_unpack_plain;
int moepack_hints = 0;

/* Use instruction sets up to `limit`, a level of isa.h; returns the level in use. */
int moepack_affine_level(int limit) {
    int best = (int)least(limit, isa_level());
    moepack_floats = &moepack_floats_plain, moepack_fixed = &moepack_fixed_plain;
    moepack_fp8[0] = &moepack_fp8_plain, moepack_unpacking = moepack_unpack_plain;
#ifdef HAVE_X86
    moepack_hints = __builtin_cpu_is("intel") != 0;
    if (best >= ISA_AVX2) {
        moepack_floats = &moepack_floats_avx2, moepack_fixed = &moepack_fixed_avx2;
        moepack_fp8[0] = &moepack_fp8_avx2, moepack_unpacking = moepack_unpack_avx2;
    }
    if (best >= ISA_AVX512) {
        moepack_floats = &moepack_floats_avx512, moepack_fixed = &moepack_fixed_avx512;
        moepack_fp8[0] = &moepack_fp8_avx512, moepack_unpacking = moepack_unpack_avx512;
    }
    if (best >= ISA_AVX512_VNNI) moepack_fixed = &moepack_fixed_vnni;
#endif
    moepack_fp8[1] = best >= ISA_AVX512_BF16 ? &moepack_fp8_bf16 : moepack_fp8[0];
    moepack_small_level(best < ISA_AVX2 ? 0 : best < ISA_AVX512 ? 1 : 2);
    const int below = (int)least(best, ISA_AVX512_VNNI);
    return below + moepack_tiles_level(best - below);
}
