// Kernels for the instructions that every processor of the architecture has.
#include "kernel_table.h"

namespace selective_scan::cpu {

constexpr Capability kDefaultCapability = make_capability<Baseline>("default");

}  // namespace selective_scan::cpu
