// The arguments of the ops of the causal convolution: validation, and translation to the kernels'
// parameters.
#pragma once

#include "../core/conv_params.h"
#include "argument_tables.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// What the forward and the backward op have in common; for the latter return_final_states says
/// whether their gradient is part of the call.
using ConvArguments = tables::CausalConv1dArguments;
using ConvPrefillArguments = tables::CausalConv1dPrefillArguments;
using ConvUpdateArguments = tables::CausalConv1dUpdateArguments;

/// Refuses whatever no kernel may see; returns parameters with sizes, flags and inputs filled in.
ConvParams make_conv_params(const ConvArguments& args);

/// Refuses gradients, and a buffer for that of x, that do not fit the call.
void check_conv_gradients(const ConvArguments& args, const ConvParams& params,
                          const OptionalTensor& dout, const OptionalTensor& dfinal_states,
                          const OptionalTensor& dx);

/// Does what make_conv_params does; out and the states that kernels use are still to be filled in.
ConvPrefillParams make_conv_prefill_params(const ConvPrefillArguments& args);

/// Does what make_conv_params does.
ConvUpdateParams make_conv_update_params(const ConvUpdateArguments& args);

// Views of tensors that were checked.

/// (batch, dim, steps): sequences, or the states of sequences; (batch, dim): one step of each.
ArrayView conv_view(const Tensor& tensor);
/// (dim, width) or (dim,)
ArrayView taps_view(const Tensor& tensor);

}  // namespace selective_scan::op
