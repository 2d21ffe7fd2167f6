// The scan with full state matrices for x86-64 processors with AVX-512.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include "begin_avx512.h"

#include "../matrix/kernel_table.h"

namespace selective_scan::cpu {

template struct MatrixScan<Vec<float, Avx512>>;
template struct MatrixScan<Vec<double, Avx512>>;
template struct MatrixScan<Complex<Vec<float, Avx512>>>;
template struct MatrixScan<Complex<Vec<double, Avx512>>>;

}  // namespace selective_scan::cpu

#include "end.h"

#endif
