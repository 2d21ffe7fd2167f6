#include "scan.cuh"

namespace selective_scan::cuda {

int64_t workspace_bytes(const DiagonalForwardParams& params) {
  return diagonal::workspace_bytes(params, diagonal::make_segmentation(params, params.b));
}

cudaError_t diagonal_scan_forward(const DiagonalForwardParams& params, void* workspace,
                                  cudaStream_t stream) {
  return diagonal::launch<ForwardStep>(params, diagonal::make_segmentation(params, params.b),
                                       workspace, stream);
}

}  // namespace selective_scan::cuda
