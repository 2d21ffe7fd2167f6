#include "scan.cuh"

namespace selective_scan::cuda {

int64_t num_segments(const DiagonalBackwardParams& params) {
  return diagonal::make_segmentation(params, params.dh).segments;
}

int64_t workspace_bytes(const DiagonalBackwardParams& params) {
  return diagonal::workspace_bytes(params, diagonal::make_segmentation(params, params.dh));
}

cudaError_t diagonal_scan_backward(const DiagonalBackwardParams& params, void* workspace,
                                   cudaStream_t stream) {
  return diagonal::launch<BackwardStep>(params, diagonal::make_segmentation(params, params.dh),
                                        workspace, stream);
}

}  // namespace selective_scan::cuda
