// Schema of the state update op, and its CPU backend.

#include "../cpu/update/launch.h"
#include "op_namespace.h"
#include "thread_pool.h"
#include "update_ops.h"

namespace selective_scan::op {
namespace {

struct CpuBackend {
  static constexpr int64_t kMaxDstate = 0;

  explicit CpuBackend(const Tensor&) {}

  void check_indices(const UpdateParams& params) const { check_slots(params); }
  void launch(const UpdateParams& params, const Tensor& x) const {
    const cpu::ThreadPool pool = torch_thread_pool();
    const Workspace workspace(x, cpu::update_workspace_bytes(params, pool));
    cpu::update_states(params, workspace.data(), pool);
  }
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, "
      "Tensor? state_batch_indices=None, Tensor? dst_state_batch_indices=None, "
      "int pad_slot_id=-1, Tensor(b!)? out=None, str discretization_method=\"zoh\", "
      "bool A_is_log=False, Tensor? input_delta=None) -> Tensor");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_update<CpuBackend>(m);
}

}  // namespace selective_scan::op
