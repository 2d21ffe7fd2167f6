// Written by generate_instantiations.py; do not edit.
#include "../relay/backward.cuh"
#include "../relay/forward.cuh"
#include "../relay/rounds.cuh"

namespace selective_scan::cuda::relay {

template struct RelayForward<4, 16, 1, Vectors<2>, Method::kBilinear>;
template struct RelayForward<4, 16, 1, Vectors<4>, Method::kBilinear>;
template struct RelayForward<4, 16, 1, Elements, Method::kBilinear>;
template struct RelayForward<4, 16, 4, Vectors<2>, Method::kBilinear>;
template struct RelayForward<4, 16, 4, Vectors<4>, Method::kBilinear>;
template struct RelayForward<4, 16, 4, Elements, Method::kBilinear>;
template struct RoundsForward<DType::kFloat32, Method::kBilinear>;
template struct RoundsForward<DType::kFloat16, Method::kBilinear>;
template struct RoundsForward<DType::kBFloat16, Method::kBilinear>;
template struct RelayBackward<Vectors<2>, Method::kBilinear>;
template struct RelayBackward<Vectors<4>, Method::kBilinear>;
template struct RelayBackward<Elements, Method::kBilinear>;

}  // namespace selective_scan::cuda::relay
