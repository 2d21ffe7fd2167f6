// The arguments of the ops of the causal convolution: validation, and translation to the kernels'
// parameters.
#pragma once

#include <optional>
#include <string>

#include "../core/conv_params.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// What the forward and the backward op have in common, in the order of their schemas.
struct ConvArguments {
  const Tensor& x;
  const Tensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& seq_idx;
  const OptionalTensor& cu_seqlens;
  const OptionalTensor& initial_states;
  const std::optional<std::string>& activation;
};

/// Refuses whatever no kernel may see; returns parameters with sizes, flags and inputs filled in.
/// `uses_states`: whether final states, or their gradient, are part of the call.
ConvParams make_conv_params(const ConvArguments& args, bool uses_states);

/// Refuses gradients, and a buffer for that of x, that do not fit the call.
void check_conv_gradients(const ConvArguments& args, const ConvParams& params,
                          const OptionalTensor& dout, const OptionalTensor& dfinal_states,
                          const OptionalTensor& dx);

// Views of tensors that were checked.

/// (batch, dim, steps): sequences, or the states of sequences.
ArrayView conv_view(const Tensor& tensor);
/// (dim, width) or (dim,)
ArrayView taps_view(const Tensor& tensor);
/// (batch, seqlen) or (sequences + 1,)
IndexArray index_view(const Tensor& tensor);

}  // namespace selective_scan::op
