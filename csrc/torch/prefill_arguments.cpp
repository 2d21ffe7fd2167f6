#include "prefill_arguments.h"

#include "scan_arguments.h"
#include "state_slots.h"

namespace selective_scan::op {
namespace {

/// Calls visit(name, tensor) for every tensor that is there, in schema order.
template <class Visit>
void for_each_tensor(const PrefillArguments& args, const Visit& visit) {
  visit("u", args.u);
  visit("states", args.states);
  visit("delta", args.delta);
  visit("A", args.A);
  visit("B", args.B);
  visit("C", args.C);
  if (args.D) visit("D", *args.D);
  if (args.z) visit("z", *args.z);
  if (args.delta_bias) visit("delta_bias", *args.delta_bias);
  visit("cu_seqlens", args.cu_seqlens);
  if (args.cache_indices) visit("cache_indices", *args.cache_indices);
  if (args.has_initial_state) visit("has_initial_state", *args.has_initial_state);
  if (args.first_position) visit("first_position", *args.first_position);
  if (args.checkpoint_slots) visit("checkpoint_slots", *args.checkpoint_slots);
  if (args.out) visit("out", *args.out);
}

void check_dtypes(const PrefillArguments& args, bool is_complex) {
  check_dtype("u", args.u, kRealDtypes);
  if (is_complex) {
    check_dtype("states", args.states, {ScalarType::ComplexFloat, ScalarType::ComplexDouble},
                " (complex A)");
  } else {
    check_dtype("states", args.states, kRealDtypes);
  }
  check_dtype("delta", args.delta, kRealDtypes);
  check_dtype(
      "A", args.A,
      {ScalarType::Float, ScalarType::Double, ScalarType::ComplexFloat, ScalarType::ComplexDouble});
  check_projection_dtype("B", args.B, is_complex);
  check_projection_dtype("C", args.C, is_complex);
  if (args.D) check_dtype("D", *args.D, kRealDtypes);
  if (args.z) check_dtype("z", *args.z, kRealDtypes);
  if (args.delta_bias) check_dtype("delta_bias", *args.delta_bias, kRealDtypes);
  check_dtype("cu_seqlens", args.cu_seqlens, kIndexDtypes);
  check_slot_dtypes(args.cache_indices, args.has_initial_state);
  if (args.first_position) check_dtype("first_position", *args.first_position, kIndexDtypes);
  if (args.checkpoint_slots) check_dtype("checkpoint_slots", *args.checkpoint_slots, kIndexDtypes);
  if (args.out) check_dtype("out", *args.out, {dtype_of(args.u)});
}

/// The number of groups, 0 for a constant B or C.
int64_t groups_of(const char* name, const Tensor& tensor, const PrefillParams& params) {
  const Dim dim{"dim", params.dim}, dstate{"dstate", params.dstate};
  if (tensor.dim() == 2) {
    check_shape(name, tensor, {dim, dstate});
    return 0;
  }
  if (tensor.dim() != 3) {
    fail(name, " must be (dim, dstate) or (groups, dstate, total), got ", shape_text(tensor));
  }
  const bool is_interleaved = params.is_complex && !is_complex_dtype(dtype_of(tensor));
  const Dim steps =
      is_interleaved ? Dim{"2*total", 2 * params.seqlen} : Dim{"total", params.seqlen};
  check_shape(name, tensor, {{"groups"}, dstate, steps});
  check_groups(name, tensor.size(0), dim);
  return tensor.size(0);
}

void check_shapes(const PrefillArguments& args, PrefillParams& params, int64_t max_dstate) {
  check_shape("u", args.u, {{"dim"}, {"total"}});
  params.batch = 1;
  params.dim = args.u.size(0);
  params.seqlen = args.u.size(1);
  params.packed = packed_sequences(args.cu_seqlens, params.seqlen);
  const Dim dim{"dim", params.dim}, sequences{"sequences", params.packed.count};
  const auto check_sequence = [&](const char* name, const Tensor& tensor) {
    check_shape(name, tensor, {dim, {"total", params.seqlen}});
  };

  check_shape("states", args.states,
              {args.cache_indices ? Dim{"slots"} : sequences, dim, {"dstate"}});
  params.dstate = args.states.size(2);
  if (params.dstate == 0)
    fail("states must have dstate of at least 1, got ", shape_text(args.states));
  if (max_dstate > 0 && params.dstate > max_dstate) {
    fail("states must have dstate of at most ", max_dstate, " on ", device_name(args.states),
         ", got ", shape_text(args.states));
  }
  check_sequence("delta", args.delta);
  check_shape("A", args.A, {dim, {"dstate", params.dstate}});
  const int64_t groups_of_B = groups_of("B", args.B, params);
  const int64_t groups_of_C = groups_of("C", args.C, params);
  params.variable_B = groups_of_B > 0;
  params.variable_C = groups_of_C > 0;
  params.groups = common_groups("B", groups_of_B, "C", groups_of_C);
  if (args.D) check_shape("D", *args.D, {dim});
  if (args.z) check_sequence("z", *args.z);
  if (args.delta_bias) check_shape("delta_bias", *args.delta_bias, {dim});
  check_slot_shapes(sequences, args.cache_indices, args.has_initial_state);
  if (args.first_position) check_shape("first_position", *args.first_position, {sequences});
  if (args.checkpoint_slots) {
    check_shape("checkpoint_slots", *args.checkpoint_slots, {sequences, {"checkpoints"}});
    params.columns = args.checkpoint_slots->size(1);
  }
  if (args.out) check_sequence("out", *args.out);
}

void check_options(const PrefillArguments& args) {
  const int64_t every = args.checkpoint_every;
  if (every > 0 && !args.checkpoint_slots) {
    fail("checkpoint_slots must be a Tensor where checkpoint_every is above 0, got None");
  }
  if (every == 0 && args.checkpoint_slots) {
    fail("checkpoint_every must be at least 1 where checkpoint_slots is given, got 0");
  }
}

ArrayView projection_view(const Tensor& tensor, bool is_complex) {
  if (tensor.dim() == 2) return view_of(tensor, &ArrayView::channel, &ArrayView::state);
  ArrayView view = view_of(tensor, &ArrayView::group, &ArrayView::state, &ArrayView::step);
  if (is_complex && components(tensor) == 1) {  // (re, im) interleaved along time
    view.imag = view.step;
    view.step *= 2;
  }
  return view;
}

StateSlots slots_of(const PrefillArguments& args, const PrefillParams& params) {
  StateSlots slots = state_slots(params.packed.count, args.cache_indices, args.has_initial_state,
                                 args.pad_slot_id);
  slots.slots = args.states.size(0);
  slots.channels = params.dim;
  slots.dstate = params.dstate;
  slots.is_complex = params.is_complex;
  slots.is_double = params.is_double;
  slots.pool = view_of(args.states, &ArrayView::batch, &ArrayView::channel, &ArrayView::state);
  return slots;
}

}  // namespace

ArrayView prefill_view(const Tensor& tensor) {
  return view_of(tensor, &ArrayView::channel, &ArrayView::step);
}

PrefillParams make_prefill_params(const PrefillArguments& args, int64_t max_dstate) {
  if (args.checkpoint_every < 0) {
    fail("checkpoint_every must be at least 0, got ", args.checkpoint_every);
  }
  PrefillParams params;
  params.method = args.method;
  params.delta_softplus = args.delta_softplus;

  for_each_tensor(args, check_dense);
  for_each_tensor(args, [&](const char* name, const Tensor& tensor) {
    check_same_device(name, tensor, "u", args.u);
    params.is_double = params.is_double || is_double_dtype(dtype_of(tensor));
  });
  params.is_complex = is_complex_dtype(dtype_of(args.A));
  check_dtypes(args, params.is_complex);
  check_shapes(args, params, max_dstate);
  check_options(args);
  check_changed("states", args.states);
  if (args.out) check_changed("out", *args.out);

  params.u = prefill_view(args.u);
  params.delta = prefill_view(args.delta);
  params.A = view_of(args.A, &ArrayView::channel, &ArrayView::state);
  params.B = projection_view(args.B, params.is_complex);
  params.C = projection_view(args.C, params.is_complex);
  if (args.D) params.D = view_of(*args.D, &ArrayView::channel);
  if (args.z) params.z = prefill_view(*args.z);
  if (args.delta_bias) params.delta_bias = view_of(*args.delta_bias, &ArrayView::channel);
  params.slots = slots_of(args, params);
  params.checkpoint_every = args.checkpoint_every;
  if (args.first_position) params.first_positions = index_view(*args.first_position);
  if (args.checkpoint_slots) params.checkpoint_slots = index_view(*args.checkpoint_slots);
  return params;
}

void check_checkpoints(const PrefillParams& params) {
  for (int64_t i = 0; i < params.packed.count && params.checkpoint_every > 0; ++i) {
    if (params.first_positions.present() && params.first_positions.at(i) < 0) {
      fail("first_position must be at least 0, got ", params.first_positions.at(i));
    }
    if (params.slots.of(i) == StateSlots::kNone) continue;
    const int64_t length = params.packed.end(i) - params.packed.begin(i);
    for (int64_t k = 0; params.steps_before(i, k) <= length; ++k) {
      const int64_t column = params.column_of(i, k);
      if (column >= params.columns) {
        fail("checkpoint_slots must have checkpoints of at least ", column + 1,
             " for the positions of sequence ", i, ", got ", params.columns);
      }
      check_slot("checkpoint_slots", params.checkpoint_slots.at(i, column), params.slots);
    }
  }
}

}  // namespace selective_scan::op
