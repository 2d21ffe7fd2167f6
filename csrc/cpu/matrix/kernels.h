// What the kernels of the scan with full state matrices are called by.
#pragma once

#include <cstdint>

#include "../../core/matrix_params.h"
#include "../selective/kernels.h"
#include "../work.h"

namespace selective_scan::cpu {

/// The kernels of one compute type, real or complex. A block is one vector of channels.
///
/// `bases` has H and Q of every block of channels of one batch entry, (group, block, H or Q, row,
/// column, lane), and `dH` the gradient of H, (batch, group, block, row, column, lane), of the
/// compute type; complex numbers have their parts in turns, a vector each.
struct MatrixKernels {
  int64_t lanes;  // of a vector
  int64_t (*basis_scratch_bytes)(const ScanParams& params);
  void (*reduce)(const MatrixForwardParams& params, const Block& block, void* bases, void* scratch);
  int64_t (*forward_scratch_bytes)(const ScanParams& params);
  void (*forward)(const MatrixForwardParams& params, const Block& block, const void* bases,
                  void* scratch);
  int64_t (*backward_scratch_bytes)(const ScanParams& params);
  void (*backward)(const MatrixBackwardParams& params, const Block& block,
                   const BackwardPartials& partials, const void* bases, void* dH, void* scratch);
  /// dA of a block's channels from dH of all batch entries.
  void (*finish)(const MatrixBackwardParams& params, const Block& block, const void* bases,
                 const void* dH, void* scratch);
};

/// These are for one type of states. They are compiled apart, as the selective scan's sweeps are.
template <class State>
struct MatrixScan {
  static const MatrixKernels kernels;
};

}  // namespace selective_scan::cpu
