// Schema of the op of chunked prefill, and its CPU backend.

#include "../cpu/selective/launch.h"
#include "op_namespace.h"
#include "prefill_ops.h"
#include "state_slots.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

struct CpuBackend {
  static constexpr int64_t kMaxDstate = 0;
  static constexpr bool kSavesStates = false;

  explicit CpuBackend(const Tensor&) {}

  void check(const PrefillParams& params) const {
    check_boundaries(params.packed);
    check_slots(params.slots);
    check_checkpoints(params);
  }
  void launch(const PrefillParams& params, const auto& memory) const {
    cpu::scan_prefill(params, memory(cpu::prefill_workspace_bytes(params, pool)), pool);
  }

  cpu::ThreadPool pool = torch_thread_pool();
};

}  // namespace

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  m.def(
      "selective_scan_prefill(Tensor u, Tensor(a!) states, Tensor delta, Tensor A, Tensor B, "
      "Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, "
      "Tensor cu_seqlens, Tensor? cache_indices=None, Tensor? has_initial_state=None, "
      "int pad_slot_id=-1, int checkpoint_every=0, Tensor? first_position=None, "
      "Tensor? checkpoint_slots=None, Tensor(b!)? out=None, "
      "str discretization_method=\"zoh\", Tensor? input_delta=None) -> Tensor");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_prefill<CpuBackend>(m);
}

}  // namespace selective_scan::op
