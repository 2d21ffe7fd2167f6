// The convolution of a sequence that runs from its last step to its first, by the causal one's ops.
//
// Each output is one of x and the width-1 steps behind it. A causal convolution with the taps in
// reverse gives the same width-1 steps later. So it begins there, with the first steps of x as its
// states, and goes on past the end of x over as many zeros: x is read where it lies, and not
// turned.
#pragma once

#include <tuple>

#include "conv_ops.h"

namespace selective_scan::op {

/// Returns silu of the convolution of x, (batch, dim, seqlen), as rows, (batch, seqlen, dim).
Tensor anti_causal_conv1d(const ConvOps& conv, const Tensor& x, const Tensor& weight,
                          const OptionalTensor& bias);

/// Returns the gradients of weight and bias, the latter undefined where there is no bias, and fills
/// dx. `sum` adds two contiguous tensors of one dtype.
std::tuple<Tensor, Tensor> anti_causal_conv1d_backward(
    const ConvOps& conv, Tensor (*sum)(const Tensor&, const Tensor&), const Tensor& dout,
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& dx);

}  // namespace selective_scan::op
