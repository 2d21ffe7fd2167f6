// Written by generate_instantiations.py; do not edit.
#include "../streamed/team_backward.cuh"

namespace selective_scan::cuda::streamed {

template struct TeamBackward<4, 2, Method::kZoh, LaneMap::kSteps>;
template struct TeamBackward<4, 2, Method::kZoh, LaneMap::kChannels>;
template struct TeamBackward<4, 4, Method::kZoh, LaneMap::kSteps>;
template struct TeamBackward<4, 4, Method::kZoh, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
