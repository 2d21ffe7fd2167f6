// The ops of the RMS norm on one backend, forward and backward. Only Python calls them, and never
// under tracing.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "../core/norm_params.h"
#include "backend.h"
#include "tensor_checks.h"

namespace selective_scan::op {

/// A call while its parameters are filled in. Its arithmetic is fp64 if any array is.
template <class Backend, class Params>
struct NormCall {
  const char* name;    // of rows
  const Tensor& rows;  // whose shape the others must match
  Tensor scales;       // the weight, contiguous; undefined if there is none
  std::vector<Tensor> copies;
  Params params;

  NormCall(const char* name, const Tensor& rows, const OptionalTensor& weight, double eps)
      : name(name), rows(rows) {
    if (rows.dim() == 0) fail(name, " must be (..., channels), got ()");
    const int64_t channels = rows.size(rows.dim() - 1);
    if (weight) {
      check_beside("weight", *weight, name, rows, kRealDtypes, {{"channels", channels}});
    }
    if (Backend::kMostChannels > 0 && channels > Backend::kMostChannels) {
      fail(name, " must have at most ", Backend::kMostChannels, " channels, got ", channels);
    }
    params.channels = channels;
    params.rows = channels == 0 ? 0 : rows.numel() / channels;
    params.eps = eps;
    if (!weight) return;
    scales = as_contiguous(*weight);
    set_view(params.weight, scales, 0);
  }

  /// Views contiguous rows that are evenly spaced. Other layouts are copied.
  void take(ArrayView& view, const char* own_name, const Tensor& given) {
    if (&given != &rows) check_shape_of(own_name, given, name, rows);
    check_dtype(own_name, given, kRealDtypes);
    if (const std::optional<int64_t> stride = row_stride(given)) {
      set_view(view, given, *stride);
    } else {
      copies.push_back(as_contiguous(given));
      set_view(view, copies.back(), params.channels);
    }
  }
  void take(ArrayView& view, const char* own_name, const OptionalTensor& given) {
    if (given) take(view, own_name, *given);
  }
  /// Returns and views new contiguous rows, or an undefined tensor if there is no dtype.
  Tensor make(ArrayView& view, std::optional<ScalarType> dtype) {
    if (!dtype) return Tensor();
    const Tensor made = allocate(rows, rows.sizes(), *dtype);
    set_view(view, made, params.channels);
    return made;
  }
  void set_view(ArrayView& view, const Tensor& tensor, int64_t row_stride) {
    view = view_of(tensor);
    view.batch = row_stride;
    view.channel = 1;
    params.is_double = params.is_double || view.dtype == DType::kFloat64;
  }

  static std::optional<int64_t> row_stride(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    if (tensor.stride(last) != 1 && tensor.size(last) > 1) return std::nullopt;
    std::optional<int64_t> stride;
    int64_t next = 0;
    for (int64_t dim = last; dim-- > 0;) {
      if (tensor.size(dim) == 1) continue;
      if (!stride) {
        stride = next = tensor.stride(dim);
      } else if (tensor.stride(dim) != next) {
        return std::nullopt;
      }
      next *= tensor.size(dim);
    }
    return stride.value_or(tensor.size(last));
  }
};

/// Returns the normed rows and, if total_dtype is given, the sum of hidden and residual.
template <class Backend>
std::tuple<Tensor, Tensor> add_rms_norm_fwd(const Tensor& hidden, const OptionalTensor& residual,
                                            const OptionalTensor& weight, double eps,
                                            ScalarType dtype,
                                            std::optional<ScalarType> total_dtype) {
  NormCall<Backend, NormForwardParams> call("hidden", hidden, weight, eps);
  NormForwardParams& params = call.params;
  call.take(params.hidden, "hidden", hidden);
  call.take(params.residual, "residual", residual);
  const Tensor normed = call.make(params.normed, dtype);
  const Tensor total = call.make(params.total, total_dtype);
  if (params.rows > 0) launch_with_workspace(Backend(hidden), hidden, params);
  return {normed, total};
}

/// Returns the gradients of hidden and residual, each if its dtype is given, and that of the weight
/// if `needs_weight`.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_bwd(
    const Tensor& dnormed, const OptionalTensor& dtotal, const Tensor& total, const Tensor& weight,
    double eps, std::optional<ScalarType> hidden_dtype, std::optional<ScalarType> residual_dtype,
    bool needs_weight) {
  NormCall<Backend, NormBackwardParams> call("total", total, weight, eps);
  NormBackwardParams& params = call.params;
  call.take(params.total, "total", total);
  call.take(params.dnormed, "dnormed", dnormed);
  call.take(params.dtotal, "dtotal", dtotal);
  const Tensor dhidden = call.make(params.dhidden, hidden_dtype);
  const Tensor dresidual = call.make(params.dresidual, residual_dtype);
  const Tensor dweight = needs_weight ? allocate_like(call.scales) : Tensor();
  if (needs_weight) call.set_view(params.dweight, dweight, 0);
  launch_with_workspace(Backend(total), total, params);
  return {dhidden, dresidual, dweight};
}

/// The ops of a backend that composite ops call.
struct NormOps {
  decltype(&add_rms_norm_fwd<void>) forward;
  decltype(&add_rms_norm_bwd<void>) backward;
};

/// Registers the schemas, once for all backends.
void define_norm(auto& library) {
  library.def(
      "add_rms_norm_fwd(Tensor hidden, Tensor? residual, Tensor? weight, float eps, "
      "ScalarType dtype, ScalarType? total_dtype) -> (Tensor normed, Tensor total)");
  library.def(
      "add_rms_norm_bwd(Tensor dnormed, Tensor? dtotal, Tensor total, Tensor weight, float eps, "
      "ScalarType? hidden_dtype, ScalarType? residual_dtype, bool needs_weight) -> "
      "(Tensor dhidden, Tensor dresidual, Tensor dweight)");
}

/// Registers the ops for one backend.
template <class Backend>
void implement_norm(auto& library) {
  library.impl("add_rms_norm_fwd", TORCH_BOX(&add_rms_norm_fwd<Backend>));
  library.impl("add_rms_norm_bwd", TORCH_BOX(&add_rms_norm_bwd<Backend>));
}

}  // namespace selective_scan::op
