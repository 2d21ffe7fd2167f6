#include "update_arguments.h"

namespace selective_scan::op {
namespace {

constexpr std::initializer_list<ScalarType> kComplexDtypes = {ScalarType::ComplexFloat,
                                                              ScalarType::ComplexDouble};

/// Calls visit(name, tensor) for every tensor that is there, in schema order.
template <class Visit>
void for_each_tensor(const UpdateArguments& args, const Visit& visit) {
  visit("state", args.state);
  visit("x", args.x);
  visit("dt", args.dt);
  visit("A", args.A);
  visit("B", args.B);
  visit("C", args.C);
  if (args.D) visit("D", *args.D);
  if (args.z) visit("z", *args.z);
  if (args.dt_bias) visit("dt_bias", *args.dt_bias);
  if (args.state_batch_indices) visit("state_batch_indices", *args.state_batch_indices);
  if (args.dst_state_batch_indices) visit("dst_state_batch_indices", *args.dst_state_batch_indices);
  if (args.out) visit("out", *args.out);
}

bool has_heads(const UpdateArguments& args) {
  return args.state.dim() == 4;
}
bool has_steps(const UpdateArguments& args) {
  return args.x.dim() == (has_heads(args) ? 4 : 3);
}

void check_dtypes(const UpdateArguments& args, bool is_complex) {
  const auto check_either = [&](const char* name, const Tensor& tensor) {
    if (is_complex) {
      check_dtype(name, tensor, kComplexDtypes, " (complex A)");
    } else {
      check_dtype(name, tensor, kRealDtypes);
    }
  };
  check_either("state", args.state);
  check_dtype("x", args.x, kRealDtypes);
  check_dtype("dt", args.dt, kRealDtypes);
  if (args.A_is_log) {
    check_dtype("A", args.A, kRealDtypes);
  } else {
    check_dtype("A", args.A,
                {ScalarType::Float, ScalarType::Double, ScalarType::ComplexFloat,
                 ScalarType::ComplexDouble});
  }
  check_either("B", args.B);
  check_either("C", args.C);
  if (args.D) check_dtype("D", *args.D, kRealDtypes);
  if (args.z) check_dtype("z", *args.z, kRealDtypes);
  if (args.dt_bias) check_dtype("dt_bias", *args.dt_bias, kRealDtypes);
  if (args.state_batch_indices) {
    check_dtype("state_batch_indices", *args.state_batch_indices, kIndexDtypes);
  }
  if (args.dst_state_batch_indices) {
    check_dtype("dst_state_batch_indices", *args.dst_state_batch_indices, kIndexDtypes);
  }
  if (args.out) check_dtype("out", *args.out, {dtype_of(args.x)});
}

/// The dimensions of a call by name, those that it has of [steps] and [heads].
class ShapeChecks {
 public:
  ShapeChecks(const UpdateArguments& args, UpdateParams& params, int64_t max_dstate)
      : args_(args), params_(params), heads_(has_heads(args)), steps_(has_steps(args)) {
    check_state(max_dstate);
    check_x();
    check_rows("dt", args.dt);
    check({"A", args.A}, {dim_, dstate_});
    const int64_t groups_of_B = groups_of("B", args.B);
    const int64_t groups_of_C = groups_of("C", args.C);
    params.groups = common_groups("B", groups_of_B, "C", groups_of_C);
    if (args.D) check({"D", *args.D}, {dim_});
    if (args.z) check_rows("z", *args.z);
    if (args.dt_bias) check({"dt_bias", *args.dt_bias}, {dim_});
    if (args.state_batch_indices) {
      check_shape("state_batch_indices", *args.state_batch_indices, {batch_});
    }
    if (args.dst_state_batch_indices) check_destinations(*args.dst_state_batch_indices);
    if (args.out) check_rows("out", *args.out);
  }

 private:
  struct Named {
    const char* name;
    const Tensor& tensor;
  };

