// Schemas of the ops with full state matrices, and their CPU backend.

#include "../cpu/matrix/launch.h"
#include "op_namespace.h"
#include "scan_ops.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

struct CpuBackend : MatrixA {
  static constexpr int64_t kMaxDstate = 0;

  explicit CpuBackend(const Tensor&) {}

  void launch(const MatrixForwardParams& params, const auto& memory) const {
    cpu::scan_forward(params, memory(cpu::forward_workspace_bytes(params, pool)), pool);
  }
  void launch(const MatrixBackwardParams& params, const auto& memory) const {
    cpu::scan_backward(params, memory(cpu::backward_workspace_bytes(params, pool)), pool);
  }
  void check(const PackedSequences& packed) const { check_boundaries(packed); }

  cpu::ThreadPool pool = torch_thread_pool();
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  define_forward(
      m, "matrix_scan_fwd",
      "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
      "Tensor? z=None, Tensor? delta_bias=None, bool delta_softplus=False, "
      "str discretization_method=\"bilinear\", Tensor? initial_state=None, bool reverse=False, "
      "Tensor? cu_seqlens=None, bool save_states=False",
      "Tensor out, Tensor last_state, Tensor? states");
  m.def(
      "matrix_scan_bwd(Tensor? dout, Tensor? dlast_state, Tensor u, Tensor delta, Tensor A, "
      "Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, "
      "str discretization_method, Tensor? initial_state, bool reverse, Tensor? cu_seqlens, Tensor? "
      "states) -> "
      "(Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
      "Tensor ddelta_bias, Tensor dinitial_state)");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_forward<&selective_scan_fwd<CpuBackend>>(m, "matrix_scan_fwd");
  m.impl("matrix_scan_bwd", TORCH_BOX(&selective_scan_bwd<CpuBackend>));
}

}  // namespace selective_scan::op
