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

/// `R` is a vector of real numbers.
template <class R>
constexpr KernelTable kernel_table_of() {
  using C = Complex<R>;
  return {{kernels_of<R>(), kernels_of<C>()},
          unitary_kernels_of<R>(),
          {diagonal_kernels_of<R>(), diagonal_kernels_of<C>()},
          conv_kernels_of<R>(),
          RowNorm<R>::kernels,
          {update_kernels_of<R>(), update_kernels_of<C>()},
          {&MatrixScan<R>::kernels, &MatrixScan<C>::kernels},
          &StackStep<R>::kernels};
}

#if defined(SELECTIVE_SCAN_DEFINES_DOUBLES)
constexpr KernelTable SELECTIVE_SCAN_DOUBLE_KERNELS =
    kernel_table_of<Vec<double, SELECTIVE_SCAN_INSTRUCTION_SET>>();
#endif

constexpr KernelTable kFloatKernels = kernel_table_of<Vec<float, SELECTIVE_SCAN_INSTRUCTION_SET>>();

constexpr Capability SELECTIVE_SCAN_CAPABILITY = {SELECTIVE_SCAN_INSTRUCTION_SET::kName,
                                                  {&kFloatKernels, &SELECTIVE_SCAN_DOUBLE_KERNELS}};

}  // namespace selective_scan::cpu

#endif

#include "instructions.h"