  void check_state(int64_t max_dstate) {
    const Tensor& state = args_.state;
    if (heads_) {
      check_shape("state", state, {{"slots"}, {"heads"}, {"dim"}, {"dstate"}});
    } else if (state.dim() != 3) {
      fail("state must be (slots, dim, dstate) or (slots, heads, dim, dstate), got ",
           shape_text(state));
    }
    const int64_t rank = state.dim();
    params_.slots = state.size(0);
    params_.heads = heads_ ? state.size(1) : 1;
    params_.dim = state.size(rank - 2);
    params_.dstate = state.size(rank - 1);
    if (params_.dstate == 0) fail("state must have dstate of at least 1, got ", shape_text(state));
    if (max_dstate > 0 && params_.dstate > max_dstate) {
      fail("state must have dstate of at most ", max_dstate, " on ", device_name(state), ", got ",
           shape_text(state));
    }
    head_ = {"heads", params_.heads};
    dim_ = {"dim", params_.dim};
    dstate_ = {"dstate", params_.dstate};
  }

  void check_x() {
    const Tensor& x = args_.x;
    if (!steps_ && x.dim() != (heads_ ? 3 : 2)) {
      fail("x must be ",
           heads_ ? "(batch, heads, dim) or (batch, steps, heads, dim)"
                  : "(batch, dim) or (batch, steps, dim)",
           ", got ", shape_text(x));
    }
    params_.batch = x.size(0);
    params_.steps = steps_ ? x.size(1) : 1;
    // Without indices every row has the slot of its own number.
    const Dim rows = args_.state_batch_indices ? Dim{"batch"} : Dim{"batch", params_.slots};
    check_rows("x", x, rows, Dim{"steps"});
    batch_ = {"batch", params_.batch};
    step_ = {"steps", params_.steps};
  }

  void check_rows(const char* name, const Tensor& tensor) {
    check_rows(name, tensor, batch_, step_);
  }
  void check_rows(const char* name, const Tensor& tensor, Dim batch, Dim steps) {
    if (steps_) {
      heads_ ? check_shape(name, tensor, {batch, steps, head_, dim_})
             : check_shape(name, tensor, {batch, steps, dim_});
    } else {
      heads_ ? check_shape(name, tensor, {batch, head_, dim_})
             : check_shape(name, tensor, {batch, dim_});
    }
  }

  /// Of an array that has a row for each head.
  void check(const Named& named, Dims dims) {
    if (!heads_) return check_shape(named.name, named.tensor, dims);
    if (dims.size() == 1) return check_shape(named.name, named.tensor, {head_, dim_});
    check_shape(named.name, named.tensor, {head_, dim_, dstate_});
  }

  int64_t groups_of(const char* name, const Tensor& tensor) {
    const int64_t rank = tensor.dim() - steps_;
    if (rank == 2) {
      steps_ ? check_shape(name, tensor, {batch_, step_, dstate_})
             : check_shape(name, tensor, {batch_, dstate_});
      return 1;
    }
    if (rank != 3) {
      fail(name, " must be ",
           steps_ ? "(batch, steps, dstate) or (batch, steps, groups, dstate)"
                  : "(batch, dstate) or (batch, groups, dstate)",
           ", got ", shape_text(tensor));
    }
    steps_ ? check_shape(name, tensor, {batch_, step_, {"groups"}, dstate_})
           : check_shape(name, tensor, {batch_, {"groups"}, dstate_});
    const int64_t groups = tensor.size(tensor.dim() - 2);
    check_groups(name, groups, heads_ ? head_ : dim_);
    return groups;
  }

  void check_destinations(const Tensor& indices) {
    if (indices.dim() == 1) return check_shape("dst_state_batch_indices", indices, {batch_});
    if (indices.dim() != 2) {
      fail("dst_state_batch_indices must be (batch,) or (batch, steps), got ", shape_text(indices));
    }
    check_shape("dst_state_batch_indices", indices, {batch_, step_});
  }

