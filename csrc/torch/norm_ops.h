// The ops of the RMS norm on one backend, forward and backward. Only Python calls them, and never
// under tracing.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "../core/norm_params.h"
#include "backend.h"
#include "tensor_checks.h"

namespace selective_scan::op {

/// The tensor of a call whose shape the others must match.
struct NormRows {
  const char* name;
  const Tensor& tensor;

  int64_t channels() const { return tensor.size(tensor.dim() - 1); }

  /// Returns a contiguous tensor of the same sizes.
  Tensor allocate(ScalarType dtype) const { return op::allocate(tensor, tensor.sizes(), dtype); }

  /// Returns a view of contiguous rows that are evenly spaced. Other layouts are copied; `owner`
  /// keeps the copy.
  ArrayView view(const char* own_name, const Tensor& given, Tensor& owner) const {
    if (&given != &tensor) check_shape_of(own_name, given, name, tensor);
    check_dtype(own_name, given, kRealDtypes);
    owner = given;
    std::optional<int64_t> stride = row_stride(owner);
    if (!stride) {
      owner = as_contiguous(owner);
      stride = channels();
    }
    ArrayView view = view_of(owner);
    view.batch = *stride;
    return view;
  }
  ArrayView view(const char* own_name, const OptionalTensor& given, Tensor& owner) const {
    return given ? view(own_name, *given, owner) : ArrayView{};
  }
  /// Returns a view of a tensor from allocate().
  ArrayView view(const Tensor& made) const {
    ArrayView view = made.defined() ? view_of(made) : ArrayView{};
    view.batch = channels();
    return view;
  }

 private:
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

template <class Backend>
void check_norm(const NormRows& rows, const Tensor& weight) {
  if (rows.tensor.dim() == 0) fail(rows.name, " must be (..., channels), got ()");
  const int64_t channels = rows.channels();
  check_beside("weight", weight, rows.name, rows.tensor, kRealDtypes, {{"channels", channels}});
  if (Backend::kMostChannels > 0 && channels > Backend::kMostChannels) {
    fail(rows.name, " must have at most ", Backend::kMostChannels, " channels, got ", channels);
  }
}

/// Sets the arithmetic to fp64 if any array is fp64.
template <class... Views>
void set_arithmetic(NormParams& params, const Views&... views) {
  params.is_double = ((views.present() && views.dtype == DType::kFloat64) || ...);
}

inline void set_sizes(NormParams& params, const NormRows& rows, double eps) {
  params.channels = rows.channels();
  params.rows = params.channels == 0 ? 0 : rows.tensor.numel() / params.channels;
  params.eps = eps;
}

/// Returns the normed rows and, if total_dtype is given, the sum of hidden and residual.
template <class Backend>
std::tuple<Tensor, Tensor> add_rms_norm_fwd(const Tensor& hidden, const OptionalTensor& residual,
                                            const Tensor& weight, double eps, ScalarType dtype,
                                            std::optional<ScalarType> total_dtype) {
  const NormRows rows{"hidden", hidden};
  check_norm<Backend>(rows, weight);
  Tensor owners[2];
  NormForwardParams params;
  set_sizes(params, rows, eps);
  params.hidden = rows.view("hidden", hidden, owners[0]);
  params.residual = rows.view("residual", residual, owners[1]);
  const Tensor scales = as_contiguous(weight);
  params.weight = channel_view(scales);
  const Tensor normed = rows.allocate(dtype);
  const Tensor total = total_dtype ? rows.allocate(*total_dtype) : Tensor();
  params.normed = rows.view(normed);
  params.total = rows.view(total);
  set_arithmetic(params, params.hidden, params.residual, params.weight, params.normed,
                 params.total);
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
  const NormRows rows{"total", total};
  check_norm<Backend>(rows, weight);
  Tensor owners[3];
  NormBackwardParams params;
  set_sizes(params, rows, eps);
  params.total = rows.view("total", total, owners[0]);
  params.dnormed = rows.view("dnormed", dnormed, owners[1]);
  params.dtotal = rows.view("dtotal", dtotal, owners[2]);
  const Tensor scales = as_contiguous(weight);
  params.weight = channel_view(scales);
  const Tensor dhidden = hidden_dtype ? rows.allocate(*hidden_dtype) : Tensor();
  const Tensor dresidual = residual_dtype ? rows.allocate(*residual_dtype) : Tensor();
  const Tensor dweight = needs_weight ? allocate_like(scales) : Tensor();
  params.dhidden = rows.view(dhidden);
  params.dresidual = rows.view(dresidual);
  params.dweight = needs_weight ? channel_view(dweight) : ArrayView{};
  set_arithmetic(params, params.total, params.dnormed, params.dtotal, params.weight, params.dhidden,
                 params.dresidual, params.dweight);
  launch_with_workspace(Backend(total), total, params);
  return {dhidden, dresidual, dweight};
}

/// Registers the schemas, once for all backends.
void define_norm(auto& library) {
  library.def(
      "add_rms_norm_fwd(Tensor hidden, Tensor? residual, Tensor weight, float eps, "
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
