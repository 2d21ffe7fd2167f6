// Written by generate_instantiations.py; do not edit.
#include "../general/backward.cuh"
#include "../general/forward.cuh"

namespace selective_scan::cuda {

template struct Scan<float, 4, 4, Method::kFoh>;

}  // namespace selective_scan::cuda
