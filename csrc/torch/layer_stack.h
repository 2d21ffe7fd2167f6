// Consecutive Mamba layers with their norms and the residual stream as one call, forward and
// backward:
//
//   for each layer:
//     stream += hidden
//     hidden = layer(RMSNorm(stream))
//   out = RMSNorm(stream + hidden)   if these layers are the last ones
//
// Small layers wait for the host, and one call of Python and one autograd node for several layers
// cost less than two of each for every layer.
#pragma once

#include <tuple>
#include <vector>

#include "mamba_inner.h"

namespace selective_scan::op {

/// The kinds of a layer's weights. selective_scan/_layer_stack.py lists them in the same order.
enum WeightKind : int64_t {
  kNorm,
  kInProj,
  kInProjBias,
  kConv1d,
  kConv1dBias,
  kXProj,
  kDtProj,
  kDtProjBias,
  kALog,
  kD,
  kOutProj,
  kOutProjBias,
  kDtNorm,
  kBNorm,
  kCNorm,
  kWeightKinds
};

/// x is what enters the first layer's sum with the residual, the stream so far, which the first
/// layers of a model lack; only its last layers have norm_f. `weights` holds those of the first
/// kind in `kinds` for all layers, then those of the next kind. inner_eps is that of the
/// inner norms, see InnerNorms. A mixer alone, without the norm in front of it and without a
/// stream, is a layer of which kNorm is absent. Neither has a backward pass here.
struct StackArguments {
  const Tensor& x;
  const OptionalTensor& residual;
  const TensorList& weights;
  const std::vector<int64_t>& kinds;
  const OptionalTensor& norm_f;
  double eps;
  double inner_eps;
  bool delta_softplus;
  const Text& discretization_method;
  bool bidirectional;
  const OptionalTensor& cu_seqlens;
  std::optional<ScalarType> autocast_dtype;
  ScalarType stream_dtype;
  ScalarType out_dtype;
};

/// The states from which the layers of a call without a backward pass go on, changed in place; see
/// LayerStates. Without them both lists are empty.
struct StackStates {
  const TensorList& conv_states;
  const TensorList& states;
  bool begins;
};

/// Returns out, or without norm_f what the next layer adds to the stream; without norm_f the
/// stream; and the tensors that the backward pass wants if it is to follow.
std::tuple<Tensor, Tensor, TensorList> stack_forward(const LayerOps& ops,
                                                     const StackArguments& args,
                                                     const StackStates& states, bool saves);
/// Returns the gradients of x, of the residual, of the weights, and of norm_f, those of x and the
/// residual only if `needs_dx`.
std::tuple<Tensor, Tensor, TensorList, Tensor> stack_backward(
    const LayerOps& ops, const StackArguments& args, const Tensor& dout,
    const OptionalTensor& dstream, const TensorList& kept, bool needs_dx);

/// The ops; Of are the types of a stack's arguments.
template <class Of>
struct LayerStackOps;
template <class... Of>
struct LayerStackOps<TypeList<Of...>> {
  template <const LayerOps& kOps>
  static auto forward(Of... of_stack, const TensorList& conv_states, const TensorList& states,
                      bool begins, bool saves) {
    return stack_forward(kOps, {of_stack...}, {conv_states, states, begins}, saves);
  }
  template <const LayerOps& kOps>
  static auto backward(const Tensor& dout, const OptionalTensor& dstream, const TensorList& kept,
                       Of... of_stack, bool needs_dx) {
    return stack_backward(kOps, {of_stack...}, dout, dstream, kept, needs_dx);
  }
};

/// Registers the schemas, once for all backends.
void define_layer_stack(auto& library) {
  // Only Python calls these ops, and never under tracing.
  const std::string of_stack =
      "Tensor x, Tensor? residual, Tensor[] weights, int[] kinds, Tensor? norm_f, float eps, "
      "float inner_eps, bool delta_softplus, str discretization_method, bool bidirectional, "
      "Tensor? cu_seqlens, ScalarType? autocast_dtype, ScalarType stream_dtype, "
      "ScalarType out_dtype, ";
  library.def(("layer_stack_fwd(" + of_stack +
               "Tensor(a!)[] conv_states, Tensor(b!)[] states, bool begins, bool saves) "
               "-> (Tensor out, Tensor stream, Tensor[] kept)")
                  .c_str());
  library.def(("layer_stack_bwd(Tensor dout, Tensor? dstream, Tensor[] kept, " + of_stack +
               "bool needs_dx) -> (Tensor dx, Tensor dresidual, Tensor[] dweights, Tensor dnorm_f)")
                  .c_str());
}

template <const LayerOps& kOps>
void implement_layer_stack(auto& library) {
  using Ops = LayerStackOps<
      TypeList<const Tensor&, const OptionalTensor&, const TensorList&, const std::vector<int64_t>&,
               const OptionalTensor&, double, double, bool, const Text&, bool,
               const OptionalTensor&, std::optional<ScalarType>, ScalarType, ScalarType>>;
  library.impl("layer_stack_fwd", TORCH_BOX(&Ops::template forward<kOps>));
  library.impl("layer_stack_bwd", TORCH_BOX(&Ops::template backward<kOps>));
}

}  // namespace selective_scan::op
