// The scan with full state matrices for x86-64 processors with AVX2.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include "begin_avx2.h"

#include "../matrix/kernel_table.h"

namespace selective_scan::cpu {

template struct MatrixScan<Vec<float, Avx2>>;
template struct MatrixScan<Vec<double, Avx2>>;
template struct MatrixScan<Complex<Vec<float, Avx2>>>;
template struct MatrixScan<Complex<Vec<double, Avx2>>>;

}  // namespace selective_scan::cpu

#include "end.h"

#endif
