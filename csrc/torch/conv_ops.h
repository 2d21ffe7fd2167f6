// The forward, backward and update ops of the causal convolution on one backend.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "../core/conv_params.h"
#include "argument_tables.h"
#include "backend.h"
#include "checked_call.h"
#include "optional_results.h"
#include "state_slots.h"

namespace selective_scan::op {

/// What the forward and the backward op have in common; for the latter return_final_states says
/// whether their gradient is part of the call.
using ConvArguments = tables::CausalConv1dArguments;
using ConvPrefillArguments = tables::CausalConv1dPrefillArguments;
using ConvUpdateArguments = tables::CausalConv1dUpdateArguments;

/// (batch, dim, steps): sequences, or the states of sequences; (batch, dim): one step of each.
inline ArrayView conv_view(const Tensor& tensor) {
  return tensor.dim() == 3 ? sequence_view(tensor)
                           : view_of(tensor, &ArrayView::batch, &ArrayView::channel);
}

/// (dim, width) or (dim,)
inline ArrayView taps_view(const Tensor& tensor) {
  return tensor.dim() == 2 ? view_of(tensor, &ArrayView::channel, &ArrayView::step)
                           : channel_view(tensor);
}

inline bool parse_activation(const std::optional<std::string>& name) {
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

/// Refuses whatever no kernel may see; returns parameters with sizes, flags and inputs filled in.
inline ConvParams make_conv_params(const ConvArguments& args) {
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

/// Refuses gradients, and a buffer for that of x, that do not fit the call.
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

/// Does what make_conv_params does; out and the states that kernels use are still to be filled in.
inline ConvPrefillParams make_conv_prefill_params(const ConvPrefillArguments& args) {
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

/// Does what make_conv_params does.
inline ConvUpdateParams make_conv_update_params(const ConvUpdateArguments& args) {
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

inline bool is_empty(const ConvParams& params) {
  return params.batch == 0 || params.dim == 0;
}

/// Its final states are there where they are asked for.
template <class Backend>
std::tuple<Tensor, OptionalTensor> causal_conv1d_fwd(const ConvArguments& args) {
  const Tensor& x = args.x;
  ConvForwardParams params(make_conv_params(args));
  const Backend backend(x);
  backend.check(params);
  Tensor out = allocate_like(x);
  OptionalTensor final_states;
  params.out = conv_view(out);
  if (args.return_final_states) {
    final_states = allocate(x, {params.sequences, params.dim, params.width - 1}, dtype_of(x));
    params.final_states = conv_view(*final_states);
  }
  if (!is_empty(params)) launch_with_workspace(backend, x, params);
  return {out, final_states};
}

/// dx, dweight, dbias, dinitial_states: of the last two those whose input is there, and else an
/// undefined tensor.
using ConvGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using OtherConvGradients = std::tuple<Tensor, Tensor, Tensor>;

/// Returns all gradients, or those but dx, if the caller lends a tensor for that: one of any
/// strides, such as one half of a wider row, which must share no memory with the inputs.
template <class Backend, class... Lent>
std::conditional_t<sizeof...(Lent) == 0, ConvGradients, OtherConvGradients> causal_conv1d_bwd(
    const OptionalTensor& dout, const OptionalTensor& dfinal_states, const Tensor& x,
    const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& seq_idx,
    const OptionalTensor& cu_seqlens, const OptionalTensor& initial_states,
    const std::optional<std::string>& activation, const Lent&... lent) {
  const ConvArguments args{
      x, weight, bias, seq_idx, cu_seqlens, initial_states, dfinal_states.has_value(), activation};
  ConvBackwardParams params(make_conv_params(args));
  Tensor dx;
  ((dx = lent), ...);
  check_conv_gradients(args, params, dout, dfinal_states, if_defined(dx));
  const Backend backend(x);
  backend.check(params);
  if (!dx.defined()) dx = allocate_like(x);
  const Tensor dweight = allocate_like(weight), dbias = allocate_like(bias);
  const Tensor dinitial_states = allocate_like(initial_states);
  if (is_empty(params)) {
    fill_with_zeros(std::tie(dx, dweight, dbias, dinitial_states));
  } else {
    if (dout) params.dout = conv_view(*dout);
    if (dfinal_states) params.dfinal_states = conv_view(*dfinal_states);
    params.dx = conv_view(dx);
    params.dweight = taps_view(dweight);
    if (bias) params.dbias = taps_view(dbias);
    if (initial_states) params.dinitial_states = conv_view(dinitial_states);
    launch_with_workspace(backend, x, params);
  }
  if constexpr (sizeof...(Lent) == 0) {
    return {dx, dweight, dbias, dinitial_states};
  } else {
    return {dweight, dbias, dinitial_states};
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

/// Returns out, or no tensor where the caller gave one.
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

/// The ops of a backend, for others that are made of them.
struct ConvOps {
  decltype(&causal_conv1d_fwd<void>) forward;
  decltype(&causal_conv1d_bwd<void, Tensor>) backward;
};
/// The activation of a layer's convolution.
inline const std::optional<std::string> kSilu = "silu";

}  // namespace selective_scan::op
