// The schemas of the ops, and their CPU backend. This library is always built.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "../cpu/capability.h"
#include "../cpu/launch.h"
#include "../cpu/step/launch.h"
#include "argument_tables.h"
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
#include "state_slots.h"
#include "step_ops.h"
#include "unitary_ops.h"
#include "update_ops.h"

namespace selective_scan::op {
namespace {

cpu::ThreadPool torch_thread_pool() {
  const auto parallel_for = [](int64_t count, void (*task)(int64_t, int64_t, void*),
                               void* context) {
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, /*grain_size=*/1, task, context));
  };
  return {parallel_for, static_cast<int>(torch::stable::get_num_threads())};
}

/// Runs on PyTorch's threads, and reads the values that it must check.
struct CpuBackend {
  static constexpr int64_t kMaxDstate = 0;
  static constexpr int64_t kMostChannels = 0;
  static constexpr bool kSavesStates = false;

  explicit CpuBackend(const Tensor&) {}

  void check(const PackedSequences& packed) const { check_boundaries(packed); }
  void check(const PrefillParams& params) const {
    check_boundaries(params.packed);
    check_slots(params.slots);
    check_checkpoints(params);
  }
  void check(const ConvParams& params) const { check_boundaries(params.packed()); }
  void check(const ConvPrefillParams& params) const {
    check_boundaries(params.packed());
    check_slots(params.slots);
  }
  void check(const ConvUpdateParams& params) const {
    check_slots("conv_state_indices", params.conv_state_indices, params.batch, params);
  }
  void check(const UpdateParams& params) const { check_slots(params); }
  void check(const StepParams& params) const {
    check_slots("state_batch_indices", params.slot_indices, params.batch, params);
  }
  int64_t num_segments(const DiagonalScanParams& params) const { return cpu::num_segments(params); }

  void launch(const auto& params, const auto& memory) const {
    cpu::launch(params, memory(cpu::workspace_bytes(params, pool)), pool);
  }

  cpu::ThreadPool pool = torch_thread_pool();
};

template <class Poles>
struct ScanBackend : Poles, CpuBackend {
  using CpuBackend::CpuBackend;
};

struct UnitaryBackend : CpuBackend {
  /// A slab of this size stays in the last-level cache of most processors.
  static constexpr int64_t kThetaBytes = int64_t{16} << 20;
  static constexpr int64_t kLanes = cpu::kUnitaryLanes;
  static constexpr bool kChannelsLast = true;

  using CpuBackend::CpuBackend;
};

struct StepBackend : CpuBackend {
  static constexpr int64_t kAlignment = 1;

  using CpuBackend::CpuBackend;

  int64_t workspace_bytes(const StepParams& params) const {
    return cpu::step_workspace_bytes(params, pool);
  }
  void clear(void*, int64_t) const {}
  void launch(const StepParams& params, void* workspace) const {
    cpu::step(params, workspace, pool);
  }
};

void cast(const std::vector<Cast>& casts) {
  for (const Cast& it : casts) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(it.target.get(), it.source.get(), 0));
    if (it.negates_exp) call("aten::neg_", "", call("aten::exp_", "", it.target));
  }
}

Tensor sum(const Tensor& residual, const Tensor& product) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_add_Tensor(residual.get(), product.get(), 1.0, &handle));
  return Tensor(handle);
}

constexpr ScanOps kScanOps{&scan_forward<ScanBackend<DiagonalA>>,
                           &other_gradients<ScanBackend<DiagonalA>>};
constexpr ConvOps kConvOps{&conv_forward<CpuBackend>, &conv_backward<CpuBackend>,
                           &causal_conv1d_update<CpuBackend>};
constexpr LayerOps kLayerOps{kScanOps,
                             kConvOps,
                             &selective_state_update<CpuBackend>,
                             {&add_rms_norm_fwd<CpuBackend>, &add_rms_norm_bwd<CpuBackend>},
                             &aoti_torch_cpu_mm_out,
                             &aoti_torch_cpu_addmm_out,
                             false,
                             &cast,
                             &sum};

int64_t state_chunk() {
  return kStateChunk;
}
int64_t unitary_state_chunk() {
  return kUnitaryStateChunk;
}

std::string cpu_build_info() {
  return joined("{\"version\": \"", SELECTIVE_SCAN_VERSION, "\", \"compiler\": \"", compiler_name(),
                "\", \"capability\": \"", cpu::capability(), "\", \"methods\": \"", built_methods(),
                "\"}");
}

}  // namespace

SELECTIVE_SCAN_LIBRARY(m) {
  for (const char* schema : tables::kSchemas) m.def(schema);
  define_scans_between(m);
  define_cross_scan(m);
  define_norm(m);
  define_layer_stack(m);
  m.def("unitary_state_chunk() -> int");
  m.def("state_chunk() -> int");
  m.def("cpu_build_info() -> str");
  // Only Python calls these, never under tracing: their schemas do not declare what they change.
  m.def("s6_step_again(Tensor hidden, int call) -> Tensor?");
  m.def("cpu_s6_step_forget(int call) -> ()");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("state_chunk", TORCH_BOX(&state_chunk));
  m.impl("unitary_state_chunk", TORCH_BOX(&unitary_state_chunk));
  m.impl("cpu_build_info", TORCH_BOX(&cpu_build_info));
  m.impl("cpu_s6_step_forget", TORCH_BOX(&forget_prepared_step));
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_scans<ScanBackend<DiagonalA>, ScanBackend<MatrixA>>(m);
  implement_cross_scan<kScanOps>(m);
  implement_prefill<CpuBackend>(m);
  implement_update<CpuBackend>(m);
  implement_convolution<CpuBackend>(m);
  implement_diagonal_scan<CpuBackend>(m);
  implement_unitary_scan<UnitaryBackend>(m);
  implement_norm<CpuBackend>(m);
  implement_step<StepBackend>(m);
  implement_mamba_inner<kLayerOps>(m);
  implement_layer_stack<kLayerOps>(m);
}

}  // namespace selective_scan::op
