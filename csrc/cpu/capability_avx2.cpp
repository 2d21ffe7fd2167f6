// Kernels for x86-64 processors with AVX2 and FMA.
#include "simd/standard_headers.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "kernel_table.h"

namespace selective_scan::cpu {

constexpr Capability kAvx2Capability = make_capability<Avx2>("avx2");

}  // namespace selective_scan::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
