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

template <class Poles>
struct CudaBackend : Poles {
  static constexpr int64_t kMaxDstate =
      Poles::kIsMatrixA ? cuda::kMaxMatrixDstate : cuda::kMaxDstate;

  explicit CudaBackend(const Tensor& u) : stream(u) {}

  void launch(const typename Poles::Forward& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::scan_forward(params, memory, stream));
  }
  void launch(const typename Poles::Backward& params, const cuda::ScratchMemory& memory) const {
    STD_CUDA_CHECK(cuda::scan_backward(params, memory, stream));
  }
  void launch(const ForwardParams& params, const cuda::ScratchMemory& memory,
              const StateExchange& exchange) const {
    STD_CUDA_CHECK(cuda::scan_forward(params, memory, stream, &exchange));
  }
  void launch(const BackwardParams& params, const cuda::ScratchMemory& memory,
              const StateExchange& exchange) const {
    STD_CUDA_CHECK(cuda::scan_backward(params, memory, stream, &exchange));
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

std::string cuda_device_facts(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  std::string text;
  STD_CUDA_CHECK(cuda::describe_device(text));
  return text;
}

}  // namespace

const ScanOps kCudaScanOps = scan_ops<CudaBackend<DiagonalA>>();

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def("cuda_build_info() -> str");
  m.def("cuda_driver_version() -> int");
  m.def("cuda_device_facts(int device) -> str");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cuda_build_info", TORCH_BOX(&cuda_build_info));
  m.impl("cuda_driver_version", TORCH_BOX(&cuda_driver_version));
  m.impl("cuda_device_facts", TORCH_BOX(&cuda_device_facts));
}

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_scans<CudaBackend<DiagonalA>, CudaBackend<MatrixA>>(m);
  implement_cross_scan<kCudaScanOps>(m);
}

}  // namespace selective_scan::op
