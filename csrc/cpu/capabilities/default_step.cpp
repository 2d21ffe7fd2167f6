// A token's step through a stack of layers for the instructions that every processor of the
// architecture has.
#include "../step/step.h"

namespace selective_scan::cpu {

template struct StackStep<Vec<float, Baseline>>;
template struct StackStep<Vec<double, Baseline>>;

}  // namespace selective_scan::cpu
