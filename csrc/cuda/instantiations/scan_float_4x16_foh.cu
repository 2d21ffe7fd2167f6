// Written by generate_instantiations.py; do not edit.
#include "../scan_backward.cuh"
#include "../scan_forward.cuh"

namespace selective_scan::cuda {

template struct Scan<float, 4, 4, Method::kFoh>;

}  // namespace selective_scan::cuda
