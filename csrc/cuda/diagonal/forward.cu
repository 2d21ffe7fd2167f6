#include "scan.cuh"

namespace selective_scan::cuda {

cudaError_t launch(const DiagonalForwardParams& params, const ScratchMemory& memory,
                   cudaStream_t stream) {
  return diagonal::run<ForwardStep>(params, params.b, memory, stream);
}

}  // namespace selective_scan::cuda
