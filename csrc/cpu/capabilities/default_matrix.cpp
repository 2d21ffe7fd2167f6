// The scan with full state matrices for the instructions that every processor of the architecture
// has.
#include "../matrix/kernel_table.h"

namespace selective_scan::cpu {

template struct MatrixScan<Vec<float, Baseline>>;
template struct MatrixScan<Vec<double, Baseline>>;
template struct MatrixScan<Complex<Vec<float, Baseline>>>;
template struct MatrixScan<Complex<Vec<double, Baseline>>>;

}  // namespace selective_scan::cpu
