// Written by generate_instantiations.py; do not edit.
#include "../streamed/forward.cuh"
#include "../streamed/summarize.cuh"

namespace selective_scan::cuda::streamed {

template struct StreamedForward<Complex<float>, 2, 3, Method::kFoh>;

}  // namespace selective_scan::cuda::streamed
