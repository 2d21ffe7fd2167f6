// Written by generate_instantiations.py; do not edit.
#include "../relay/backward.cuh"
#include "../relay/forward.cuh"
#include "../relay/rounds.cuh"

namespace selective_scan::cuda::relay {

template struct RelayForward<4, 16, 1, Vectors<2>, Method::kRk4>;
template struct RelayForward<4, 16, 1, Vectors<4>, Method::kRk4>;
template struct RelayForward<4, 16, 1, Elements, Method::kRk4>;
template struct RelayForward<4, 16, 4, Vectors<2>, Method::kRk4>;
template struct RelayForward<4, 16, 4, Vectors<4>, Method::kRk4>;
template struct RelayForward<4, 16, 4, Elements, Method::kRk4>;
template struct RoundsForward<DType::kFloat32, Method::kRk4>;
template struct RoundsForward<DType::kFloat16, Method::kRk4>;
template struct RoundsForward<DType::kBFloat16, Method::kRk4>;
template struct RelayBackward<Vectors<2>, Method::kRk4>;
template struct RelayBackward<Vectors<4>, Method::kRk4>;
template struct RelayBackward<Elements, Method::kRk4>;

}  // namespace selective_scan::cuda::relay
