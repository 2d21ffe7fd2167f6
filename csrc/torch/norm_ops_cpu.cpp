// Schemas of the RMS norm's ops, and their CPU backend.

#include "../cpu/norm/launch.h"
#include "norm_ops.h"
#include "op_namespace.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

struct CpuBackend {
  static constexpr int64_t kMostChannels = 0;

  explicit CpuBackend(const Tensor&) {}

  void launch(const NormForwardParams& params, const auto& memory) const {
    cpu::norm_forward(params, memory(cpu::workspace_bytes(params, pool)), pool);
  }
  void launch(const NormBackwardParams& params, const auto& memory) const {
    cpu::norm_backward(params, memory(cpu::workspace_bytes(params, pool)), pool);
  }

  cpu::ThreadPool pool = torch_thread_pool();
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def(
      "add_rms_norm_fwd(Tensor hidden, Tensor? residual, Tensor weight, float eps, "
      "ScalarType dtype, ScalarType? total_dtype) -> (Tensor normed, Tensor total)");
  m.def(
      "add_rms_norm_bwd(Tensor dnormed, Tensor? dtotal, Tensor total, Tensor weight, float eps, "
      "ScalarType? hidden_dtype, ScalarType? residual_dtype, bool needs_weight) -> "
      "(Tensor dhidden, Tensor dresidual, Tensor dweight)");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_norm<CpuBackend>(m);
}

}  // namespace selective_scan::op
