// Instantiates the sweeps of real states for the including source's instruction set.
#include "instructions.h"

#if defined(SELECTIVE_SCAN_INSTRUCTION_SET)

#include "../selective/sweep_kernels.h"

namespace selective_scan::cpu {

template struct Sweeps<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>;
#if defined(SELECTIVE_SCAN_DEFINES_DOUBLES)
template struct Sweeps<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>;
#endif

}  // namespace selective_scan::cpu

#endif

#include "instructions.h"
