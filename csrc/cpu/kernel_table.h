// The table of all kernels of one instruction set, filled in by the file that compiles them.
#pragma once

// Multiplications and additions fuse across the operators' calls; gcc does so by default.
#if defined(__clang__)
#pragma clang fp contract(fast)
#endif

#include "capability.h"
#include "diagonal/scan.h"
#include "selective/backward.h"
#include "selective/forward.h"
#include "selective/segment_maps.h"
#include "unitary/scan.h"

namespace selective_scan::cpu {

template <class State, Method kMethod>
constexpr Kernels kernels_of() {
  using Forward = ForwardKernel<State, kMethod>;
  using Backward = BackwardKernel<State, kMethod>;
  using Maps = SegmentMaps<State, kMethod>;
  // The gradients' maps depend on abar alone.
  constexpr Method kLike = Formula<kMethod>::kAbarIsExponential ? Method::kZoh : kMethod;
  return {real_t<State>::kWidth, &Forward::scratch_bytes,
          &Forward::run,         &Backward::scratch_bytes,
          &Backward::run,        &Maps::scratch_bytes,
          &Maps::forward,        &SegmentMaps<State, kLike>::backward};
}

template <class State>
constexpr MethodTable<Kernels> all_methods() {
  return make_method_table<Kernels>([]<Method kMethod>() { return kernels_of<State, kMethod>(); });
}

template <class R>
constexpr UnitaryKernels unitary_kernels_of() {
  return {R::kWidth, &UnitaryForward<R>::run, &UnitaryBackward<R>::run};
}

/// `V` is a vector of real numbers or a complex number of such vectors.
template <class V>
constexpr DiagonalKernels diagonal_kernels_of() {
  using Forward = DiagonalKernel<ForwardStep<V>, DiagonalForwardParams>;
  using Backward = DiagonalKernel<BackwardStep<V>, DiagonalBackwardParams>;
  return {real_t<V>::kWidth, {&Forward::map, &Forward::scan}, {&Backward::map, &Backward::scan}};
}

template <class InstructionSet>
constexpr Capability make_capability(const char* name) {
  Capability capability{name, {}, {}, {}};
  capability.kernels[0][0] = all_methods<Vec<float, InstructionSet>>();
  capability.kernels[0][1] = all_methods<Complex<Vec<float, InstructionSet>>>();
  capability.kernels[1][0] = all_methods<Vec<double, InstructionSet>>();
  capability.kernels[1][1] = all_methods<Complex<Vec<double, InstructionSet>>>();
  capability.unitary[0] = unitary_kernels_of<Vec<float, InstructionSet>>();
  capability.unitary[1] = unitary_kernels_of<Vec<double, InstructionSet>>();
  capability.diagonal[0][0] = diagonal_kernels_of<Vec<float, InstructionSet>>();
  capability.diagonal[0][1] = diagonal_kernels_of<Complex<Vec<float, InstructionSet>>>();
  capability.diagonal[1][0] = diagonal_kernels_of<Vec<double, InstructionSet>>();
  capability.diagonal[1][1] = diagonal_kernels_of<Complex<Vec<double, InstructionSet>>>();
  return capability;
}

}  // namespace selective_scan::cpu
