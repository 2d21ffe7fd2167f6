// The forward and backward ops of the adaptive unitary scan on one backend. They process the call
// slab by slab: a matrix product computes theta, then kernels scan the slab.
//
// A Backend (backend.h) also has for these:
//
//   static constexpr int64_t kThetaBytes
//       The largest size of theta for one slab.
//   static constexpr int64_t kLanes
//   static constexpr bool kChannelsLast
//       The memory layout of theta; see ThetaLayout.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "../core/unitary_params.h"
#include "argument_tables.h"
#include "backend.h"
#include "checked_call.h"
#include "optional_results.h"
#include "scan_ops.h"

namespace selective_scan::op {

using torch::stable::transpose;

/// The arguments that the forward and the backward op share.
using UnitaryArguments = tables::AdaptiveUnitaryScanArguments;

/// A view of b or c.
inline ArrayView weights_view(const Tensor& tensor) {
  if (tensor.dim() == 1) return view_of(tensor, &ArrayView::state);
  return view_of(tensor, &ArrayView::batch, tensor.dim() == 4 ? &ArrayView::group : kNone,
                 &ArrayView::state, &ArrayView::step);
}

/// Refuses invalid and unsupported calls; returns parameters with sizes, flags and inputs filled
/// in, except for theta and the states. `max_dstate` is the backend's limit, 0 for none.
inline UnitaryScanParams make_unitary_params(const UnitaryArguments& args, int64_t max_dstate) {
  UnitaryScanParams params;
  CheckedCall call(tables::kAdaptiveUnitaryScan, {max_dstate}, args.tensors());
  call.check_shapes();
  set_sizes(params, call);
  params.variable_b = args.b.dim() > 1;
  params.variable_c = args.c.dim() > 1;

  params.u = sequence_view(args.u);
  params.dt = sequence_view(args.dt);
  if (args.z) params.z = sequence_view(*args.z);
  params.x_bias = pole_view(args.x_bias);
  params.b = weights_view(args.b);
  params.c = weights_view(args.c);
  params.D = channel_view(args.D);
  return params;
}

inline Tensor new_zeros_of(const Tensor& like, IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  Tensor tensor = allocate(like, shape, dtype);
  return torch::stable::zero_(tensor);
}
inline Tensor part_of(Tensor tensor, int64_t dim, int64_t start, int64_t length) {
  return torch::stable::narrow(tensor, dim, start, length);
}
inline Tensor plus(const Tensor& a, const Tensor& b) {
  return allocating(a, [&] { return torch::stable::subtract(a, b, -1.0); });
}
inline Tensor view_as_real(const Tensor& tensor) {
  return call("aten::view_as_real", "", tensor);
}
/// Returns the matrix product. It calls the overload with an output because autocast leaves that
/// one alone: any other overload would return half precision, which the kernels do not expect.
inline Tensor product(const Tensor& rows, const Tensor& matrix) {
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.back() = matrix.size(1);
  const Tensor result = allocate(rows, sizes_of(shape), rows.scalar_type());
  // This may copy a factor.
  allocating(rows, [&] { return call("aten::matmul", "out", rows, matrix, result); });
  return result;
}
/// Returns the sum of outer products: (..., n) and (..., k) give (n, k).
inline Tensor outer_product(const Tensor& left, const Tensor& right) {
  const auto matrix = [](const Tensor& tensor) {
    const int64_t width = tensor.size(tensor.dim() - 1);
    return reshaped(tensor, {tensor.numel() / width, width});
  };
  return product(transpose(matrix(left), 0, 1), matrix(right));
}
/// The memory layout of theta for a slab: (batch, step, row). A row stands for a channel and a
/// state. With channels last, rows are (group, state, channel of the group), with the last
/// dimension padded to a multiple of kLanes. Otherwise rows are (group, channel of the group,
/// state).
struct ThetaLayout {
  int64_t groups;
  int64_t group_channels;
  int64_t padded_channels;
  int64_t dim;
  int64_t dstate;
  bool channels_last;

  ThetaLayout(const UnitaryScanParams& params, bool channels_last, int64_t lanes)
      : groups(params.groups),
        group_channels(params.dim / params.groups),
        padded_channels(channels_last ? round_up(group_channels, lanes) : group_channels),
        dim(params.dim),
        dstate(params.dstate),
        channels_last(channels_last) {}

  int64_t rows() const { return groups * padded_channels * dstate; }

  /// Turns (dim, dstate, k) into (row, k), with zeros in padding rows.
  Tensor to_rows(const Tensor& tensor, ScalarType dtype) const {
    const int64_t k = tensor.size(2);
    if (!channels_last) return cast(reshaped(tensor, {dim * dstate, k}), dtype);
    Tensor rows_of_all = new_zeros_of(tensor, {groups, dstate, padded_channels, k}, dtype);
    const Tensor channels = part_of(rows_of_all, 2, 0, group_channels);
    copy(channels, transpose(reshaped(tensor, {groups, group_channels, dstate, k}), 1, 2));
    return reshaped(rows_of_all, {rows(), k});
  }

