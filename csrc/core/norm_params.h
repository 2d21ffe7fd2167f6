// The parameters of the kernels of the RMS norm, which first add a residual. For every row
//
//   total  = hidden + residual                       residual is optional
//   scale  = 1 / sqrt(mean(total²) + eps)
//   normed = total·scale·weight                      with total before rounding; without a weight
//                                                    it is 1
//
// The backward pass recomputes the scale. With g = dnormed·weight,
//
//   dtotal' = scale·(g − total·scale²·mean(g·total)) + dtotal
//   dweight = Σ dnormed·total·scale                  over all rows
//
// and dtotal' is the gradient of hidden and of the residual, each stored in its own dtype.
//
// The channels of a row are contiguous; ArrayView::batch is the stride of rows.
#pragma once

#include <cstdint>

#include "params.h"

namespace selective_scan {

/// Arithmetic and sums are fp64 if is_double, else fp32; every array has its own element type.
struct NormParams {
  int64_t rows = 0;
  int64_t channels = 0;
  double eps = 0;
  bool is_double = false;

  ArrayView weight;  // one row; the forward pass may lack it
};

struct NormForwardParams : NormParams {
  ArrayView hidden, residual;  // residual is optional
  ArrayView normed, total;     // total is optional
};

struct NormBackwardParams : NormParams {
  ArrayView total, dnormed;
  ArrayView dtotal;              // optional: absent means zero
  ArrayView dhidden, dresidual;  // each absent if it is not wanted
  ArrayView dweight;             // one row; absent if it is not wanted
};

}  // namespace selective_scan
