// Written by generate_instantiations.py; do not edit.
#include "../dstate1/backward.cuh"
#include "../dstate1/forward.cuh"

namespace selective_scan::cuda::dstate1 {

template struct Kernels<Method::kHighorder, Vectors<float>>;
template struct Kernels<Method::kHighorder, Vectors<BFloat16>>;
template struct Kernels<Method::kHighorder, Vectors<Half>>;
template struct Kernels<Method::kHighorder, Scattered<float>>;
template struct Kernels<Method::kHighorder, Scattered<BFloat16>>;
template struct Kernels<Method::kHighorder, Scattered<Half>>;

}  // namespace selective_scan::cuda::dstate1
