// Written by generate_instantiations.py; do not edit.
#include "../streamed/backward.cuh"

namespace selective_scan::cuda::streamed {

template struct StreamedBackward<float, 2, 2, true, Method::kPoly, LaneMap::kSteps>;
template struct StreamedBackward<float, 2, 2, true, Method::kPoly, LaneMap::kChannels>;
template struct StreamedBackward<float, 2, 4, true, Method::kPoly, LaneMap::kSteps>;
template struct StreamedBackward<float, 2, 4, true, Method::kPoly, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
