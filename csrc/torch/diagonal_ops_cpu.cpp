// Schemas of the diagonal scan ops, and their CPU backend.

#include "../cpu/diagonal/launch.h"
#include "diagonal_ops.h"
#include "op_namespace.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

struct CpuBackend {
  explicit CpuBackend(const Tensor&) {}

  int64_t num_segments(const DiagonalScanParams& params) const { return cpu::num_segments(params); }
  void check(const PackedSequences& packed) const { check_boundaries(packed); }
  void launch(const DiagonalForwardParams& params, const auto& memory) const {
    cpu::diagonal_scan_forward(params, memory(cpu::workspace_bytes(params, pool)), pool);
  }
  void launch(const DiagonalBackwardParams& params, const auto& memory) const {
    cpu::diagonal_scan_backward(params, memory(cpu::workspace_bytes(params, pool)), pool);
  }

  cpu::ThreadPool pool = torch_thread_pool();
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def(
      "diagonal_scan_fwd(Tensor a, Tensor b, Tensor? initial_state=None, bool reverse=False, "
      "Tensor? cu_seqlens=None) -> Tensor h");
  m.def(
      "diagonal_scan_bwd(Tensor dh, Tensor a, Tensor h, Tensor? initial_state, bool reverse, "
      "Tensor? cu_seqlens, bool complex_b) -> (Tensor da, Tensor db, Tensor dinitial_state)");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_diagonal_scan<CpuBackend>(m);
}

}  // namespace selective_scan::op
