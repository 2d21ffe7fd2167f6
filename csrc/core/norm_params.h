// What the kernels of the RMS norm are given, in front of which a residual is added. For every row
//
//   total  = hidden + residual                       residual is optional
//   scale  = 1 / sqrt(mean(total²) + eps)
//   normed = total·scale·weight                      of the sum before it is rounded
//
// The backward pass computes the scale again. With g = dnormed·weight,
//
//   dtotal' = scale·(g − total·scale²·mean(g·total)) + dtotal
//   dweight = Σ dnormed·total·scale                  over all rows
//
// and dtotal' is the gradient of hidden and of the residual, each in a dtype of its own.
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

  ArrayView weight;  // one row
};

struct NormForwardParams : NormParams {
  ArrayView hidden, residual;  // the latter optional
  ArrayView normed, total;     // likewise
};

struct NormBackwardParams : NormParams {
  ArrayView total, dnormed;
  ArrayView dtotal;              // optional: absent means zero
  ArrayView dhidden, dresidual;  // each absent where it is not wanted
  ArrayView dweight;             // likewise; one row
};

}  // namespace selective_scan
