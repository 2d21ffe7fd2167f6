// Written by generate_instantiations.py; do not edit.
#include "../dstate1/backward.cuh"
#include "../dstate1/forward.cuh"

namespace selective_scan::cuda::dstate1 {

template struct Kernels<Method::kFoh, Vectors<float>>;
template struct Kernels<Method::kFoh, Vectors<BFloat16>>;
template struct Kernels<Method::kFoh, Vectors<Half>>;
template struct Kernels<Method::kFoh, Scattered<float>>;
template struct Kernels<Method::kFoh, Scattered<BFloat16>>;
template struct Kernels<Method::kFoh, Scattered<Half>>;

}  // namespace selective_scan::cuda::dstate1
