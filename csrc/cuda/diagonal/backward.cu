#include "scan.cuh"

namespace selective_scan::cuda {

int64_t num_segments(const DiagonalBackwardParams& params) {
  return diagonal::make_segmentation(params, params.dh).segments;
}

cudaError_t launch(const DiagonalBackwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream) {
  return diagonal::run<BackwardStep>(params, params.dh, memory, stream);
}

}  // namespace selective_scan::cuda
