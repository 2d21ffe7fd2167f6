// The CUDA backend of the ops whose schemas ops_cpu.cpp registers.

#include "../cuda/launch.h"
#include "build_info.h"
#include "cross_scan.h"
#include "cuda_stream.h"
#include "joined_text.h"
#include "op_namespace.h"
#include "scan_ops.h"

namespace selective_scan::op {
namespace {

struct CudaBackend : DiagonalA {
  static constexpr int64_t kMaxDstate = cuda::kMaxDstate;

  explicit CudaBackend(const Tensor& u) : stream(u) {}

  void launch(const ForwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::scan_forward(params, memory, stream));
  }
  void launch(const BackwardParams& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::scan_backward(params, memory, stream));
  }
  void check(const PackedSequences&) const {}  // whose boundaries the kernels clamp

  CudaStream stream;
};

std::string cuda_build_info() {
  return joined({"{\"version\": \"", SELECTIVE_SCAN_VERSION, "\", \"compiler\": \"",
                 compiler_name(), "\", \"cuda\": \"", CUDART_VERSION / 1000, ".",
                 CUDART_VERSION % 1000 / 10, "\", \"architectures\": \"",
                 SELECTIVE_SCAN_CUDA_ARCHITECTURES, "\", \"methods\": \"", built_methods(), "\"}"});
}

/// The CUDA version of the driver, as CUDART_VERSION is written; 0 without a driver.
int64_t cuda_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace

const ScanOps kCudaScanOps{&selective_scan_fwd<CudaBackend>, &selective_scan_bwd_out<CudaBackend>};

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def("cuda_build_info() -> str");
  m.def("cuda_driver_version() -> int");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cuda_build_info", TORCH_BOX(&cuda_build_info));
  m.impl("cuda_driver_version", TORCH_BOX(&cuda_driver_version));
}

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_forward<&selective_scan_fwd<CudaBackend>>(m, "selective_scan_fwd");
  m.impl("selective_scan_bwd", TORCH_BOX(&selective_scan_bwd<CudaBackend>));
  m.impl("selective_scan_bwd_out", TORCH_BOX(&selective_scan_bwd_out<CudaBackend>));
  m.impl("selective_scan_state_gradient", TORCH_BOX(&selective_scan_state_gradient<CudaBackend>));
  m.impl("selective_scan_segment_map", TORCH_BOX(&selective_scan_segment_map<CudaBackend>));
  m.impl("cross_scan_fwd", TORCH_BOX(&cross_scan_fwd<kCudaScanOps>));
  m.impl("cross_scan_bwd", TORCH_BOX(&cross_scan_bwd<kCudaScanOps>));
}

}  // namespace selective_scan::op
