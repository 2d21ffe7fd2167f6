// Schemas of the ops of the causal convolution, and their CPU backend.

#include "../cpu/conv/launch.h"
#include "conv_ops.h"
#include "op_namespace.h"
#include "state_slots.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

struct CpuBackend {
  explicit CpuBackend(const Tensor&) {}

  void check(const ConvParams& params) const { check_boundaries(params.packed()); }
  void check(const ConvPrefillParams& params) const {
    check_boundaries(params.packed());
    check_slots(params.slots);
  }
  void check(const ConvUpdateParams& params) const {
    const IndexArray& indices = params.conv_state_indices;
    if (!indices.present()) return;
    for (int64_t row = 0; row < params.batch; ++row) {
      check_slot("conv_state_indices", indices.at(row), params);
    }
  }
  void launch(const ConvForwardParams& params, const auto& memory) const {
    cpu::causal_conv1d_forward(params, memory(cpu::workspace_bytes(params)), torch_thread_pool());
  }
  void launch(const ConvBackwardParams& params, const auto& memory) const {
    cpu::causal_conv1d_backward(params, memory(cpu::workspace_bytes(params)), torch_thread_pool());
  }
  void launch(const ConvPrefillParams& params) const {
    cpu::causal_conv1d_prefill(params, torch_thread_pool());
  }
  void launch(const ConvUpdateParams& params) const {
    cpu::causal_conv1d_update(params, torch_thread_pool());
  }
};

}  // namespace

const ConvOps kCpuConvOps{&causal_conv1d_fwd<CpuBackend>, &causal_conv1d_bwd_out<CpuBackend>};

SELECTIVE_SCAN_LIBRARY_FRAGMENT(m) {
  define_forward(
      m, "causal_conv1d_fwd",
      "Tensor x, Tensor weight, Tensor? bias=None, Tensor? seq_idx=None, "
      "Tensor? cu_seqlens=None, Tensor? initial_states=None, bool return_final_states=False, "
      "str? activation=None",
      "Tensor out, Tensor? final_states");
  const std::string gradients =
      "Tensor? dout, Tensor? dfinal_states, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? seq_idx, Tensor? cu_seqlens, Tensor? initial_states, str? activation";
  const std::string sums = "Tensor dweight, Tensor dbias, Tensor dinitial_states)";
  m.def(("causal_conv1d_bwd(" + gradients + ") -> (Tensor dx, " + sums).c_str());
  m.def(("causal_conv1d_bwd_out(" + gradients + ", *, Tensor(a!) dx) -> (" + sums).c_str());
  m.def(
      "causal_conv1d_prefill(Tensor x, Tensor weight, Tensor(a!) conv_states, Tensor? bias, "
      "str? activation, Tensor cu_seqlens, Tensor? cache_indices=None, "
      "Tensor? has_initial_state=None, int pad_slot_id=-1) -> Tensor");
  m.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, "
      "str? activation=None, Tensor? cache_seqlens=None, Tensor? conv_state_indices=None, "
      "int pad_slot_id=-1, Tensor(b!)? out=None) -> Tensor");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_convolution<CpuBackend>(m);
}

}  // namespace selective_scan::op
