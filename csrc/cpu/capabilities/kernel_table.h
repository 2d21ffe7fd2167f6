// Builds the kernel table of the including source's instruction set, and instantiates the kernels
// that no other part does.
#include "instructions.h"

#if defined(SELECTIVE_SCAN_INSTRUCTION_SET)

#include "../capability.h"
#include "../conv/backward.h"
#include "../conv/forward.h"
#include "../conv/update.h"
#include "../diagonal/scan.h"
#include "../matrix/kernels.h"
#include "../norm/norm.h"
#include "../selective/backward.h"
#include "../selective/forward.h"
#include "../selective/segment_maps.h"
#include "../step/kernels.h"
#include "../unitary/scan.h"
#include "../update/update.h"

namespace selective_scan::cpu {

/// `State`, like V below, is a vector of real numbers or a complex number of such vectors.
template <class State>
constexpr Kernels kernels_of() {
  using Forward = ForwardKernel<State>;
  using Backward = BackwardKernel<State>;
  using Maps = SegmentMaps<State>;
  return {real_t<State>::kWidth,
          &Forward::scratch_bytes,
          &Forward::run,
          &Backward::scratch_bytes,
          &Backward::run,
          &Maps::scratch_bytes,
          &Maps::template map_as_scanned<ForwardParams>,
          &Maps::template map_as_scanned<BackwardParams>,
          &Maps::template map_alone<ForwardParams>,
          &Maps::template map_alone<BackwardParams>};
}

template <class R>
constexpr UnitaryKernels unitary_kernels_of() {
  return {R::kWidth, &UnitaryForward<R>::run, &UnitaryBackward<R>::run};
}

template <class V>
constexpr DiagonalKernels diagonal_kernels_of() {
  using Forward = DiagonalKernel<ForwardStep<V>, DiagonalForwardParams>;
  using Backward = DiagonalKernel<BackwardStep<V>, DiagonalBackwardParams>;
  return {real_t<V>::kWidth, {&Forward::map, &Forward::scan}, {&Backward::map, &Backward::scan}};
}

template <class R>
constexpr ConvKernels conv_kernels_of() {
  using Block = ConvBlock<R>;
  using Forward = ConvForward<R>;
  using Backward = ConvBackward<R>;
  return {R::kWidth,      Block::kMaxLanes, Block::kTileElements, &Forward::run,
          &Backward::run, &Forward::end,    &Backward::end,       &ConvUpdate<R>::run};
}

template <class State>
constexpr UpdateKernels update_kernels_of() {
  return {&UpdateKernel<State>::scratch_bytes, &UpdateKernel<State>::run};
}

// Other sources of the instruction set instantiate these.
extern template struct MatrixScan<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>;
extern template struct MatrixScan<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>;
extern template struct MatrixScan<Complex<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>>;
extern template struct MatrixScan<Complex<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>>;
extern template struct StackStep<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>;
extern template struct StackStep<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>;

template <class InstructionSet>
constexpr Capability make_capability() {
  Capability capability{};
  capability.name = InstructionSet::kName;
  const auto add_numbers = [&]<class V>(bool is_double, bool is_complex) {
    capability.kernels[is_double][is_complex] = kernels_of<V>();
    capability.diagonal[is_double][is_complex] = diagonal_kernels_of<V>();
    capability.update[is_double][is_complex] = update_kernels_of<V>();
    capability.matrix[is_double][is_complex] = &MatrixScan<V>::kernels;
  };
  const auto add_reals = [&]<class R>(bool is_double) {
    capability.unitary[is_double] = unitary_kernels_of<R>();
    capability.conv[is_double] = conv_kernels_of<R>();
    capability.norm[is_double] = RowNorm<R>::kernels;
    capability.step[is_double] = &StackStep<R>::kernels;
    add_numbers.template operator()<R>(is_double, false);
    add_numbers.template operator()<Complex<R>>(is_double, true);
  };
  add_reals.template operator()<Vec<float, InstructionSet>>(false);
  add_reals.template operator()<Vec<double, InstructionSet>>(true);
  return capability;
}

constexpr Capability SELECTIVE_SCAN_CAPABILITY = make_capability<SELECTIVE_SCAN_INSTRUCTION_SET>();

}  // namespace selective_scan::cpu

#endif

#include "instructions.h"
