// Kernels for x86-64 processors with AVX-512.
#include "simd/standard_headers.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl")
#endif

#include "kernel_table.h"

namespace selective_scan::cpu {

constexpr Capability kAvx512Capability = make_capability<Avx512>("avx512");

}  // namespace selective_scan::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
