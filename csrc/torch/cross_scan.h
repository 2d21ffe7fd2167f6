// The scans of a map in four directions as one call, forward and backward: along its rows, along
// its columns, and along both from the end. The caller sums the directions.
#pragma once

#include <tuple>

#include "scan_ops.h"

namespace selective_scan::op {

/// The results of a forward call: the outputs as maps; all scanned inputs as sequences, some of
/// them copies (x by rows and by columns, then delta, B and C of each direction); and the states,
/// if they are saved. A, D and delta_bias hold one entry per direction in their first dimension.
using CrossScanned = std::tuple<TensorList, TensorList, TensorList>;
CrossScanned cross_scan_forward(const ScanOps& scan, const Tensor& x, const TensorList& delta,
                                const Tensor& A, const TensorList& B, const TensorList& C,
                                const OptionalTensor& D, const OptionalTensor& delta_bias,
                                bool delta_softplus, const Text& discretization_method,
                                bool save_states);

/// The gradients of each direction: of x, delta, B and C as maps, then of A, D and delta_bias. The
/// lists of absent D and delta_bias are empty.
using CrossGradients =
    std::tuple<TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, TensorList>;
CrossGradients cross_scan_backward(const ScanOps& scan, const Tensor& dout,
                                   const TensorList& sequences, const Tensor& A,
                                   const OptionalTensor& D, const OptionalTensor& delta_bias,
                                   bool delta_softplus, const Text& discretization_method,
                                   const TensorList& states);

/// Adapts one of the functions above to an op that uses the scans of one backend.
template <const ScanOps& kScan, auto kOp, class Type = decltype(kOp)>
struct ByScans;
template <const ScanOps& kScan, auto kOp, class Results, class... Arguments>
struct ByScans<kScan, kOp, Results (*)(const ScanOps&, Arguments...)> {
  static Results run(Arguments... arguments) { return kOp(kScan, arguments...); }
};

/// Registers the schemas, once for all backends.
void define_cross_scan(auto& library) {
  // Only Python calls these ops, and never under tracing.
  library.def(
      "cross_scan_fwd(Tensor x, Tensor[] delta, Tensor A, Tensor[] B, Tensor[] C, Tensor? D, "
      "Tensor? delta_bias, bool delta_softplus, str discretization_method, bool save_states) -> "
      "(Tensor[] outs, Tensor[] sequences, Tensor[] states)");
  library.def(
      "cross_scan_bwd(Tensor dout, Tensor[] sequences, Tensor A, Tensor? D, Tensor? delta_bias, "
      "bool delta_softplus, str discretization_method, Tensor[] states) -> "
      "(Tensor[] dx, Tensor[] ddelta, Tensor[] dB, Tensor[] dC, Tensor[] dA, Tensor[] dD, "
      "Tensor[] ddelta_bias)");
}

template <const ScanOps& kScan>
void implement_cross_scan(auto& library) {
  library.impl("cross_scan_fwd", TORCH_BOX((&ByScans<kScan, &cross_scan_forward>::run)));
  library.impl("cross_scan_bwd", TORCH_BOX((&ByScans<kScan, &cross_scan_backward>::run)));
}

}  // namespace selective_scan::op
