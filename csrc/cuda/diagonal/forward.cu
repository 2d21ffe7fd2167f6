#include "scan.cuh"

namespace selective_scan::cuda {

cudaError_t diagonal_scan_forward(const DiagonalForwardParams& params, const ScratchMemory& memory,
                                  cudaStream_t stream) {
  return diagonal::run<ForwardStep>(params, params.b, memory, stream);
}

}  // namespace selective_scan::cuda
