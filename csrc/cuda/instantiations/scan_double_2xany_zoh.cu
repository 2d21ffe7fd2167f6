// Written by generate_instantiations.py; do not edit.
#include "../general/backward.cuh"
#include "../general/forward.cuh"

namespace selective_scan::cuda {

template struct Scan<double, 2, kAnyLanes, Method::kZoh>;

}  // namespace selective_scan::cuda
