// Written by generate_instantiations.py; do not edit.
#include "../dstate1/backward.cuh"
#include "../dstate1/forward.cuh"

namespace selective_scan::cuda::dstate1 {

template struct Kernels<Method::kBilinear, Vectors<float>>;
template struct Kernels<Method::kBilinear, Vectors<BFloat16>>;
template struct Kernels<Method::kBilinear, Vectors<Half>>;
template struct Kernels<Method::kBilinear, Scattered<float>>;
template struct Kernels<Method::kBilinear, Scattered<BFloat16>>;
template struct Kernels<Method::kBilinear, Scattered<Half>>;

}  // namespace selective_scan::cuda::dstate1
