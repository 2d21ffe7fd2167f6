// Instantiates a token's step through a stack of layers for the including source's instruction set.
#include "instructions.h"

#if defined(SELECTIVE_SCAN_INSTRUCTION_SET)

#include "../step/step.h"

namespace selective_scan::cpu {

template struct StackStep<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>;
#if defined(SELECTIVE_SCAN_DEFINES_DOUBLES)
template struct StackStep<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>;
#endif

}  // namespace selective_scan::cpu

#endif

#include "instructions.h"
