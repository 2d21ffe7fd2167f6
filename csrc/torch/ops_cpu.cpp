// Op schemas and the CPU backend. This library is always built.

#include "../cpu/capability.h"
#include "../cpu/selective/launch.h"
#include "build_info.h"
#include "cross_scan.h"
#include "joined_text.h"
#include "op_namespace.h"
#include "scan_ops.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

struct CpuBackend : DiagonalA {
  static constexpr int64_t kMaxDstate = 0;

  explicit CpuBackend(const Tensor&) {}

  void launch(const ForwardParams& params, const auto& memory) const {
    cpu::scan_forward(params, memory(cpu::forward_workspace_bytes(params, pool)), pool);
  }
  void launch(const BackwardParams& params, const auto& memory) const {
    cpu::scan_backward(params, memory(cpu::backward_workspace_bytes(params, pool)), pool);
  }
  void check(const PackedSequences& packed) const { check_boundaries(packed); }

  cpu::ThreadPool pool = torch_thread_pool();
};

int64_t state_chunk() {
  return kStateChunk;
}

std::string cpu_build_info() {
  return joined({"{\"version\": \"", SELECTIVE_SCAN_VERSION, "\", \"compiler\": \"",
                 compiler_name(), "\", \"capability\": \"", cpu::capability(),
                 "\", \"methods\": \"", built_methods(), "\"}"});
}

}  // namespace

const ScanOps kCpuScanOps{&selective_scan_fwd<CpuBackend>, &selective_scan_bwd_out<CpuBackend>};

SELECTIVE_SCAN_LIBRARY(m) {
  define_forward(
      m, "selective_scan_fwd",
      "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, "
      "Tensor? z=None, Tensor? delta_bias=None, bool delta_softplus=False, "
      "str discretization_method=\"zoh\", Tensor? initial_state=None, bool reverse=False, "
      "Tensor? cu_seqlens=None, bool save_states=False",
      "Tensor out, Tensor last_state, Tensor? states");
  m.def(
      "selective_scan_bwd(Tensor? dout, Tensor? dlast_state, Tensor u, Tensor delta, Tensor A, "
      "Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, "
      "str discretization_method, Tensor? initial_state, bool reverse, Tensor? cu_seqlens, Tensor? "
      "states) -> "
      "(Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
      "Tensor ddelta_bias, Tensor dinitial_state)");
  m.def(
      "selective_scan_bwd_out(Tensor? dout, Tensor? dlast_state, Tensor u, Tensor delta, Tensor A, "
      "Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, "
      "str discretization_method, Tensor? initial_state, bool reverse, Tensor? cu_seqlens, Tensor? "
      "states, "
      "*, Tensor(a!) du, Tensor(b!) ddelta, Tensor(c!) dB, Tensor(d!) dC, Tensor(e!)? dz) -> "
      "(Tensor dA, Tensor dD, Tensor ddelta_bias, Tensor dinitial_state)");
  m.def(
      "selective_scan_state_gradient(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, str discretization_method, "
      "Tensor? initial_state, bool reverse, Tensor dout) -> Tensor dinitial_state");
  m.def(
      "selective_scan_segment_map(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, str discretization_method, "
      "Tensor? initial_state, bool reverse) -> Tensor map");
  // Python alone calls these, and nothing that traces.
  m.def(
      "cross_scan_fwd(Tensor x, Tensor[] delta, Tensor A, Tensor[] B, Tensor[] C, Tensor? D, "
      "Tensor? delta_bias, bool delta_softplus, str discretization_method, bool save_states) -> "
      "(Tensor[] outs, Tensor[] sequences, Tensor[] states)");
  m.def(
      "cross_scan_bwd(Tensor dout, Tensor[] sequences, Tensor A, Tensor? D, Tensor? delta_bias, "
      "bool delta_softplus, str discretization_method, Tensor[] states) -> "
      "(Tensor[] dx, Tensor[] ddelta, Tensor[] dB, Tensor[] dC, Tensor[] dA, Tensor[] dD, "
      "Tensor[] ddelta_bias)");
  m.def("state_chunk() -> int");
  m.def("cpu_build_info() -> str");
}

SELECTIVE_SCAN_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("state_chunk", TORCH_BOX(&state_chunk));
  m.impl("cpu_build_info", TORCH_BOX(&cpu_build_info));
}

SELECTIVE_SCAN_LIBRARY_IMPL(CPU, m) {
  implement_forward<&selective_scan_fwd<CpuBackend>>(m, "selective_scan_fwd");
  m.impl("selective_scan_bwd", TORCH_BOX(&selective_scan_bwd<CpuBackend>));
  m.impl("selective_scan_bwd_out", TORCH_BOX(&selective_scan_bwd_out<CpuBackend>));
  m.impl("selective_scan_state_gradient", TORCH_BOX(&selective_scan_state_gradient<CpuBackend>));
  m.impl("selective_scan_segment_map", TORCH_BOX(&selective_scan_segment_map<CpuBackend>));
  m.impl("cross_scan_fwd", TORCH_BOX(&cross_scan_fwd<kCpuScanOps>));
  m.impl("cross_scan_bwd", TORCH_BOX(&cross_scan_bwd<kCpuScanOps>));
}

}  // namespace selective_scan::op
