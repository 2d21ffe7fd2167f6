// The arguments of the ops of the causal convolution: validation, and translation to the kernels'
// parameters.
#pragma once

#include <optional>
#include <string>

#include "../core/conv_params.h"
#include "packed_sequences.h"
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

/// The arguments are in the order of the schema.
struct ConvPrefillArguments {
  const Tensor& x;
  const Tensor& weight;
  const Tensor& conv_states;
  const OptionalTensor& bias;
  const std::optional<std::string>& activation;
  const Tensor& cu_seqlens;
  const OptionalTensor& cache_indices;
  const OptionalTensor& has_initial_state;
  int64_t pad_slot_id;
};

/// Does what make_conv_params does; out and the states that kernels use are still to be filled in.
ConvPrefillParams make_conv_prefill_params(const ConvPrefillArguments& args);

struct ConvUpdateArguments {
  const Tensor& x;
  const Tensor& conv_state;
  const Tensor& weight;
  const OptionalTensor& bias;
  const std::optional<std::string>& activation;
  const OptionalTensor& cache_seqlens;
  const OptionalTensor& conv_state_indices;
  int64_t pad_slot_id;
  const OptionalTensor& out;
};

/// Does what make_conv_params does.
ConvUpdateParams make_conv_update_params(const ConvUpdateArguments& args);

// Views of tensors that were checked.

/// (batch, dim, steps): sequences, or the states of sequences; (batch, dim): one step of each.
ArrayView conv_view(const Tensor& tensor);
/// (dim, width) or (dim,)
ArrayView taps_view(const Tensor& tensor);

}  // namespace selective_scan::op
