#include "conv_arguments.h"

#include "state_slots.h"

namespace selective_scan::op {
namespace {

bool parse_activation(const std::optional<std::string>& name) {
  if (!name) return false;
  if (*name != "silu" && *name != "swish") {
    fail("activation must be None or one of silu, swish, got '", *name, "'");
  }
  return true;
}

/// Calls visit(name, tensor) for every tensor that is there, in schema order.
template <class Visit>
void for_each_tensor(const ConvArguments& args, const Visit& visit) {
  visit("x", args.x);
  visit("weight", args.weight);
  if (args.bias) visit("bias", *args.bias);
  if (args.seq_idx) visit("seq_idx", *args.seq_idx);
  if (args.cu_seqlens) visit("cu_seqlens", *args.cu_seqlens);
  if (args.initial_states) visit("initial_states", *args.initial_states);
}

void check_dtypes(const ConvArguments& args) {
  check_dtype("x", args.x, kRealDtypes);
  check_dtype("weight", args.weight, kRealDtypes);
  if (args.bias) check_dtype("bias", *args.bias, kRealDtypes);
  if (args.seq_idx) check_dtype("seq_idx", *args.seq_idx, kIndexDtypes);
  if (args.cu_seqlens) check_dtype("cu_seqlens", *args.cu_seqlens, kIndexDtypes);
  if (args.initial_states) check_dtype("initial_states", *args.initial_states, kRealDtypes);
}

/// Of initial_states, final states and their gradients.
void check_states_shape(const char* name, const Tensor& tensor, const ConvParams& params) {
  check_shape(
      name, tensor,
      {{"sequences", params.sequences}, {"dim", params.dim}, {"width-1", params.width - 1}});
}

void check_weight_shape(const Tensor& weight, ConvParams& params) {
  check_shape("weight", weight, {{"dim", params.dim}, {"width"}});
  params.width = weight.size(1);
  if (params.width < 1 || params.width > kMaxConvWidth) {
    fail("weight must have width of 1 to ", kMaxConvWidth, ", got ", shape_text(weight));
  }
}

void check_shapes(const ConvArguments& args, ConvParams& params) {
  check_shape("x", args.x, {{"batch"}, {"dim"}, {"seqlen"}});
  params.batch = args.x.size(0);
  params.dim = args.x.size(1);
  params.seqlen = args.x.size(2);
  params.sequences = params.batch;
  check_weight_shape(args.weight, params);
  if (args.bias) check_shape("bias", *args.bias, {{"dim", params.dim}});
  if (args.seq_idx) {
    check_shape("seq_idx", *args.seq_idx, {{"batch", params.batch}, {"seqlen", params.seqlen}});
  }
  if (args.cu_seqlens) {
    params.sequences = packed_sequences(*args.cu_seqlens, "x", args.x).count;
  }
  if (args.initial_states) {
    check_states_shape("initial_states", *args.initial_states, params);
  }
}

void check_update_shapes(const ConvUpdateArguments& args, ConvUpdateParams& params) {
  const Tensor &x = args.x, &state = args.conv_state;
  const bool has_steps = x.dim() == 3;
  if (x.dim() != 2 && !has_steps) {
    fail("x must be (batch, dim) or (batch, dim, steps), got ", shape_text(x));
  }
  params.batch = x.size(0);
  params.dim = x.size(1);
  params.seqlen = has_steps ? x.size(2) : 1;
  const Dim batch{"batch", params.batch}, dim{"dim", params.dim};
  // Without indices every row has the slot of its own number.
  check_shape("conv_state", state,
              {args.conv_state_indices ? Dim{"slots"} : batch, dim, {"state_len"}});
  params.slots = state.size(0);
  params.state_len = state.size(2);
  check_weight_shape(args.weight, params);
  if (params.state_len < params.width - 1) {
    fail("conv_state must have state_len of at least width-1 = ", params.width - 1, ", got ",
         shape_text(state));
  }
  if (args.bias) check_shape("bias", *args.bias, {dim});
  if (args.cache_seqlens) check_shape("cache_seqlens", *args.cache_seqlens, {batch});
  if (args.conv_state_indices) {
    check_shape("conv_state_indices", *args.conv_state_indices, {batch});
  }
  if (args.out && has_steps) check_shape("out", *args.out, {batch, dim, {"steps", params.seqlen}});
  if (args.out && !has_steps) check_shape("out", *args.out, {batch, dim});
}

ArrayView view_of(const Tensor& tensor) {
  ArrayView view;
  // Inputs are only read; what is written is freshly allocated, or lent to be written to.
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.dtype = component_dtype(tensor);
  return view;
}

void check_sequences(const ConvArguments& args, bool uses_states) {
  if (!args.seq_idx) return;
  if (args.cu_seqlens) fail("cu_seqlens must be None where seq_idx is given");
  if (args.initial_states) fail("initial_states must be None where seq_idx is given");
  if (uses_states) fail("return_final_states must be False where seq_idx is given");
}

}  // namespace

ConvParams make_conv_params(const ConvArguments& args, bool uses_states) {
  ConvParams params;
  params.silu = parse_activation(args.activation);
  for_each_tensor(args, check_dense);
  for_each_tensor(args, [&](const char* name, const Tensor& tensor) {
    check_same_device(name, tensor, "x", args.x);
    params.is_double = params.is_double || dtype_of(tensor) == ScalarType::Double;
  });
  check_dtypes(args);
  check_shapes(args, params);
  check_sequences(args, uses_states);

  params.x = conv_view(args.x);
  params.weight = taps_view(args.weight);
  if (args.bias) params.bias = taps_view(*args.bias);
  if (args.seq_idx) params.seq_idx = index_view(*args.seq_idx);
  if (args.cu_seqlens) params.cu_seqlens = index_view(*args.cu_seqlens);
  if (args.initial_states) params.initial_states = conv_view(*args.initial_states);
  return params;
}

void check_conv_gradients(const ConvArguments& args, const ConvParams& params,
                          const OptionalTensor& dout, const OptionalTensor& dfinal_states,
                          const OptionalTensor& dx) {
  const auto check = [&](const char* name, const Tensor& tensor) {
    check_dense(name, tensor);
    check_same_device(name, tensor, "x", args.x);
    check_dtype(name, tensor, {dtype_of(args.x)});
  };
  const auto check_sequence = [&](const char* name, const Tensor& tensor) {
    check(name, tensor);
    check_shape(name, tensor,
                {{"batch", params.batch}, {"dim", params.dim}, {"seqlen", params.seqlen}});
  };
  if (dout) check_sequence("dout", *dout);
  if (dfinal_states) {
    check("dfinal_states", *dfinal_states);
    check_states_shape("dfinal_states", *dfinal_states, params);
  }
  if (dx) check_given_gradient("dx", *dx, "x", args.x);
}

ConvPrefillParams make_conv_prefill_params(const ConvPrefillArguments& args) {
  ConvPrefillParams params;
  params.silu = parse_activation(args.activation);
  const auto for_each = [&](const auto& visit) {
    visit("x", args.x);
    visit("weight", args.weight);
    visit("conv_states", args.conv_states);
    if (args.bias) visit("bias", *args.bias);
    visit("cu_seqlens", args.cu_seqlens);
    if (args.cache_indices) visit("cache_indices", *args.cache_indices);
    if (args.has_initial_state) visit("has_initial_state", *args.has_initial_state);
  };
  for_each(check_dense);
  for_each([&](const char* name, const Tensor& tensor) {
    check_same_device(name, tensor, "x", args.x);
    params.is_double = params.is_double || dtype_of(tensor) == ScalarType::Double;
  });
  check_dtype("x", args.x, kRealDtypes);
  check_dtype("weight", args.weight, kRealDtypes);
  check_dtype("conv_states", args.conv_states, kRealDtypes);
  if (args.bias) check_dtype("bias", *args.bias, kRealDtypes);
  check_dtype("cu_seqlens", args.cu_seqlens, kIndexDtypes);
  check_slot_dtypes(args.cache_indices, args.has_initial_state);

  check_shape("x", args.x, {{"batch"}, {"dim"}, {"seqlen"}});
  params.batch = args.x.size(0);
  params.dim = args.x.size(1);
  params.seqlen = args.x.size(2);
  check_weight_shape(args.weight, params);
  params.sequences = packed_sequences(args.cu_seqlens, "x", args.x).count;
  const Dim dim{"dim", params.dim}, sequences{"sequences", params.sequences};
  check_shape("conv_states", args.conv_states,
              {args.cache_indices ? Dim{"slots"} : sequences, dim, {"width-1", params.width - 1}});
  if (args.bias) check_shape("bias", *args.bias, {dim});
  check_slot_shapes(sequences, args.cache_indices, args.has_initial_state);
  check_changed("conv_states", args.conv_states);

  params.x = conv_view(args.x);
  params.weight = taps_view(args.weight);
  if (args.bias) params.bias = taps_view(*args.bias);
  params.cu_seqlens = index_view(args.cu_seqlens);
  params.slots =
      state_slots(params.sequences, args.cache_indices, args.has_initial_state, args.pad_slot_id);
  params.slots.slots = args.conv_states.size(0);
  params.slots.channels = params.dim;
  params.slots.dstate = params.width - 1;
  params.slots.is_double = params.is_double;
  params.slots.pool =
      view_of(args.conv_states, &ArrayView::batch, &ArrayView::channel, &ArrayView::state);
  return params;
}

ConvUpdateParams make_conv_update_params(const ConvUpdateArguments& args) {
  ConvUpdateParams params;
  params.silu = parse_activation(args.activation);
  params.pad_slot_id = args.pad_slot_id;
  const auto for_each = [&](const auto& visit) {
    visit("x", args.x);
    visit("conv_state", args.conv_state);
    visit("weight", args.weight);
    if (args.bias) visit("bias", *args.bias);
    if (args.cache_seqlens) visit("cache_seqlens", *args.cache_seqlens);
    if (args.conv_state_indices) visit("conv_state_indices", *args.conv_state_indices);
    if (args.out) visit("out", *args.out);
  };
  for_each(check_dense);
  for_each([&](const char* name, const Tensor& tensor) {
    check_same_device(name, tensor, "x", args.x);
    params.is_double = params.is_double || dtype_of(tensor) == ScalarType::Double;
  });
  check_dtype("x", args.x, kRealDtypes);
  check_dtype("conv_state", args.conv_state, kRealDtypes);
  check_dtype("weight", args.weight, kRealDtypes);
  if (args.bias) check_dtype("bias", *args.bias, kRealDtypes);
  if (args.cache_seqlens) check_dtype("cache_seqlens", *args.cache_seqlens, kIndexDtypes);
  if (args.conv_state_indices) {
    check_dtype("conv_state_indices", *args.conv_state_indices, kIndexDtypes);
  }
  if (args.out) check_dtype("out", *args.out, {dtype_of(args.x)});
  check_update_shapes(args, params);
  check_changed("conv_state", args.conv_state);
  if (args.out) check_changed("out", *args.out);

  params.x = conv_view(args.x);
  params.weight = taps_view(args.weight);
  if (args.bias) params.bias = taps_view(*args.bias);
  params.conv_state = conv_view(args.conv_state);
  if (args.cache_seqlens) params.cache_seqlens = index_view(*args.cache_seqlens);
  if (args.conv_state_indices) params.conv_state_indices = index_view(*args.conv_state_indices);
  return params;
}

ArrayView conv_view(const Tensor& tensor) {
  ArrayView view = view_of(tensor);
  view.batch = tensor.stride(0);
  view.channel = tensor.stride(1);
  if (tensor.dim() == 3) view.step = tensor.stride(2);
  return view;
}

ArrayView taps_view(const Tensor& tensor) {
  ArrayView view = view_of(tensor);
  view.channel = tensor.stride(0);
  if (tensor.dim() == 2) view.step = tensor.stride(1);
  return view;
}

}  // namespace selective_scan::op
