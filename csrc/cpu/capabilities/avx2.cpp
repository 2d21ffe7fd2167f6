// Kernels for x86-64 processors with AVX2 and FMA.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include "begin_avx2.h"

#include "kernel_table.h"

namespace selective_scan::cpu {

constexpr Capability kAvx2Capability = make_capability<Avx2>("avx2");

}  // namespace selective_scan::cpu

#include "end.h"

#endif
