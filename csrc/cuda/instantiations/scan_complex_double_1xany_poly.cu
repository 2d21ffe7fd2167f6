// Written by generate_instantiations.py; do not edit.
#include "../scan_backward.cuh"
#include "../scan_forward.cuh"

namespace selective_scan::cuda {

template struct Scan<Complex<double>, 1, kAnyLanes, Method::kPoly>;

}  // namespace selective_scan::cuda
