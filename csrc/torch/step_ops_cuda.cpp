// The CUDA backend of s6_step, and what Python asks before it calls it.

#include "../cuda/launch.h"
#include "cuda_stream.h"
#include "op_namespace.h"
#include "step_ops.h"

namespace selective_scan::op {
namespace {

cuda::StepNeeds needs_of(const StepParams& params) {
  cuda::StepNeeds needs;
  STD_CUDA_CHECK(cuda::step_needs(params, needs));
  return needs;
}

struct CudaBackend {
  static constexpr int64_t kAlignment = cuda::kStepAlignment;

  explicit CudaBackend(const Tensor& hidden) : stream(hidden) {}

  /// The kernel takes them for padding.
  void check_indices(const StepParams&) const {}
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

  CudaStream stream;
};

/// How many bytes of workspace a call of these sizes, whose matrices have elements of `itemsize`
/// bytes, takes on a device; -1: the kernel cannot run it.
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

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def(
      "cuda_step_workspace_bytes(int device, int itemsize, int rows, int layers, int d_model, "
      "int d_inner, int dstate, int dt_rank, int width, int vocabulary) -> int");
  m.def("cuda_s6_step_forget(int call) -> ()");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cuda_step_workspace_bytes", TORCH_BOX(&step_workspace_bytes));
  m.impl("cuda_s6_step_forget", TORCH_BOX(&forget_prepared_step));
}

SELECTIVE_SCAN_LIBRARY_IMPL(CUDA, m) {
  implement_step<CudaBackend>(m);
}

}  // namespace selective_scan::op
