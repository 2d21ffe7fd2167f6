// The CUDA backend of the ops whose schemas ops_cpu.cpp registers. That of a layer and that of
// s6_step have files of their own.

#include "../cuda/launch.h"
#include "build_info.h"
#include "conv_ops.h"
#include "cross_scan.h"
#include "cuda_stream.h"
#include "diagonal_ops.h"
#include "joined_text.h"
#include "norm_ops.h"
#include "op_namespace.h"
#include "prefill_ops.h"
#include "scan_ops.h"
#include "unitary_ops.h"
#include "update_ops.h"

namespace selective_scan::op {
namespace {

/// What runs on the device and the stream of a tensor.
struct CudaBackend {
  static constexpr int64_t kMaxDstate = cuda::kMaxDstate;
  static constexpr int64_t kMostChannels = cuda::kMostNormChannels;
  static constexpr bool kSavesStates = true;

  explicit CudaBackend(const Tensor& tensor) : stream(tensor) {}

  /// The host does not read values. The kernels clamp boundaries, take indices out of range for
  /// padding, and do no harm whatever the values are.
  void check(const auto&) const {}
  int64_t num_segments(const auto& params) const { return cuda::num_segments(params); }

  /// Only scans with a diagonal A take a StateExchange.
  template <class Params, class... Exchange>
  void launch(const Params& params, const cuda::ScratchMemory& memory,
              const Exchange&... exchange) const
    requires requires { cuda::launch(params, memory, cudaStream_t{}, &exchange...); }
  {
    STD_CUDA_CHECK(cuda::launch(params, memory, stream, &exchange...));
  }

  CudaStream stream;
};

template <class Poles>
struct ScanBackend : Poles, CudaBackend {
  static constexpr int64_t kMaxDstate =
      Poles::kIsMatrixA ? cuda::kMaxMatrixDstate : cuda::kMaxDstate;

  using CudaBackend::CudaBackend;
};

struct UnitaryBackend : CudaBackend {
  static constexpr int64_t kMaxDstate = cuda::kMaxUnitaryDstate;
  /// Large enough for the matrix product and the scan to run at full speed.
  static constexpr int64_t kThetaBytes = int64_t{256} << 20;
  static constexpr int64_t kLanes = 1;
  static constexpr bool kChannelsLast = false;

  using CudaBackend::CudaBackend;
};

std::string cuda_build_info() {
  return joined("{\"version\": \"", SELECTIVE_SCAN_VERSION, "\", \"compiler\": \"", compiler_name(),
                "\", \"cuda\": \"", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10,
                "\", \"architectures\": \"", SELECTIVE_SCAN_CUDA_ARCHITECTURES,
                "\", \"methods\": \"", built_methods(), "\"}");
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

const ScanOps kCudaScanOps = scan_ops<ScanBackend<DiagonalA>>();
const ConvOps kCudaConvOps{&causal_conv1d_fwd<CudaBackend>,
                           &causal_conv1d_bwd<CudaBackend, Tensor>};

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
  implement_scans<ScanBackend<DiagonalA>, ScanBackend<MatrixA>>(m);
  implement_cross_scan<kCudaScanOps>(m);
  implement_prefill<CudaBackend>(m);
  implement_update<CudaBackend>(m);
  implement_convolution<CudaBackend>(m);
  implement_diagonal_scan<CudaBackend>(m);
  implement_unitary_scan<UnitaryBackend>(m);
  implement_norm<CudaBackend>(m);
}

}  // namespace selective_scan::op
