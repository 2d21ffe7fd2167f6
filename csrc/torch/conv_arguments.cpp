#include "conv_arguments.h"

#include "checked_call.h"
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

void check_sequences(const ConvArguments& args) {
  if (!args.seq_idx) return;
  if (args.cu_seqlens) fail("cu_seqlens must be None where seq_idx is given");
  if (args.initial_states) fail("initial_states must be None where seq_idx is given");
  if (args.return_final_states) fail("return_final_states must be False where seq_idx is given");
}

}  // namespace

ConvParams make_conv_params(const ConvArguments& args) {
  ConvParams params;
  params.silu = parse_activation(args.activation);
  CheckedCall call(tables::kCausalConv1d, {}, args.tensors());
  call.check_shapes();
  check_sequences(args);
  set_sizes(params, call);
  params.sequences = call[tables::kSequences];

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
  const auto check = [&](const char* name, const OptionalTensor& tensor, Dims dims) {
    if (tensor) check_beside(name, *tensor, "x", args.x, {dtype_of(args.x)}, dims);
  };
  const Dim dim{"dim", params.dim};
  check("dout", dout, {{"batch", params.batch}, dim, {"seqlen", params.seqlen}});
  check("dfinal_states", dfinal_states,
        {{"sequences", params.sequences}, dim, {"width-1", params.width - 1}});
  if (dx) check_given_gradient("dx", *dx, "x", args.x);
}

ConvPrefillParams make_conv_prefill_params(const ConvPrefillArguments& args) {
  ConvPrefillParams params;
  params.silu = parse_activation(args.activation);
  CheckedCall call(tables::kCausalConv1dPrefill, {}, args.tensors());
  call.check_shapes();
  set_sizes(params, call);
  params.sequences = call[tables::kSequences];

  params.x = conv_view(args.x);
  params.weight = taps_view(args.weight);
  if (args.bias) params.bias = taps_view(*args.bias);
  params.cu_seqlens = index_view(args.cu_seqlens);
  params.slots = state_slots(args.conv_states, params.sequences, args.cache_indices,
                             args.has_initial_state, args.pad_slot_id);
  params.slots.is_double = params.is_double;
  return params;
}

ConvUpdateParams make_conv_update_params(const ConvUpdateArguments& args) {
  ConvUpdateParams params;
  params.silu = parse_activation(args.activation);
  params.pad_slot_id = args.pad_slot_id;
  CheckedCall call(tables::kCausalConv1dUpdate, {}, args.tensors());
  call.check_shapes();
  set_sizes(params, call);
  params.seqlen = args.x.dim() == 3 ? call[tables::kSteps] : 1;
  params.slots = args.conv_state.size(0);
  params.state_len = call[tables::kStateLen];
  if (params.state_len < params.width - 1) {
    fail("conv_state must have state_len of at least width-1 = ", params.width - 1, ", got ",
         shape_text(args.conv_state));
  }

  params.x = conv_view(args.x);
  params.weight = taps_view(args.weight);
  if (args.bias) params.bias = taps_view(*args.bias);
  params.conv_state = conv_view(args.conv_state);
  if (args.cache_seqlens) params.cache_seqlens = index_view(*args.cache_seqlens);
  if (args.conv_state_indices) params.conv_state_indices = index_view(*args.conv_state_indices);
  return params;
}

ArrayView conv_view(const Tensor& tensor) {
  return tensor.dim() == 3 ? sequence_view(tensor)
                           : view_of(tensor, &ArrayView::batch, &ArrayView::channel);
}

ArrayView taps_view(const Tensor& tensor) {
  return tensor.dim() == 2 ? view_of(tensor, &ArrayView::channel, &ArrayView::step)
                           : channel_view(tensor);
}

}  // namespace selective_scan::op
