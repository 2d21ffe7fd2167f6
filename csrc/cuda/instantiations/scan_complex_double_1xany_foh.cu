// Written by generate_instantiations.py; do not edit.
#include "../general/backward.cuh"
#include "../general/forward.cuh"

namespace selective_scan::cuda {

template struct Scan<Complex<double>, 1, kAnyLanes, Method::kFoh>;

}  // namespace selective_scan::cuda
