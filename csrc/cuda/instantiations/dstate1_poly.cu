// Written by generate_instantiations.py; do not edit.
#include "../dstate1/backward.cuh"
#include "../dstate1/forward.cuh"

namespace selective_scan::cuda::dstate1 {

template struct Kernels<Method::kPoly, Vectors<float>>;
template struct Kernels<Method::kPoly, Vectors<BFloat16>>;
template struct Kernels<Method::kPoly, Vectors<Half>>;
template struct Kernels<Method::kPoly, Scattered<float>>;
template struct Kernels<Method::kPoly, Scattered<BFloat16>>;
template struct Kernels<Method::kPoly, Scattered<Half>>;

}  // namespace selective_scan::cuda::dstate1
