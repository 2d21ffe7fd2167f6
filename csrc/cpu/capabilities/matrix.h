// Instantiates the scan with full state matrices for the including source's instruction set.
#include "instructions.h"

#if defined(SELECTIVE_SCAN_INSTRUCTION_SET)

#include "../matrix/kernel_table.h"

namespace selective_scan::cpu {

template struct MatrixScan<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>;
template struct MatrixScan<Complex<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>>;
#if defined(SELECTIVE_SCAN_DEFINES_DOUBLES)
template struct MatrixScan<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>;
template struct MatrixScan<Complex<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>>;
#endif

}  // namespace selective_scan::cpu

#endif

#include "instructions.h"
