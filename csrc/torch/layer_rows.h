// Views of a layer's rows, (batch, seqlen, channels), and of its weights, as the parts of the layer
// read them.
#pragma once

#include "tensor_views.h"

namespace selective_scan::op {

/// Views `count` channels, from `first` on, of rows as (batch, count, seqlen).
inline Tensor channels_of(const Tensor& rows, int64_t first, int64_t count) {
  return view_as(rows, {rows.size(0), count, rows.size(1)},
                 {rows.stride(0), rows.stride(2), rows.stride(1)}, first * rows.stride(2));
}
inline Tensor channels_of(const Tensor& rows) {
  return channels_of(rows, 0, rows.size(2));
}

/// Views `count` columns, from `first` on, of contiguous rows as a matrix with batch and time in
/// one dimension.
inline Tensor matrix_of(const Tensor& rows, int64_t first, int64_t count) {
  const int64_t channels = rows.size(2);
  return view_as(rows, {rows.size(0) * rows.size(1), count}, {channels, 1}, first);
}
inline Tensor matrix_of(const Tensor& rows) {
  return matrix_of(rows, 0, rows.size(2));
}

inline Tensor transposed(const Tensor& matrix) {
  return view_as(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

/// Views (dim, 1, width) as (dim, width).
inline Tensor taps_of(const Tensor& weight) {
  return view_as(weight, {weight.size(0), weight.size(2)}, {weight.stride(0), weight.stride(2)});
}

/// Views `count` steps, from `first` on, of (batch, dim, steps).
inline Tensor steps_of(const Tensor& channels, int64_t first, int64_t count) {
  return view_as(channels, {channels.size(0), channels.size(1), count},
                 {channels.stride(0), channels.stride(1), channels.stride(2)},
                 first * channels.stride(2));
}

/// Views the only step of (batch, dim, 1) as (batch, dim).
inline Tensor step_of(const Tensor& channels) {
  return view_as(channels, {channels.size(0), channels.size(1)},
                 {channels.stride(0), channels.stride(1)});
}

}  // namespace selective_scan::op
