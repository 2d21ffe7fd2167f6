// Written by generate_instantiations.py; do not edit.
#include "../streamed/team_backward.cuh"

namespace selective_scan::cuda::streamed {

template struct TeamBackward<4, 2, Method::kFoh, LaneMap::kSteps>;
template struct TeamBackward<4, 2, Method::kFoh, LaneMap::kChannels>;
template struct TeamBackward<4, 4, Method::kFoh, LaneMap::kSteps>;
template struct TeamBackward<4, 4, Method::kFoh, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
