// Written by generate_instantiations.py; do not edit.
#include "../streamed/backward.cuh"

namespace selective_scan::cuda::streamed {

template struct StreamedBackward<Complex<float>, 3, 2, true, Method::kBilinear, LaneMap::kSteps>;
template struct StreamedBackward<Complex<float>, 3, 2, true, Method::kBilinear, LaneMap::kChannels>;
template struct StreamedBackward<Complex<float>, 3, 4, true, Method::kBilinear, LaneMap::kSteps>;
template struct StreamedBackward<Complex<float>, 3, 4, true, Method::kBilinear, LaneMap::kChannels>;

}  // namespace selective_scan::cuda::streamed
