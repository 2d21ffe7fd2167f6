// Sweeps of real states for the instructions that every processor of the architecture has.
#include "../selective/sweep_kernels.h"

namespace selective_scan::cpu {

template struct Sweeps<Vec<float, Baseline>>;
template struct Sweeps<Vec<double, Baseline>>;

}  // namespace selective_scan::cpu
