// The op of the state update on one backend.
#pragma once

#include <torch/csrc/stable/library.h>

#include <utility>

#include "../core/update_params.h"
#include "argument_tables.h"
#include "backend.h"
#include "checked_call.h"
#include "scan_arguments.h"
#include "state_slots.h"

namespace selective_scan::op {

using UpdateArguments = tables::SelectiveStateUpdateArguments;

inline bool has_heads(const UpdateArguments& args) {
  return args.state.dim() == 4;
}
inline bool has_steps(const UpdateArguments& args) {
  return args.x.dim() == (has_heads(args) ? 4 : 3);
}

/// If there are groups but no heads, treats the groups as heads.
inline ArrayView with_heads(ArrayView view, const UpdateArguments& args,
                            const UpdateParams& params) {
  if (!has_heads(args)) view.group = params.dim * view.channel;
  return view;
}

inline IndexArray indices_of(const OptionalTensor& tensor) {
  if (!tensor) return {};
  IndexArray indices = index_view(*tensor);
  if (tensor->dim() == 1) std::swap(indices.batch, indices.step);  // one for all steps of a row
  return indices;
}

/// (batch, [step,] [head,] channel)
inline ArrayView update_view(const Tensor& tensor, const UpdateArguments& args,
                             const UpdateParams& params) {
  return with_heads(view_of(tensor, &ArrayView::batch, has_steps(args) ? &ArrayView::step : kNone,
                            has_heads(args) ? &ArrayView::group : kNone, &ArrayView::channel),
                    args, params);
}

/// Refuses invalid and unsupported calls, but does not check indices; returns parameters with
/// everything filled in but `out`. `max_dstate` is the backend's limit, 0 for none.
inline UpdateParams make_update_params(const UpdateArguments& args, int64_t max_dstate) {
  UpdateParams params;
  params.method = parse_method(args.discretization_method);
  params.dt_softplus = args.dt_softplus;
  params.A_is_log = args.A_is_log;
  params.pad_slot_id = args.pad_slot_id;

  CheckedCall call(tables::kSelectiveStateUpdate, {max_dstate, args.A_is_log}, args.tensors());
  call.check_shapes();
  set_sizes(params, call);
  params.slots = call[tables::kSlots];
  params.steps = has_steps(args) ? call[tables::kSteps] : 1;
  params.heads = has_heads(args) ? call[tables::kHeads] : 1;
  if (!has_heads(args)) {
    params.heads = params.groups;
    params.dim /= params.groups;
  }

  const auto head = has_heads(args) ? &ArrayView::group : kNone;
  const auto step = has_steps(args) ? &ArrayView::step : kNone;
  const auto view = [&](const Tensor& tensor, auto... strides) {
    return with_heads(view_of(tensor, strides...), args, params);
  };
  const auto projection_view = [&](const Tensor& tensor) {
    const bool has_groups = tensor.dim() - has_steps(args) == 3;
    return view_of(tensor, &ArrayView::batch, step, has_groups ? &ArrayView::group : kNone,
                   &ArrayView::state);
  };
  params.state = view(args.state, &ArrayView::batch, head, &ArrayView::channel, &ArrayView::state);
  params.x = update_view(args.x, args, params);
  params.dt = update_view(args.dt, args, params);
  params.A = view(args.A, head, &ArrayView::channel, &ArrayView::state);
  params.B = projection_view(args.B);
  params.C = projection_view(args.C);
  if (args.D) params.D = view(*args.D, head, &ArrayView::channel);
  if (args.z) params.z = update_view(*args.z, args, params);
  if (args.dt_bias) params.dt_bias = view(*args.dt_bias, head, &ArrayView::channel);
  if (args.input_delta) params.input_delta = update_view(*args.input_delta, args, params);
  params.sources = indices_of(args.state_batch_indices);
  params.destinations = indices_of(args.dst_state_batch_indices);
  params.destination_by_step =
      args.dst_state_batch_indices && args.dst_state_batch_indices->dim() == 2;
  return params;
}

/// Refuses indices of slots that do not exist. Reads them, so they must be in host memory.
inline void check_slots(const UpdateParams& params) {
  const auto check = [&](const char* name, const IndexArray& indices, int64_t steps) {
    if (!indices.present()) return;
    for (int64_t row = 0; row < params.batch; ++row) {
      for (int64_t step = 0; step < steps; ++step) {
        check_slot(name, indices.at(row, step), params);
      }
    }
  };
  check("state_batch_indices", params.sources, 1);
  check("dst_state_batch_indices", params.destinations,
        params.destination_by_step ? params.steps : 1);
}

/// Returns out, or an undefined tensor if the caller passed one to write to.
template <class Backend>
Tensor selective_state_update(const UpdateArguments& args) {
  UpdateParams params = make_update_params(args, Backend::kMaxDstate);
  const Backend backend(args.x);
  backend.check(params);
  const Tensor result = args.out ? Tensor() : allocate_like(args.x);
  if (args.x.numel() == 0) return result;
  params.out = update_view(args.out ? *args.out : result, args, params);
  launch_with_workspace(backend, args.x, params);
  return result;
}

/// Registers the op of a backend.
template <class Backend>
void implement_update(auto& library) {
  library.impl("selective_state_update",
               TORCH_BOX(&UpdateArguments::one_by_one<&selective_state_update<Backend>>));
}

}  // namespace selective_scan::op
