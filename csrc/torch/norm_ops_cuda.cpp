// The CUDA backend of the RMS norm's ops.

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "norm_ops.h"
#include "op_namespace.h"

namespace selective_scan::op {
namespace {

struct CudaBackend {
  static constexpr int64_t kMostChannels = cuda::kMostNormChannels;

  explicit CudaBackend(const Tensor& hidden) : stream(hidden) {}

  void launch(const NormForwardParams& params, const cuda::ScratchMemory&) const {
    STD_CUDA_CHECK(cuda::norm_forward(params, stream));
  }
  void launch(const NormBackwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::norm_backward(params, memory, stream));
  }

  CudaStream stream;
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_norm<CudaBackend>(m);
}

}  // namespace selective_scan::op
