// Op schemas and the CPU backend. This library is always built.

#include "../cpu/capability.h"
#include "../cpu/matrix/launch.h"
#include "../cpu/selective/launch.h"
#include "build_info.h"
#include "cross_scan.h"
#include "joined_text.h"
#include "op_namespace.h"
#include "scan_ops.h"
#include "thread_pool.h"

namespace selective_scan::op {
namespace {

template <class Poles>
struct CpuBackend : Poles {
  static constexpr int64_t kMaxDstate = 0;

  explicit CpuBackend(const Tensor&) {}

  void launch(const typename Poles::Forward& params, const auto& memory) const {
    cpu::scan_forward(params, memory(cpu::forward_workspace_bytes(params, pool)), pool);
  }
  void launch(const typename Poles::Backward& params, const auto& memory) const {
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

const ScanOps kCpuScanOps = scan_ops<CpuBackend<DiagonalA>>();

SELECTIVE_SCAN_LIBRARY(m) {
  const std::string tensors = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, ";
  const std::string scanned = tensors +
                              "Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, "
                              "str discretization_method, Tensor? initial_state, bool reverse";
  const std::string gradients = "Tensor? dout, Tensor? dlast_state, " + scanned +
                                ", Tensor? cu_seqlens, Tensor? input_delta, Tensor? states";
  for (const auto& [name, method] :
       {std::pair{"selective_scan", "zoh"}, {"matrix_scan", "bilinear"}}) {
    define_forward(
        m, joined({name, "_fwd"}),
        joined({tensors,
                "Tensor? D=None, Tensor? z=None, Tensor? delta_bias=None, "
                "bool delta_softplus=False, str discretization_method=\"",
                method,
                "\", Tensor? initial_state=None, bool reverse=False, "
                "Tensor? cu_seqlens=None, Tensor? input_delta=None, bool save_states=False"}),
        "Tensor out, Tensor last_state, Tensor? states");
    m.def(joined({name, "_bwd(", gradients,
                  ") -> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, "
                  "Tensor dz, Tensor ddelta_bias, Tensor dinitial_state, Tensor dinput_delta)"})
              .c_str());
  }
  m.def(joined({"selective_scan_bwd_out(", gradients,
                ", *, Tensor(a!) du, Tensor(b!) ddelta, Tensor(c!) dB, Tensor(d!) dC, "
                "Tensor(e!)? dz) -> (Tensor dA, Tensor dD, Tensor ddelta_bias, "
                "Tensor dinitial_state, Tensor dinput_delta)"})
            .c_str());
  m.def(
      joined({"selective_scan_state_gradient(", scanned, ", Tensor dout) -> Tensor dinitial_state"})
          .c_str());
  m.def(
      joined({"selective_scan_segment_map(", scanned, ", Tensor? input_delta=None) -> Tensor map"})
          .c_str());
  // `entrance` is the number of a function of Python's: see ranks.h.
  define_forward(
      m, "selective_scan_between_fwd",
      joined({scanned, ", Tensor? input_delta, bool is_told, int entrance, bool save_states"}),
      "Tensor out, Tensor last_state, Tensor? states");
  m.def(joined({"selective_scan_between_bwd(Tensor? dout, ", scanned,
                ", Tensor? input_delta, Tensor? states, bool is_told, int entrance) -> (Tensor du, "
                "Tensor ddelta, "
                "Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddelta_bias, "
                "Tensor dinitial_state, Tensor dinput_delta)"})
            .c_str());
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
  implement_scans<CpuBackend<DiagonalA>, CpuBackend<MatrixA>>(m);
  implement_cross_scan<kCpuScanOps>(m);
}

}  // namespace selective_scan::op
