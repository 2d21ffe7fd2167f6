// Written by generate_instantiations.py; do not edit.
#include "../streamed/backward.cuh"

namespace selective_scan::cuda::streamed {

template struct StreamedBackward<Complex<float>, 3, 2, true, Method::kZoh, LaneMap::kSteps>;
template struct StreamedBackward<Complex<float>, 3, 2, true, Method::kZoh, LaneMap::kChannels>;
template struct StreamedBackward<Complex<float>, 3, 4, true, Method::kZoh, LaneMap::kSteps>;
template struct StreamedBackward<Complex<float>, 3, 4, true, Method::kZoh, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
