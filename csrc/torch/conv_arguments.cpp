#include "conv_arguments.h"

namespace selective_scan::op {
namespace {

constexpr std::initializer_list<ScalarType> kIndexDtypes = {ScalarType::Int, ScalarType::Long};

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

void check_shapes(const ConvArguments& args, ConvParams& params) {
  check_shape("x", args.x, {{"batch"}, {"dim"}, {"seqlen"}});
  params.batch = args.x.size(0);
  params.dim = args.x.size(1);
  params.seqlen = args.x.size(2);
  params.sequences = params.batch;
  check_shape("weight", args.weight, {{"dim", params.dim}, {"width"}});
  params.width = args.weight.size(1);
  if (params.width < 1 || params.width > kMaxConvWidth) {
    fail("weight must have width of 1 to ", kMaxConvWidth, ", got ", shape_text(args.weight));
  }
  if (args.bias) check_shape("bias", *args.bias, {{"dim", params.dim}});
  if (args.seq_idx) {
    check_shape("seq_idx", *args.seq_idx, {{"batch", params.batch}, {"seqlen", params.seqlen}});
  }
  if (args.cu_seqlens) {
    const Tensor& cu_seqlens = *args.cu_seqlens;
    check_shape("cu_seqlens", cu_seqlens, {{"sequences+1"}});
    params.sequences = cu_seqlens.size(0) - 1;
    if (params.sequences < 0) {
      fail("cu_seqlens must have sequences+1 of at least 1, got ", shape_text(cu_seqlens));
    }
    if (params.batch != 1) {
      fail("x must have batch of 1 where cu_seqlens is given, got ", shape_text(args.x));
    }
  }
  if (args.initial_states) {
    check_states_shape("initial_states", *args.initial_states, params);
  }
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

ArrayView conv_view(const Tensor& tensor) {
  ArrayView view = view_of(tensor);
  view.batch = tensor.stride(0);
  view.channel = tensor.stride(1);
  view.step = tensor.stride(2);
  return view;
}

ArrayView taps_view(const Tensor& tensor) {
  ArrayView view = view_of(tensor);
  view.channel = tensor.stride(0);
  if (tensor.dim() == 2) view.step = tensor.stride(1);
  return view;
}

IndexArray index_view(const Tensor& tensor) {
  IndexArray view;
  view.data = tensor.const_data_ptr();
  view.is_wide = dtype_of(tensor) == ScalarType::Long;
  const int64_t last = tensor.dim() - 1;
  if (last == 1) view.batch = tensor.stride(0);
  view.step = tensor.stride(last);
  return view;
}

}  // namespace selective_scan::op
