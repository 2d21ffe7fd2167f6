// The CUDA backend of the diagonal scan ops.

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "diagonal_ops.h"
#include "op_namespace.h"

namespace selective_scan::op {
namespace {

struct CudaBackend {
  explicit CudaBackend(const Tensor& b) : stream(b) {}

  void check(const PackedSequences&) const {}  // whose boundaries the kernels clamp
  template <class Params>
  int64_t num_segments(const Params& params) const {
    return cuda::num_segments(params);
  }
  void launch(const DiagonalForwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::diagonal_scan_forward(params, memory, stream));
  }
  void launch(const DiagonalBackwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::diagonal_scan_backward(params, memory, stream));
  }

  CudaStream stream;
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  m.impl("diagonal_scan_fwd", TORCH_BOX(&diagonal_scan_fwd<CudaBackend>));
  m.impl("diagonal_scan_bwd", TORCH_BOX(&diagonal_scan_bwd<CudaBackend>));
}

}  // namespace selective_scan::op
