// The CUDA backend of the ops whose schemas ops_cpu.cpp registers.

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>

#include "../cuda/launch.h"
#include "build_info.h"
#include "conv_ops.h"
#include "cross_scan.h"
#include "diagonal_ops.h"
#include "joined_text.h"
#include "layer_stack.h"
#include "mamba_inner.h"
#include "norm_ops.h"
#include "op_namespace.h"
#include "prefill_ops.h"
#include "scan_ops.h"
#include "step_ops.h"
#include "unitary_ops.h"
#include "update_ops.h"

namespace selective_scan::op {
namespace {

/// Makes the device of a tensor current and gives PyTorch's current stream on it.
class CudaStream {
 public:
  explicit CudaStream(const Tensor& tensor) : device_(tensor.get_device_index()), guard_(device_) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &current));
    stream_ = static_cast<cudaStream_t>(current);
  }

  operator cudaStream_t() const { return stream_; }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

/// Runs on the device of a tensor, on its current stream.
struct CudaBackend {
  static constexpr int64_t kMaxDstate = cuda::kMaxDstate;
  static constexpr int64_t kMostChannels = cuda::kMostNormChannels;
  static constexpr bool kSavesStates = true;

  explicit CudaBackend(const Tensor& tensor) : stream(tensor) {}

  /// The host reads no values. The kernels clamp boundaries and treat indices out of range as
  /// padding, so no value can do harm.
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
  /// Large enough for both the matrix product and the scan to run at full speed.
  static constexpr int64_t kThetaBytes = int64_t{256} << 20;
  static constexpr int64_t kLanes = 1;
  static constexpr bool kChannelsLast = false;

  using CudaBackend::CudaBackend;
};

cuda::StepNeeds needs_of(const StepParams& params) {
  cuda::StepNeeds needs;
  STD_CUDA_CHECK(cuda::step_needs(params, needs));
  return needs;
}

struct StepBackend : CudaBackend {
  static constexpr int64_t kAlignment = cuda::kStepAlignment;

  using CudaBackend::CudaBackend;

  int64_t workspace_bytes(const StepParams& params) const {
    const cuda::StepNeeds needs = needs_of(params);
    if (needs.refusal) fail(needs.refusal.reason, " on CUDA, got ", needs.refusal.got);
    return needs.workspace_bytes;
  }
  void clear(void* workspace, int64_t bytes) const {
    STD_CUDA_CHECK(cudaMemsetAsync(workspace, 0, static_cast<size_t>(bytes), stream));
  }
  void launch(const StepParams& params, void* workspace) const {
    STD_CUDA_CHECK(cuda::step_through_layers(params, workspace, stream));
  }
};

/// Returns the bytes of workspace that a call of these sizes needs on a device, or -1 if the kernel
/// cannot run it. `itemsize` is the size of the matrices' elements in bytes.
int64_t step_workspace_bytes(int64_t device, int64_t itemsize, int64_t rows, int64_t layers,
                             int64_t dim, int64_t inner, int64_t dstate, int64_t rank,
                             int64_t width, int64_t vocabulary) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  StepParams params;
  params.batch = rows;
  params.layers = layers;
  params.dim = dim;
  params.inner = inner;
  params.dstate = dstate;
  params.rank = rank;
  params.width = width;
  params.vocabulary = vocabulary;
  params.is_double = itemsize == 8;
  params.weight_dtype = itemsize == 2 ? DType::kBFloat16 : DType::kFloat32;
  const cuda::StepNeeds needs = needs_of(params);
  return needs.refusal ? -1 : needs.workspace_bytes;
}

Conversion conversion_of(const Cast& cast) {
  return {cast.source.const_data_ptr(),
          nullptr,
          cast.target.mutable_data_ptr(),
          cast.source.numel(),
          component_dtype(cast.source),
          component_dtype(cast.target),
          cast.negates_exp ? Conversion::Map::kNegativeExp : Conversion::Map::kIdentity};
}

void cast(const std::vector<Cast>& casts) {
  const CudaStream stream(casts.front().target);
  for (size_t first = 0; first < casts.size(); first += Conversions::kMost) {
    Conversions some;
    some.count = static_cast<int>(std::min<size_t>(casts.size() - first, Conversions::kMost));
    std::transform(casts.begin() + first, casts.begin() + first + some.count, some.items,
                   conversion_of);
    STD_CUDA_CHECK(cuda::convert(some, stream));
  }
}

Tensor sum(const Tensor& residual, const Tensor& product) {
  const Tensor result = allocate_like(residual);
  Conversions one;
  one.count = 1;
  one.items[0] = conversion_of({product, result});
  one.items[0].addend = residual.const_data_ptr();
  const CudaStream stream(result);
  STD_CUDA_CHECK(cuda::convert(one, stream));
  return result;
}

constexpr ScanOps kScanOps{&scan_forward<ScanBackend<DiagonalA>>,
                           &other_gradients<ScanBackend<DiagonalA>>};
constexpr ConvOps kConvOps{&conv_forward<CudaBackend>, &conv_backward<CudaBackend>,
                           &causal_conv1d_update<CudaBackend>};
constexpr LayerOps kLayerOps{kScanOps,
                             kConvOps,
                             &selective_state_update<CudaBackend>,
                             {&add_rms_norm_fwd<CudaBackend>, &add_rms_norm_bwd<CudaBackend>},
                             &aoti_torch_cuda_mm_out,
                             &aoti_torch_cuda_addmm_out,
                             true,
                             &cast,
                             &sum};

std::string cuda_build_info() {
  return joined("{\"version\": \"", SELECTIVE_SCAN_VERSION, "\", \"compiler\": \"", compiler_name(),
                "\", \"cuda\": \"", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10,
                "\", \"architectures\": \"", SELECTIVE_SCAN_CUDA_ARCHITECTURES,
                "\", \"methods\": \"", built_methods(), "\"}");
}

/// Returns the driver's CUDA version in the format of CUDART_VERSION, or 0 without a driver.
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

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def("cuda_build_info() -> str");
  m.def("cuda_driver_version() -> int");
  m.def("cuda_device_facts(int device) -> str");
  m.def(
      "cuda_step_workspace_bytes(int device, int itemsize, int rows, int layers, int d_model, "
      "int d_inner, int dstate, int dt_rank, int width, int vocabulary) -> int");
  m.def("cuda_s6_step_forget(int call) -> ()");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cuda_build_info", TORCH_BOX(&cuda_build_info));
  m.impl("cuda_driver_version", TORCH_BOX(&cuda_driver_version));
  m.impl("cuda_device_facts", TORCH_BOX(&cuda_device_facts));
  m.impl("cuda_step_workspace_bytes", TORCH_BOX(&step_workspace_bytes));
  m.impl("cuda_s6_step_forget", TORCH_BOX(&forget_prepared_step));
}

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_scans<ScanBackend<DiagonalA>, ScanBackend<MatrixA>>(m);
  implement_cross_scan<kScanOps>(m);
  implement_prefill<CudaBackend>(m);
  implement_update<CudaBackend>(m);
  implement_convolution<CudaBackend>(m);
  implement_diagonal_scan<CudaBackend>(m);
  implement_unitary_scan<UnitaryBackend>(m);
  implement_norm<CudaBackend>(m);
  implement_step<StepBackend>(m);
  implement_mamba_inner<kLayerOps>(m);
  implement_layer_stack<kLayerOps>(m);
}

}  // namespace selective_scan::op