  const UpdateArguments& args_;
  UpdateParams& params_;
  bool heads_;
  bool steps_;
  Dim batch_{"batch"}, step_{"steps"}, head_{"heads"}, dim_{"dim"}, dstate_{"dstate"};
};

/// Groups without heads are made heads of.
ArrayView with_heads(ArrayView view, const UpdateArguments& args, const UpdateParams& params) {
  if (!has_heads(args)) view.group = params.dim * view.channel;
  return view;
}

IndexArray indices_of(const OptionalTensor& tensor) {
  IndexArray indices;
  if (!tensor) return indices;
  indices.data = tensor->const_data_ptr();
  indices.is_wide = dtype_of(*tensor) == ScalarType::Long;
  indices.batch = tensor->stride(0);
  if (tensor->dim() == 2) indices.step = tensor->stride(1);
  return indices;
}

}  // namespace

ArrayView update_view(const Tensor& tensor, const UpdateArguments& args,
                      const UpdateParams& params) {
  return with_heads(view_of(tensor, &ArrayView::batch, has_steps(args) ? &ArrayView::step : kNone,
                            has_heads(args) ? &ArrayView::group : kNone, &ArrayView::channel),
                    args, params);
}

UpdateParams make_update_params(const UpdateArguments& args, int64_t max_dstate) {
  UpdateParams params;
  params.method = args.method;
  params.dt_softplus = args.dt_softplus;
  params.A_is_log = args.A_is_log;
  params.pad_slot_id = args.pad_slot_id;

  for_each_tensor(args, check_dense);
  for_each_tensor(args, [&](const char* name, const Tensor& tensor) {
    check_same_device(name, tensor, "x", args.x);
    params.is_double = params.is_double || is_double_dtype(dtype_of(tensor));
  });
  params.is_complex = is_complex_dtype(dtype_of(args.A));
  check_dtypes(args, params.is_complex);
  const ShapeChecks checks(args, params, max_dstate);
  check_changed("state", args.state);
  if (args.out) check_changed("out", *args.out);
  if (!has_heads(args)) {
    params.heads = params.groups;
    params.dim /= params.groups;
  }

  const auto head = has_heads(args) ? &ArrayView::group : kNone;
  const auto step = has_steps(args) ? &ArrayView::step : kNone;
  const auto channel_view = [&](const Tensor& tensor) {
    return with_heads(view_of(tensor, head, &ArrayView::channel), args, params);
  };
  const auto projection_view = [&](const Tensor& tensor) {
    const bool has_groups = tensor.dim() - has_steps(args) == 3;
    return view_of(tensor, &ArrayView::batch, step, has_groups ? &ArrayView::group : kNone,
                   &ArrayView::state);
  };
  params.state = with_heads(
      view_of(args.state, &ArrayView::batch, head, &ArrayView::channel, &ArrayView::state), args,
      params);
  params.x = update_view(args.x, args, params);
  params.dt = update_view(args.dt, args, params);
  params.A =
      with_heads(view_of(args.A, head, &ArrayView::channel, &ArrayView::state), args, params);
  params.B = projection_view(args.B);
  params.C = projection_view(args.C);
  if (args.D) params.D = channel_view(*args.D);
  if (args.z) params.z = update_view(*args.z, args, params);
  if (args.dt_bias) params.dt_bias = channel_view(*args.dt_bias);
  params.sources = indices_of(args.state_batch_indices);
  params.destinations = indices_of(args.dst_state_batch_indices);
  params.destination_by_step =
      args.dst_state_batch_indices && args.dst_state_batch_indices->dim() == 2;
  return params;
}

void check_slots(const UpdateParams& params) {
  const auto check = [&](const char* name, const IndexArray& indices, int64_t steps) {
    if (!indices.present()) return;
    for (int64_t row = 0; row < params.batch; ++row) {
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t index = indices.at(row, step);
        if (index >= params.slots && index != params.pad_slot_id) {
          fail(name, " must be less than slots = ", params.slots, ", got ", index);
        }
      }
    }
  };
  check("state_batch_indices", params.sources, 1);
  check("dst_state_batch_indices", params.destinations,
        params.destination_by_step ? params.steps : 1);
}

}  // namespace selective_scan::op
