// Schemas of the adaptive unitary scan ops, and their CPU backend.

#include "../cpu/unitary/launch.h"
#include "op_namespace.h"
#include "thread_pool.h"
#include "unitary_ops.h"

namespace selective_scan::op {
namespace {

struct CpuBackend {
  static constexpr int64_t kMaxDstate = 0;
  /// A slab of this size stays in the last-level cache of most processors.
  static constexpr int64_t kThetaBytes = int64_t{16} << 20;
  static constexpr int64_t kLanes = cpu::kUnitaryLanes;
  static constexpr bool kChannelsLast = true;

  explicit CpuBackend(const Tensor&) {}

  void launch(const UnitaryForwardParams& params) const {
    cpu::unitary_scan_forward(params, torch_thread_pool());
  }
  void launch(const UnitaryBackwardParams& params) const {
    cpu::unitary_scan_backward(params, torch_thread_pool());
  }
};

int64_t unitary_state_chunk() {
  return kUnitaryStateChunk;
}

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  define_forward(m, "adaptive_unitary_scan_fwd",
                 "Tensor u, Tensor dt, Tensor x, Tensor x_bias, Tensor b, Tensor c, "
                 "Tensor D, Tensor? z=None, Tensor? initial_state=None, bool save_states=False",
                 "Tensor out, Tensor last_state, Tensor? states");
  m.def(
      "adaptive_unitary_scan_bwd(Tensor? dout, Tensor? dlast_state, Tensor u, Tensor dt, Tensor x, "
      "Tensor x_bias, Tensor b, Tensor c, Tensor D, Tensor? z, Tensor? initial_state, "
      "Tensor? states) -> (Tensor du, Tensor ddt, Tensor dx, Tensor dx_bias, Tensor db, Tensor dc, "
      "Tensor dD, Tensor dz, Tensor dinitial_state)");
  m.def("unitary_state_chunk() -> int");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("unitary_state_chunk", TORCH_BOX(&unitary_state_chunk));
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_unitary_scan<CpuBackend>(m);
}

}  // namespace selective_scan::op
