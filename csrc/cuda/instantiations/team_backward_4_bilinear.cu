// Written by generate_instantiations.py; do not edit.
#include "../streamed/team_backward.cuh"

namespace selective_scan::cuda::streamed {

template struct TeamBackward<4, 2, Method::kBilinear, LaneMap::kSteps>;
template struct TeamBackward<4, 2, Method::kBilinear, LaneMap::kChannels>;
template struct TeamBackward<4, 4, Method::kBilinear, LaneMap::kSteps>;
template struct TeamBackward<4, 4, Method::kBilinear, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
