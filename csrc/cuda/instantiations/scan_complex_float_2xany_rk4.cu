// Written by generate_instantiations.py; do not edit.
#include "../general/backward.cuh"
#include "../general/forward.cuh"

namespace selective_scan::cuda {

template struct Scan<Complex<float>, 2, kAnyLanes, Method::kRk4>;

}  // namespace selective_scan::cuda
