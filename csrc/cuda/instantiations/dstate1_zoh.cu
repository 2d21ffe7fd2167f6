// Written by generate_instantiations.py; do not edit.
#include "../dstate1/backward.cuh"
#include "../dstate1/forward.cuh"

namespace selective_scan::cuda::dstate1 {

template struct Kernels<Method::kZoh, Vectors<float>>;
template struct Kernels<Method::kZoh, Vectors<BFloat16>>;
template struct Kernels<Method::kZoh, Vectors<Half>>;
template struct Kernels<Method::kZoh, Scattered<float>>;
template struct Kernels<Method::kZoh, Scattered<BFloat16>>;
template struct Kernels<Method::kZoh, Scattered<Half>>;

}  // namespace selective_scan::cuda::dstate1
