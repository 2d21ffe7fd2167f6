// Written by generate_instantiations.py; do not edit.
#include "../dstate1/backward.cuh"
#include "../dstate1/forward.cuh"

namespace selective_scan::cuda::dstate1 {

template struct Kernels<Method::kRk4, Vectors<float>>;
template struct Kernels<Method::kRk4, Vectors<BFloat16>>;
template struct Kernels<Method::kRk4, Vectors<Half>>;
template struct Kernels<Method::kRk4, Scattered<float>>;
template struct Kernels<Method::kRk4, Scattered<BFloat16>>;
template struct Kernels<Method::kRk4, Scattered<Half>>;

}  // namespace selective_scan::cuda::dstate1