  /// The inverse of to_rows().
  Tensor from_rows(const Tensor& tensor) const {
    const int64_t k = tensor.size(1);
    if (!channels_last) return reshaped(tensor, {dim, dstate, k});
    const Tensor channels =
        part_of(reshaped(tensor, {groups, dstate, padded_channels, k}), 2, 0, group_channels);
    return reshaped(transpose(channels, 1, 2), {dim, dstate, k});
  }

  /// Returns the slab as an array. Imaginary parts, if any, form a separate plane.
  SlabArray view(const Tensor& slab, int64_t batches, int64_t steps) const {
    SlabArray array;
    array.data = slab.mutable_data_ptr();
    array.batch = steps * rows();
    array.step = rows();
    array.imag = batches * steps * rows();
    array.channel = channels_last ? 1 : dstate;
    array.group = padded_channels * dstate;
    array.state = channels_last ? padded_channels : 1;
    return array;
  }

  /// Sums per-channel terms, (2, batch, step, row), over the channels of each group: (batch, group,
  /// state, step, 2).
  Tensor sum_over_channels(const Tensor& terms, int64_t batches, int64_t steps) const {
    Tensor sums;  // (2, batch, step, group, state)
    if (channels_last) {
      const Tensor padded = reshaped(terms, {2, batches, steps, groups, dstate, padded_channels});
      sums = sum_over(part_of(padded, 5, 0, group_channels), {5});
    } else {
      sums = sum_over(reshaped(terms, {2, batches, steps, groups, group_channels, dstate}), {4});
    }
    // -> (batch, group, state, step, 2)
    return transpose(transpose(transpose(transpose(sums, 0, 1), 1, 3), 2, 4), 3, 4);
  }
};

/// A slab: a range of batch entries and of steps.
struct Slab {
  int64_t first_batch;
  int64_t batches;
  int64_t first_step;
  int64_t steps;
};

/// Returns the slabs in the order of the forward pass. Theta of each fits the budget, or has the
/// kUnitaryStateChunk steps of one sequence if those need more.
inline std::vector<Slab> make_slabs(const UnitaryScanParams& params, int64_t rows,
                                    int64_t budget_bytes) {
  const int64_t bytes_per_step = rows * (params.is_double ? 8 : 4);
  const int64_t sequence_steps = std::max(budget_bytes / bytes_per_step, kUnitaryStateChunk);
  const int64_t least_steps = std::min(kUnitaryStateChunk, std::max<int64_t>(params.seqlen, 1));
  const int64_t batches = std::clamp<int64_t>(sequence_steps / least_steps, 1, params.batch);
  const int64_t steps = sequence_steps / batches / kUnitaryStateChunk * kUnitaryStateChunk;
  const int64_t slab_steps = std::max(steps, kUnitaryStateChunk);
  std::vector<Slab> slabs;
  for (int64_t batch = 0; batch < params.batch; batch += batches) {
    for (int64_t step = 0; step < params.seqlen; step += slab_steps) {
      slabs.push_back({batch, std::min(batches, params.batch - batch), step,
                       std::min(slab_steps, params.seqlen - step)});
    }
  }
  return slabs;
}

inline void set_slab(UnitaryScanParams& params, const Slab& slab) {
  params.first_batch = slab.first_batch;
  params.batches = slab.batches;
  params.first_step = slab.first_step;
  params.steps = slab.steps;
}

/// The part of a (batch, ..., step) tensor that belongs to a slab.
inline Tensor slab_of(const Tensor& tensor, const Slab& slab, int64_t step_dim) {
  return part_of(part_of(tensor, 0, slab.first_batch, slab.batches), step_dim, slab.first_step,
                 slab.steps);
}

/// Returns u of a slab as (batch, step, channel) in the compute type. It is a view if u has that
/// type: a matrix product takes either order of dimensions as it is.
inline Tensor slab_inputs(const Tensor& u, const Slab& slab, ScalarType dtype) {
  return cast(transpose(slab_of(u, slab, 2), 1, 2), dtype);
}

inline Tensor initial_states(const UnitaryScanParams& params, const Tensor& u,
                             const OptionalTensor& given) {
  const ScalarType dtype = float_dtype(params.is_double, true);
  const std::array<int64_t, 3> shape = {params.batch, params.dim, params.dstate};
  return given ? copy(allocate(u, shape, dtype), *given) : new_zeros_of(u, shape, dtype);
}

template <class Backend>
std::tuple<Tensor, Tensor, OptionalTensor> adaptive_unitary_scan_fwd(const UnitaryArguments& args,
                                                                     bool save_states) {
  const auto& [u, dt, x, x_bias, b, c, D, z, initial_state] = args;
  UnitaryForwardParams params(make_unitary_params(args, Backend::kMaxDstate));
  const Backend backend(u);
  const ScalarType dtype = float_dtype(params.is_double, false);

  Tensor out = allocate_like(u);
  Tensor last_state = initial_states(params, u, initial_state);
  OptionalTensor states;
  if (save_states) {
    const int64_t saved = num_saved_values(num_saved_unitary_states(params.seqlen), params);
    states = allocate(u, {saved}, float_dtype(params.is_double, true));
    Tensor padding = part_of(*states, 0, saved - kStatesPadding, kStatesPadding);
    torch::stable::zero_(padding);
  }
  if (u.numel() == 0) return {out, last_state, states};

  params.out = sequence_view(out);
  params.state = last_state.mutable_data_ptr();
  if (save_states) params.states = states->mutable_data_ptr();
  const ThetaLayout layout(params, Backend::kChannelsLast, Backend::kLanes);
  const Tensor x_columns = as_contiguous(transpose(layout.to_rows(x, dtype), 0, 1));
  for (const Slab& slab : make_slabs(params, layout.rows(), Backend::kThetaBytes)) {
    const Tensor theta = product(slab_inputs(u, slab, dtype), x_columns);
    set_slab(params, slab);
    params.theta = layout.view(theta, slab.batches, slab.steps);
    launch_with_workspace(backend, u, params);
  }
  return {out, last_state, states};
}

inline void check_unitary_gradients(const UnitaryScanParams& params, const Tensor& u,
                                    const OptionalTensor& dout, const OptionalTensor& dlast_state,
                                    const OptionalTensor& states) {
  const auto check = [&](const char* name, const Tensor& tensor, ScalarType dtype, Dims dims) {
    check_beside(name, tensor, "u", u, {dtype}, dims);
  };
  const Dim batch{"batch", params.batch}, dim{"dim", params.dim}, dstate{"dstate", params.dstate};
  const ScalarType state_dtype = float_dtype(params.is_double, true);
  if (dout) check("dout", *dout, u.scalar_type(), {batch, dim, {"seqlen", params.seqlen}});
  if (dlast_state) check("dlast_state", *dlast_state, state_dtype, {batch, dim, dstate});
  if (!states || states->numel() == 0) return;
  check("states", *states, state_dtype,
        {{"saved values", num_saved_values(num_saved_unitary_states(params.seqlen), params)}});
  if (!states->is_contiguous()) fail("states must be contiguous");
}

/// Accumulates the gradient of b or c while slabs are visited. A constant b or c takes sums over
/// time for each channel; one with steps takes the terms of one slab at a time.
class WeightGradient {
 public:
  WeightGradient(const UnitaryScanParams& params, const Tensor& u, const Tensor& weight,
                 bool is_variable)
      : is_variable_(is_variable),
        dtype_(float_dtype(params.is_double, false)),
        gradient_(allocate_like(weight)) {
    if (is_variable) {
      if (u.numel() == 0) torch::stable::zero_(gradient_);  // no slab will fill it
      return;
    }
    sums_ = new_zeros_of(u, {params.batch, params.dim, params.dstate, 2}, dtype_);
  }

