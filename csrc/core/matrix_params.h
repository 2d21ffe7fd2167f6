// The parameters of the kernels for the scan with full state matrices. With A of shape (dim,
// dstate, dstate), for every batch entry and channel,
//
//   (I − Δ/2·A)·h[t] = (I + Δ/2·A)·h[t-1] + Δ·B[t]·u[t]
//
// and everything else is as in the selective scan, whose parameters these structs extend. The
// kernels scan in a basis in which A is a Hessenberg matrix, A = Q·H·Q^H with a unitary Q that they
// choose. The saved states are in that basis.
#pragma once

#include <cstdint>

#include "params.h"

namespace selective_scan {

/// `A` and `dA` are (channel, row, column), with `state` as the stride of rows and `A_column` or
/// `dA_column` as that of columns.
struct MatrixForwardParams : ForwardParams {
  explicit MatrixForwardParams(const ScanParams& inputs, int64_t A_column = 0)
      : ForwardParams(inputs), A_column(A_column) {}

  int64_t A_column = 0;
};

struct MatrixBackwardParams : BackwardParams {
  explicit MatrixBackwardParams(const ScanParams& inputs) : BackwardParams(inputs) {}

  int64_t A_column = 0;
  int64_t dA_column = 0;
};

}  // namespace selective_scan
