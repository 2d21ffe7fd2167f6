// Written by generate_instantiations.py; do not edit.
#include "../streamed/forward.cuh"
#include "../streamed/summarize.cuh"

namespace selective_scan::cuda::streamed {

template struct StreamedForward<float, 8, 2, Method::kZoh>;

}  // namespace selective_scan::cuda::streamed
