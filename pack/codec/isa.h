/* Which of the levels of isa.py this processor has: 0 plain C, 1 AVX2, 2 AVX-512, 3 AVX-512 VNNI (with VBMI), 4 AVX-512 BF16,
 * 5 AMX. */
#ifndef MOEPACK_ISA_H
#define MOEPACK_ISA_H

enum { ISA_PLAIN, ISA_AVX2, ISA_AVX512, ISA_AVX512_VNNI, ISA_AVX512_BF16, ISA_AMX };

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline int isa_level(void) {
    unsigned a, b, c, d;
    uint64_t states = 0;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ISA_PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq"))
        return ISA_AVX2;
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512vbmi")) return ISA_AVX512;
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11 /* the first that know what follows */
    if (!__builtin_cpu_supports("avx512bf16")) return ISA_AVX512_VNNI;
    /* cpuid 7: AMX-TILE and AMX-BF16; ARCH_GET_XCOMP_SUPP: whether the system lends the tiles' state, XFEATURE 18 */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 22 & 1) ||
        syscall(SYS_arch_prctl, 0x1021, &states) || !(states >> 18 & 1))
        return ISA_AVX512_BF16;
    return ISA_AMX;
#else
    (void)a, (void)b, (void)c, (void)d, (void)states;
    return ISA_AVX512_VNNI;
#endif
}
#else
static inline int isa_level(void) { return ISA_PLAIN; }
#endif
#endif
