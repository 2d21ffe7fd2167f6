#include "layer_stack.h"

#include <array>
#include <utility>

namespace selective_scan::op {
namespace {

using Weights = std::array<OptionalTensor, kWeightKinds>;

/// What the backward pass wants of a layer: the stream and its norm, which enter the layer, and the
/// layer's own tensors.
struct KeptOfLayer {
  Tensor stream, normed;
  LayerKept layer;

  /// The tensors in the order in which the ops pass them, without a stream that is x itself.
  std::vector<Tensor*> members(bool has_stream, bool is_bidirectional) {
    std::vector<Tensor*> all{&normed,      &layer.xz_rows, &layer.poles,
                             &layer.x_dbl, &layer.y,       &layer.scan.states};
    if (is_bidirectional) all.push_back(&layer.second_scan.states);
    if (has_stream) all.push_back(&stream);
    return all;
  }
};

struct Stack {
  const StackOps& ops;
  const StackArguments& args;
  size_t depth;
  ScalarType product_dtype;
  const OptionalTensor none = std::nullopt;
  const std::optional<ScalarType> no_dtype = std::nullopt;

  Stack(const StackOps& ops, const StackArguments& args)
      : ops(ops),
        args(args),
        depth(args.kinds.empty() ? 0 : args.weights.size() / args.kinds.size()),
        product_dtype(args.autocast_dtype.value_or(dtype_of(args.x))) {
    if (depth == 0 || args.weights.size() != depth * args.kinds.size()) {
      fail("weights must hold as many of each kind");
    }
    const Weights first = weights_of(0);
    for (const WeightKind kind : {kNorm, kInProj, kConv1d, kXProj, kDtProj, kALog, kOutProj}) {
      if (!first[kind]) fail("kinds must include ", static_cast<int64_t>(kind));
    }
  }

  /// Returns whether the stream in front of a layer is another tensor than x.
  bool has_stream(size_t layer) const { return layer > 0 || args.stream_dtype != dtype_of(args.x); }

  Weights weights_of(size_t layer) const {
    Weights own;
    for (size_t i = 0; i < args.kinds.size(); ++i) {
      own.at(args.kinds[i]) = args.weights[i * depth + layer];
    }
    return own;
  }

  /// The arguments of a layer's mixer; they refer to the given objects.
  LayerArguments mixer_arguments(const Tensor& normed, const Weights& own) const {
    return {{normed,
             own[kInProj],
             own[kInProjBias],
             *own[kConv1d],
             own[kConv1dBias],
             *own[kXProj],
             *own[kDtProj],
             own[kOutProj],
             own[kOutProjBias],
             *own[kALog],
             none,
             own[kD],
             own[kDtProjBias],
             args.delta_softplus,
             /*checkpoint_lvl=*/1,
             args.discretization_method,
             args.bidirectional,
             /*reverse=*/false,
             args.cu_seqlens,
             no_dtype,
             none}};
  }
};

}  // namespace

std::tuple<Tensor, TensorList> stack_forward(const StackOps& ops, const StackArguments& args,
                                             bool saves) {
  const Stack stack(ops, args);
  TensorList all_kept;
  Tensor hidden = args.x;
  OptionalTensor stream;  // nothing has been added to x yet
  for (size_t i = 0; i < stack.depth; ++i) {
    const Weights own = stack.weights_of(i);
    const bool has_stream = stack.has_stream(i);
    auto [normed, total] =
        ops.norm.forward(hidden, stream, *own[kNorm], args.eps, stack.product_dtype,
                         has_stream ? std::optional(args.stream_dtype) : std::nullopt);
    stream = has_stream ? total : args.x;
    auto [out, of_layer] = layer_forward(ops.layer, stack.mixer_arguments(normed, own), saves);
    hidden = out;
    if (!saves) continue;
    KeptOfLayer kept{*stream, normed, std::move(of_layer)};
    for (const Tensor* it : kept.members(has_stream, args.bidirectional)) all_kept.push_back(*it);
  }
  const auto [out, total] =
      ops.norm.forward(hidden, stream, args.norm_f, args.eps, args.out_dtype,
                       saves ? std::optional(args.stream_dtype) : std::nullopt);
  if (saves) all_kept.push_back(total);
  return {out, all_kept};
}

std::tuple<Tensor, TensorList, Tensor> stack_backward(const StackOps& ops,
                                                      const StackArguments& args,
                                                      const Tensor& dout, const TensorList& kept,
                                                      bool needs_dx) {
  const Stack stack(ops, args);
  std::vector<KeptOfLayer> of_layers(stack.depth);
  auto next = kept.begin();
  for (size_t i = 0; i < stack.depth; ++i) {
    of_layers[i].stream = args.x;
    for (Tensor* it : of_layers[i].members(stack.has_stream(i), args.bidirectional)) {
      if (next == kept.end()) fail("kept must hold the tensors of all layers");
      *it = *next++;
    }
  }
  if (next + 1 != kept.end()) fail("kept must hold the tensors of all layers");

  TensorList dweights(args.weights.size());
  // The gradients of a layer's output and of the stream behind it are the same values, in the
  // dtypes of both.
  const bool is_shared = stack.product_dtype == args.stream_dtype;
  const std::optional<ScalarType> dtype_of_dstream =
      is_shared ? std::nullopt : std::optional(args.stream_dtype);
  auto [dhidden, dstream, dnorm_f] =
      ops.norm.backward(dout, std::nullopt, *next, args.norm_f, args.eps, stack.product_dtype,
                        dtype_of_dstream, true);
  for (size_t i = stack.depth; i-- > 0;) {
    if (is_shared) dstream = dhidden;
    const Weights own = stack.weights_of(i);
    KeptOfLayer& of_layer = of_layers[i];
    LayerGradients made = layer_backward(ops.layer, stack.mixer_arguments(of_layer.normed, own),
                                         dhidden, std::move(of_layer.layer), stack.product_dtype);
    std::optional<ScalarType> hidden_dtype, own_dtype;
    if (i > 0) {
      hidden_dtype = stack.product_dtype;
      own_dtype = dtype_of_dstream;
    } else if (needs_dx) {
      hidden_dtype = dtype_of(args.x);
    }
    Tensor dnorm;
    std::tie(dhidden, dstream, dnorm) = ops.norm.backward(
        made.dxz, dstream, of_layer.stream, *own[kNorm], args.eps, hidden_dtype, own_dtype, true);
    const std::array<Tensor*, kWeightKinds> gradients = {&dnorm,
                                                         &made.din_proj_weight,
                                                         &made.din_proj_bias,
                                                         &made.dconv1d_weight,
                                                         &made.dconv1d_bias,
                                                         &made.dx_proj_weight,
                                                         &made.ddelta_proj_weight,
                                                         &made.ddelta_bias,
                                                         &made.dA,
                                                         &made.dD,
                                                         &made.dout_proj_weight,
                                                         &made.dout_proj_bias};
    for (size_t place = 0; place < args.kinds.size(); ++place) {
      dweights[place * stack.depth + i] = std::move(*gradients[args.kinds[place]]);
    }
  }
  return {dhidden, dweights, dnorm_f};
}

}  // namespace selective_scan::op
