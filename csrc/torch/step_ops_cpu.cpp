// The CPU backend of s6_step.

#include "../cpu/step/launch.h"
#include "op_namespace.h"
#include "step_ops.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

struct CpuBackend {
  static constexpr int64_t kAlignment = 1;

  explicit CpuBackend(const Tensor&) {}

  void check_indices(const StepParams& params) const { check_slots(params); }
  int64_t workspace_bytes(const StepParams& params) const {
    return cpu::step_workspace_bytes(params, pool);
  }
  void clear(void*, int64_t) const {}
  void launch(const StepParams& params, void* workspace) const {
    cpu::step(params, workspace, pool);
  }

  cpu::ThreadPool pool = torch_thread_pool();
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  // Python alone calls these, and nothing that traces: what they change is not in their schemas.
  m.def("s6_step_again(Tensor hidden, int call) -> Tensor?");
  m.def("cpu_s6_step_forget(int call) -> ()");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_step<CpuBackend>(m);
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cpu_s6_step_forget", TORCH_BOX(&forget_prepared_step));
}

}  // namespace selective_scan::op
