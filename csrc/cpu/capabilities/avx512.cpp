// Kernels for x86-64 processors with AVX-512.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include "begin_avx512.h"

#include "kernel_table.h"

namespace selective_scan::cpu {

constexpr Capability kAvx512Capability = make_capability<Avx512>("avx512");

}  // namespace selective_scan::cpu

#include "end.h"

#endif
