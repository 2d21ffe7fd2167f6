// The forward, backward and update ops of the causal convolution on one backend.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "../core/conv_params.h"
#include "argument_tables.h"
#include "backend.h"
#include "checked_call.h"
#include "optional_results.h"
#include "scan_arguments.h"
#include "state_slots.h"

namespace selective_scan::op {

/// The arguments that the forward and the backward op share. For the backward op,
/// return_final_states says whether the call has a gradient of the final states.
using ConvArguments = tables::CausalConv1dArguments;
using ConvPrefillArguments = tables::CausalConv1dPrefillArguments;
using ConvUpdateArguments = tables::CausalConv1dUpdateArguments;

/// A view of (batch, dim, steps), for sequences or their states, or of (batch, dim), for one step
/// of each sequence.
inline ArrayView conv_view(const Tensor& tensor) {
  return tensor.dim() == 3 ? sequence_view(tensor)
                           : view_of(tensor, &ArrayView::batch, &ArrayView::channel);
}

/// A view of (dim, width) or (dim,).
inline ArrayView taps_view(const Tensor& tensor) {
  return tensor.dim() == 2 ? view_of(tensor, &ArrayView::channel, &ArrayView::step)
                           : channel_view(tensor);
}

inline bool parse_activation(const std::optional<Text>& name) {
  if (!name) return false;
  if (*name != "silu" && *name != "swish") {
    fail("activation must be None or one of silu, swish, got '", *name, "'");
  }
  return true;
}

inline void check_sequences(const ConvArguments& args) {
  if (!args.seq_idx) return;
  if (args.cu_seqlens) fail("cu_seqlens must be None where seq_idx is given");
  if (args.initial_states) fail("initial_states must be None where seq_idx is given");
  if (args.return_final_states) fail("return_final_states must be False where seq_idx is given");
}

/// Refuses arguments that do not fit the table; fills in sizes, flags, x and the taps.
CheckedCall set_convolution(ConvParams& params, const auto& table, const auto& args) {
  params.silu = parse_activation(args.activation);
  CheckedCall call(table, {}, args.tensors());
  call.check_shapes();
  set_sizes(params, call);
  params.x = conv_view(args.x);
  params.weight = taps_view(args.weight);
  if (args.bias) params.bias = taps_view(*args.bias);
  return call;
}

/// Refuses invalid and unsupported calls; returns parameters with sizes, flags and inputs filled
/// in. With `reverse`, each batch entry is one sequence, which runs from its last step to its
/// first.
inline ConvParams make_conv_params(const ConvArguments& args, bool reverse) {
  ConvParams params;
  const CheckedCall call = set_convolution(params, tables::kCausalConv1d, args);
  check_sequences(args);
  params.sequences = call[tables::kSequences];
  if (reverse) params.x = reversed(params.x, params.seqlen);
  if (args.seq_idx) params.seq_idx = index_view(*args.seq_idx);
  if (args.cu_seqlens) params.cu_seqlens = index_view(*args.cu_seqlens);
  if (args.initial_states) params.initial_states = conv_view(*args.initial_states);
  return params;
}

/// Refuses gradients that do not fit the call, and a buffer for dx that does not.
inline void check_conv_gradients(const ConvArguments& args, const ConvParams& params,
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

/// Does the same as make_conv_params() for a prefill; the caller still fills in out and the states
/// that the kernels use.
inline ConvPrefillParams make_conv_prefill_params(const ConvPrefillArguments& args) {
  ConvPrefillParams params;
  const CheckedCall call = set_convolution(params, tables::kCausalConv1dPrefill, args);
  params.sequences = call[tables::kSequences];
  params.cu_seqlens = index_view(args.cu_seqlens);
  params.slots = state_slots(args.conv_states, params.sequences, args.cache_indices,
                             args.has_initial_state, args.pad_slot_id);
  params.slots.is_double = params.is_double;
  return params;
}

/// Does the same as make_conv_params() for an update.
inline ConvUpdateParams make_conv_update_params(const ConvUpdateArguments& args) {
  ConvUpdateParams params;
  const CheckedCall call = set_convolution(params, tables::kCausalConv1dUpdate, args);
  params.pad_slot_id = args.pad_slot_id;
  params.seqlen = args.x.dim() == 3 ? call[tables::kSteps] : 1;
  params.slots = args.conv_state.size(0);
  params.state_len = call[tables::kStateLen];
  if (params.state_len < params.width - 1) {
    fail("conv_state must have state_len of at least width-1 = ", params.width - 1, ", got ",
         shape_text(args.conv_state));
  }

  params.conv_state = conv_view(args.conv_state);
  if (args.cache_seqlens) params.cache_seqlens = index_view(*args.cache_seqlens);
  if (args.conv_state_indices) params.conv_state_indices = index_view(*args.conv_state_indices);
  return params;
}

/// Returns out, and the final states if the call asks for them.
template <class Backend>
std::tuple<Tensor, OptionalTensor> conv_forward(const ConvArguments& args, bool reverse) {
  const Tensor& x = args.x;
  ConvForwardParams params(make_conv_params(args, reverse));
  const Backend backend(x);
  backend.check(params);
  Tensor out = allocate_like(x);
  OptionalTensor final_states;
  params.out = sequence_view(out, reverse);
  if (args.return_final_states) {
    final_states = allocate(x, {params.sequences, params.dim, params.width - 1}, dtype_of(x));
    params.final_states = conv_view(*final_states);
  }
  if (!is_empty(params)) launch_with_workspace(backend, x, params);
  return {out, final_states};
}

template <class Backend>
std::tuple<Tensor, OptionalTensor> causal_conv1d_fwd(const ConvArguments& args) {
  return conv_forward<Backend>(args, false);
}

/// dx, dweight, dbias, dinitial_states. The last two are undefined tensors if the call lacks their
/// input.
using ConvGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// Writes dx into `given_dx` if it is given: a tensor of any strides, such as one half of a wider
/// row, that shares no memory with the inputs.
template <class Backend>
ConvGradients conv_backward(const ConvArguments& args, const OptionalTensor& dout,
                            const OptionalTensor& dfinal_states, const OptionalTensor& given_dx,
                            bool reverse) {
  const Tensor& x = args.x;
  ConvBackwardParams params(make_conv_params(args, reverse));
  check_conv_gradients(args, params, dout, dfinal_states, given_dx);
  const Backend backend(x);
  backend.check(params);
  const Tensor dx = given_dx ? *given_dx : allocate_like(x);
  const Tensor dweight = allocate_like(args.weight), dbias = allocate_like(args.bias);
  const Tensor dinitial_states = allocate_like(args.initial_states);
  if (is_empty(params)) {
    fill_with_zeros(std::tie(dx, dweight, dbias, dinitial_states));
  } else {
    if (dout) params.dout = sequence_view(*dout, reverse);
    if (dfinal_states) params.dfinal_states = conv_view(*dfinal_states);
    params.dx = sequence_view(dx, reverse);
    params.dweight = taps_view(dweight);
    if (args.bias) params.dbias = taps_view(dbias);
    if (args.initial_states) params.dinitial_states = conv_view(dinitial_states);
    launch_with_workspace(backend, x, params);
  }
  return {dx, dweight, dbias, dinitial_states};
}

/// Returns all gradients, or all but dx if the caller lends a tensor for dx.
template <class Backend, class... Lent>
auto causal_conv1d_bwd(const OptionalTensor& dout, const OptionalTensor& dfinal_states,
                       const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                       const OptionalTensor& initial_states, const std::optional<Text>& activation,
                       const Lent&... lent) {
  const ConvGradients made = conv_backward<Backend>(
      {x, weight, bias, seq_idx, cu_seqlens, initial_states, dfinal_states.has_value(), activation},
      dout, dfinal_states, OptionalTensor(lent...), false);
  if constexpr (sizeof...(Lent) == 0) {
    return made;
  } else {
    const auto& [dx, dweight, dbias, dinitial_states] = made;
    return std::make_tuple(dweight, dbias, dinitial_states);
  }
}

template <class Backend>
Tensor causal_conv1d_prefill(const ConvPrefillArguments& args) {
  const Tensor& x = args.x;
  ConvPrefillParams params = make_conv_prefill_params(args);
  const Backend backend(x);
  backend.check(params);
  const Tensor out = allocate_like(x);
  if (is_empty(params)) return out;
  params.out = conv_view(out);
  const std::array<int64_t, 3> shape = {params.sequences, params.dim, params.width - 1};
  const ScalarType dtype = float_dtype(params.is_double, false);
  const Tensor before = allocate(x, shape, dtype), behind = allocate(x, shape, dtype);
  params.initial_states = conv_view(before);
  params.final_states = conv_view(behind);
  launch_with_workspace(backend, x, params);
  return out;
}

/// Returns out, or an undefined tensor if the caller passed one to write to.
template <class Backend>
Tensor causal_conv1d_update(const ConvUpdateArguments& args) {
  const Tensor& x = args.x;
  ConvUpdateParams params = make_conv_update_params(args);
  const Backend backend(x);
  backend.check(params);
  const Tensor result = args.out ? Tensor() : allocate_like(x);
  if (x.numel() == 0) return result;
  params.out = conv_view(args.out ? *args.out : result);
  launch_with_workspace(backend, x, params);
  return result;
}

/// Registers the ops of a backend.
template <class Backend>
void implement_convolution(auto& library) {
  implement_forward<&ConvArguments::one_by_one<&causal_conv1d_fwd<Backend>>>(library,
                                                                             "causal_conv1d_fwd");
  library.impl("causal_conv1d_bwd", TORCH_BOX(&causal_conv1d_bwd<Backend>));
  library.impl("causal_conv1d_bwd_out", TORCH_BOX((&causal_conv1d_bwd<Backend, Tensor>)));
  library.impl("causal_conv1d_prefill",
               TORCH_BOX(&ConvPrefillArguments::one_by_one<&causal_conv1d_prefill<Backend>>));
  library.impl("causal_conv1d_update",
               TORCH_BOX(&ConvUpdateArguments::one_by_one<&causal_conv1d_update<Backend>>));
}

/// The ops of a backend that composite ops call.
struct ConvOps {
  decltype(&conv_forward<void>) forward;
  decltype(&conv_backward<void>) backward;
  decltype(&causal_conv1d_update<void>) update;
};
/// The activation of a layer's convolution.
inline const std::optional<Text> kSilu = "silu";

}  // namespace selective_scan::op
