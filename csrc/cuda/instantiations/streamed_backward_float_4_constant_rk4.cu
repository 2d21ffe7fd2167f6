// Written by generate_instantiations.py; do not edit.
#include "../streamed/backward.cuh"

namespace selective_scan::cuda::streamed {

template struct StreamedBackward<float, 2, 2, false, Method::kRk4, LaneMap::kSteps>;
template struct StreamedBackward<float, 2, 2, false, Method::kRk4, LaneMap::kChannels>;
template struct StreamedBackward<float, 2, 4, false, Method::kRk4, LaneMap::kSteps>;
template struct StreamedBackward<float, 2, 4, false, Method::kRk4, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