  void* sums() const { return is_variable_ ? nullptr : sums_.mutable_data_ptr(); }

  SlabArray terms(const ThetaLayout& layout, const Slab& slab) {
    if (!is_variable_) return {};
    terms_ = allocate(gradient_, {2, slab.batches, slab.steps, layout.rows()}, dtype_);
    return layout.view(terms_, slab.batches, slab.steps);
  }

  void take_terms(const ThetaLayout& layout, const Slab& slab) {
    if (!is_variable_) return;
    Tensor summed = layout.sum_over_channels(terms_, slab.batches, slab.steps);
    if (gradient_.dim() == 3) summed = torch::stable::squeeze(summed, 1);
    copy(view_as_real(slab_of(gradient_, slab, gradient_.dim() - 1)), summed);
  }

  Tensor finish() {
    if (!is_variable_) copy(view_as_real(gradient_), sum_over(sums_, {0, 1}));
    return gradient_;
  }

 private:
  bool is_variable_;
  ScalarType dtype_;
  Tensor gradient_;
  Tensor sums_;
  Tensor terms_;
};

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
adaptive_unitary_scan_bwd(const OptionalTensor& dout, const OptionalTensor& dlast_state,
                          const Tensor& u, const Tensor& dt, const Tensor& x, const Tensor& x_bias,
                          const Tensor& b, const Tensor& c, const Tensor& D,
                          const OptionalTensor& z, const OptionalTensor& initial_state,
                          const OptionalTensor& states) {
  const UnitaryArguments args{u, dt, x, x_bias, b, c, D, z, initial_state};
  UnitaryBackwardParams params(make_unitary_params(args, Backend::kMaxDstate));
  check_unitary_gradients(params, u, dout, dlast_state, states);
  const Backend backend(u);
  const ScalarType dtype = float_dtype(params.is_double, false);

  Tensor du = allocate_like(u);
  Tensor ddt = allocate_like(dt);
  Tensor dz = allocate_like(z);
  const Tensor state_gradient = initial_states(params, u, dlast_state);
  const Tensor theta_sums = new_zeros_of(u, {params.batch, params.dim, params.dstate}, dtype);
  const Tensor D_sums = new_zeros_of(u, {params.batch, params.dim}, dtype);
  WeightGradient db(params, u, b, params.variable_b);
  WeightGradient dc(params, u, c, params.variable_c);

  const ThetaLayout layout(params, Backend::kChannelsLast, Backend::kLanes);
  Tensor dx_rows = new_zeros_of(u, {layout.rows(), x.size(2)}, dtype);

  if (u.numel() > 0) {
    const Tensor own_states =
        states && states->numel() > 0
            ? *states
            : *std::get<2>(adaptive_unitary_scan_fwd<Backend>(args, /*save_states=*/true));
    const Tensor x_rows = layout.to_rows(x, dtype);
    const Tensor x_columns = as_contiguous(transpose(x_rows, 0, 1));

    params.state_gradient = state_gradient.mutable_data_ptr();
    params.states = const_cast<void*>(own_states.const_data_ptr());
    params.sums = {theta_sums.mutable_data_ptr(), db.sums(), dc.sums(), D_sums.mutable_data_ptr()};
    if (dout) params.dout = sequence_view(*dout);
    if (initial_state) params.initial_state = state_view(*initial_state);
    params.ddt = sequence_view(ddt);
    if (z) params.dz = sequence_view(dz);

    const std::vector<Slab> slabs = make_slabs(params, layout.rows(), Backend::kThetaBytes);
    for (auto slab = slabs.rbegin(); slab != slabs.rend(); ++slab) {
      const Tensor inputs = slab_inputs(u, *slab, dtype);
      const Tensor theta = product(inputs, x_columns);
      const int64_t padded_dim = layout.groups * layout.padded_channels;
      const Tensor du_direct = allocate(u, {slab->batches, slab->steps, padded_dim}, dtype);
      set_slab(params, *slab);
      params.theta = layout.view(theta, slab->batches, slab->steps);
      params.du = {.data = du_direct.mutable_data_ptr(),
                   .batch = slab->steps * padded_dim,
                   .step = padded_dim,
                   .group = layout.padded_channels,
                   .channel = 1};
      params.db_terms = db.terms(layout, *slab);
      params.dc_terms = dc.terms(layout, *slab);
      launch_with_workspace(backend, u, params);

      const Tensor& dtheta = theta;  // computed in place
      const Tensor direct = reshaped(
          part_of(reshaped(du_direct,
                           {slab->batches, slab->steps, layout.groups, layout.padded_channels}),
                  3, 0, layout.group_channels),
          {slab->batches, slab->steps, params.dim});
      const Tensor du_slab = plus(product(dtheta, x_rows), direct);
      copy(slab_of(du, *slab, 2), transpose(du_slab, 1, 2));
      dx_rows = plus(dx_rows, outer_product(dtheta, inputs));
      db.take_terms(layout, *slab);
      dc.take_terms(layout, *slab);
    }
  }

  const auto as_gradient_of = [](const Tensor& input, const Tensor& values) {
    return copy(allocate_like(input), values);
  };
  const Tensor dinitial_state =
      initial_state ? as_gradient_of(*initial_state, state_gradient) : Tensor();
  return {du,
          ddt,
          as_gradient_of(x, layout.from_rows(dx_rows)),
          as_gradient_of(x_bias, sum_over(theta_sums, {0})),
          db.finish(),
          dc.finish(),
          as_gradient_of(D, sum_over(D_sums, {0})),
          dz,
          dinitial_state};
}

/// Registers the ops of a backend.
template <class Backend>
void implement_unitary_scan(auto& library) {
  implement_forward<&UnitaryArguments::one_by_one<&adaptive_unitary_scan_fwd<Backend>, bool>>(
      library, "adaptive_unitary_scan_fwd");
  library.impl("adaptive_unitary_scan_bwd", TORCH_BOX(&adaptive_unitary_scan_bwd<Backend>));
}

}  // namespace selective_scan::op
