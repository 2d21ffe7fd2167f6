// The CUDA backend of the ops of the causal convolution.

#include "../cuda/launch.h"
#include "conv_ops.h"
#include "cuda_stream.h"
#include "op_namespace.h"

namespace selective_scan::op {
namespace {

struct CudaBackend {
  explicit CudaBackend(const Tensor& x) : stream(x) {}

  void check(const ConvParams&) const {}
  void check(const ConvPrefillParams&) const {}
  void check(const ConvUpdateParams&) const {}
  void launch(const ConvForwardParams& params, const cuda::ScratchMemory&) const {
    STD_CUDA_CHECK(cuda::causal_conv1d_forward(params, stream));
  }
  void launch(const ConvBackwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::causal_conv1d_backward(params, memory, stream));
  }
  void launch(const ConvPrefillParams& params) const {
    STD_CUDA_CHECK(cuda::causal_conv1d_prefill(params, stream));
  }
  void launch(const ConvUpdateParams& params) const {
    STD_CUDA_CHECK(cuda::causal_conv1d_update(params, stream));
  }

  CudaStream stream;
};

}  // namespace

const ConvOps kCudaConvOps{&causal_conv1d_fwd<CudaBackend>, &causal_conv1d_bwd_out<CudaBackend>};

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_convolution<CudaBackend>(m);
}

}  // namespace selective_scan::op
