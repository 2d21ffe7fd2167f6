// The interface of the kernels for the scan with full state matrices.
#pragma once

#include <cstdint>

#include "../../core/matrix_params.h"
#include "../selective/kernels.h"
#include "../work.h"

namespace selective_scan::cpu {

/// The kernels of one compute type, real or complex. A block is one vector of channels.
///
/// `bases` holds H and Q of every block of channels of one batch entry, (group, block, H or Q, row,
/// column, lane), and `dH` the gradient of H, (batch, group, block, row, column, lane), both of the
/// compute type. A complex number is a vector of real parts followed by a vector of imaginary
/// parts.
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
  /// Computes dA of a block's channels from dH of all batch entries.
  void (*finish)(const MatrixBackwardParams& params, const Block& block, const void* bases,
                 const void* dH, void* scratch);
};

/// The kernels for one type of states, compiled in separate sources like the selective scan's
/// sweeps.
template <class State>
struct MatrixScan {
  static const MatrixKernels kernels;
};

}  // namespace selective_scan::cpu
