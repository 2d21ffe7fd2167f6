// The CUDA backend of the ops with full state matrices.

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "op_namespace.h"
#include "scan_ops.h"

namespace selective_scan::op {
namespace {

struct CudaBackend : MatrixA {
  static constexpr int64_t kMaxDstate = cuda::kMaxMatrixDstate;

  explicit CudaBackend(const Tensor& u) : stream(u) {}

  void launch(const MatrixForwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::scan_forward(params, memory, stream));
  }
  void launch(const MatrixBackwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::scan_backward(params, memory, stream));
  }
  void check(const PackedSequences&) const {}

  CudaStream stream;
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_forward<&selective_scan_fwd<CudaBackend>>(m, "matrix_scan_fwd");
  m.impl("matrix_scan_bwd", TORCH_BOX(&selective_scan_bwd<CudaBackend>));
}

}  // namespace selective_scan::op
