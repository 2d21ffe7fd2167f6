// The instruction set of a source, which defines SELECTIVE_SCAN_AVX2, SELECTIVE_SCAN_AVX512 or
// neither and includes a part (such as step.h). The part includes this file twice: the code in
// between is compiled for the instruction set, whose type is SELECTIVE_SCAN_INSTRUCTION_SET. On an
// architecture without these instructions nothing is defined, and the part is empty.
//
// Processors with AVX-512 compute in fp64 with the kernels of AVX2: fp64 serves checks, and kernels
// of its own would be a sixth of the library. SELECTIVE_SCAN_DOUBLE_KERNELS names the table to
// use, and SELECTIVE_SCAN_DEFINES_DOUBLES is defined where the part instantiates what is in it.
#if !defined(SELECTIVE_SCAN_INSTRUCTION_SET)

#include "../simd/standard_headers.h"

#if defined(SELECTIVE_SCAN_AVX512) && defined(__x86_64__)
#define SELECTIVE_SCAN_INSTRUCTION_SET Avx512
#define SELECTIVE_SCAN_CAPABILITY kAvx512Capability
#define SELECTIVE_SCAN_DOUBLE_KERNELS kAvx2DoubleKernels
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl")
#endif
#elif defined(SELECTIVE_SCAN_AVX2) && defined(__x86_64__)
#define SELECTIVE_SCAN_INSTRUCTION_SET Avx2
#define SELECTIVE_SCAN_CAPABILITY kAvx2Capability
#define SELECTIVE_SCAN_DOUBLE_KERNELS kAvx2DoubleKernels
#define SELECTIVE_SCAN_DEFINES_DOUBLES
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#elif !defined(SELECTIVE_SCAN_AVX512) && !defined(SELECTIVE_SCAN_AVX2)
#define SELECTIVE_SCAN_INSTRUCTION_SET Baseline
#define SELECTIVE_SCAN_CAPABILITY kDefaultCapability
#define SELECTIVE_SCAN_DOUBLE_KERNELS kDefaultDoubleKernels
#define SELECTIVE_SCAN_DEFINES_DOUBLES
// Few processors of x86-64 lack AVX2: -O1 spares almost half of the time to compile for them.
#if defined(__x86_64__) && defined(__OPTIMIZE__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
#endif

#elif defined(__clang__) && (defined(SELECTIVE_SCAN_AVX512) || defined(SELECTIVE_SCAN_AVX2))
#pragma clang attribute pop
#endif
