// The interface of the diagonal scan's kernels.
#pragma once

#include <cstdint>

#include "../../core/complex.h"
#include "../../core/diagonal_params.h"
#include "../../core/dtype.h"

namespace selective_scan::cpu {

template <class T>
SELECTIVE_SCAN_HD T load_value(const DiagonalArray& array, int64_t offset) {
  using Real = real_t<T>;
  const auto component = [&](int64_t place) {
    return load_element<Real>(array.data, array.dtype, offset + place);
  };
  if constexpr (is_complex_v<T>) {
    return {component(0), array.imag == 0 ? Real(0) : component(array.imag)};
  } else {
    return component(0);
  }
}

/// The division of a diagonal scan's rows into tasks. See scan.h.
struct DiagonalSplit {
  int64_t segments = 1;  // of time, in every row
  int64_t segment_steps = 0;
  bool lanes_are_segments = false;  // else lanes are rows along lane_dim
  int lane_dim = 0;
  int64_t lane_rows = 1;
  int64_t outers = 1;  // number of index combinations of the other row dimensions

  /// Returns the number of vectors that cover the lanes' dimension.
  SELECTIVE_SCAN_HD int64_t blocks(int64_t width) const {
    return ceil_div(lanes_are_segments ? segments : lane_rows, width);
  }
  SELECTIVE_SCAN_HD int64_t tasks(int64_t width) const {
    return blocks(width) * outers * (lanes_are_segments ? lane_rows : segments);
  }
  SELECTIVE_SCAN_HD int64_t outer_offset(const DiagonalScanParams& params,
                                         const DiagonalArray& array, int64_t outer) const {
    int64_t offset = 0;
    for (int dim = params.row_dims - 1; dim >= 0; --dim) {
      if (dim == lane_dim) continue;
      offset += outer % params.row_sizes[dim] * array.row[dim];
      outer /= params.row_sizes[dim];
    }
    return offset;
  }
};

/// The kernels of the diagonal scan in one direction and compute type.
template <class Params>
struct DiagonalPass {
  void (*map)(const Params& params, const DiagonalSplit& split, int64_t task, void* maps);
  void (*scan)(const Params& params, const DiagonalSplit& split, int64_t task, const void* maps);
};

struct DiagonalKernels {
  int64_t lanes;
  DiagonalPass<DiagonalForwardParams> forward;
  DiagonalPass<DiagonalBackwardParams> backward;
};

}  // namespace selective_scan::cpu
