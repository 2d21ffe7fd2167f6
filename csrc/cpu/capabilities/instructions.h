// The instruction set of a source, which defines SELECTIVE_SCAN_AVX2, SELECTIVE_SCAN_AVX512 or
// neither and includes a part (such as step.h). The part includes this file twice: the code in
// between is compiled for the instruction set, whose type is SELECTIVE_SCAN_INSTRUCTION_SET. On an
// architecture without these instructions nothing is defined, and the part is empty.
#if !defined(SELECTIVE_SCAN_INSTRUCTION_SET)

#include "../simd/standard_headers.h"

#if defined(SELECTIVE_SCAN_AVX512) && defined(__x86_64__)
#define SELECTIVE_SCAN_INSTRUCTION_SET Avx512
#define SELECTIVE_SCAN_CAPABILITY kAvx512Capability
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl")
#endif
#elif defined(SELECTIVE_SCAN_AVX2) && defined(__x86_64__)
#define SELECTIVE_SCAN_INSTRUCTION_SET Avx2
#define SELECTIVE_SCAN_CAPABILITY kAvx2Capability
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#elif !defined(SELECTIVE_SCAN_AVX512) && !defined(SELECTIVE_SCAN_AVX2)
#define SELECTIVE_SCAN_INSTRUCTION_SET Baseline
#define SELECTIVE_SCAN_CAPABILITY kDefaultCapability
#endif

#elif defined(__clang__) && (defined(SELECTIVE_SCAN_AVX512) || defined(SELECTIVE_SCAN_AVX2))
#pragma clang attribute pop
#endif
