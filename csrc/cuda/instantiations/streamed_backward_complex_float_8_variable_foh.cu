// Written by generate_instantiations.py; do not edit.
#include "../streamed/backward.cuh"

namespace selective_scan::cuda::streamed {

template struct StreamedBackward<Complex<float>, 3, 2, true, Method::kFoh, LaneMap::kSteps>;
template struct StreamedBackward<Complex<float>, 3, 2, true, Method::kFoh, LaneMap::kChannels>;
template struct StreamedBackward<Complex<float>, 3, 4, true, Method::kFoh, LaneMap::kSteps>;
template struct StreamedBackward<Complex<float>, 3, 4, true, Method::kFoh, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
