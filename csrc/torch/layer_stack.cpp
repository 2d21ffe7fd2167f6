#include "layer_stack.h"

#include <algorithm>
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
  const LayerOps& ops;
  const StackArguments& args;
  size_t depth;
  ScalarType product_dtype;
  bool is_mixer_alone;
  const OptionalTensor none = std::nullopt;
  const std::optional<ScalarType> no_dtype = std::nullopt;

  Stack(const LayerOps& ops, const StackArguments& args)
      : ops(ops),
        args(args),
        depth(args.kinds.empty() ? 0 : args.weights.size() / args.kinds.size()),
        product_dtype(args.autocast_dtype.value_or(dtype_of(args.x))) {
    if (depth == 0 || args.weights.size() != depth * args.kinds.size()) {
      fail("weights must hold as many of each kind");
    }
    const Weights first = weights_of(0);
    for (const WeightKind kind : {kInProj, kConv1d, kXProj, kDtProj, kALog, kOutProj}) {
      if (!first[kind]) fail("kinds must include ", static_cast<int64_t>(kind));
    }
    is_mixer_alone = !first[kNorm];
    if (is_mixer_alone && (depth > 1 || args.residual || args.norm_f)) {
      fail("kinds must include ", static_cast<int64_t>(kNorm), " unless there is a mixer alone");
    }
  }

  /// Refuses layers that have no backward pass.
  void check_backward() const {
    if (args.inner_eps >= 0) fail("inner_eps must be negative where there is a backward pass");
    const auto has_none = [](int64_t kind) { return kind >= kDtNorm; };
    if (is_mixer_alone || std::any_of(args.kinds.begin(), args.kinds.end(), has_none)) {
      fail("kinds must be those of layers with a backward pass");
    }
  }

  /// Refuses states that do not fit the call before any of them changes.
  void check_states(const StackStates& given, bool saves) const {
    if (given.conv_states.empty() && given.states.empty()) return;
    if (given.conv_states.size() != depth || given.states.size() != depth) {
      fail("conv_states and states must hold one tensor per layer");
    }
    if (saves) fail("saves must be False where there are states");
    if (args.bidirectional) fail("bidirectional must be False where there are states");
    if (args.cu_seqlens) fail("cu_seqlens must be None where there are states");
    const Dim batch{"batch", args.x.size(0)};
    for (size_t i = 0; i < depth; ++i) {
      const Weights own = weights_of(i);
      const Dim dim{"dim", own[kALog]->size(0)}, dstate{"dstate", own[kALog]->size(1)};
      const Tensor &conv_state = given.conv_states[i], &state = given.states[i];
      check_beside("conv_states", conv_state, "x", args.x, kRealDtypes, {batch, dim, {"length"}});
      check_beside("states", state, "x", args.x, kRealDtypes, {batch, dim, dstate});
      check_changed("conv_states", conv_state);
      check_changed("states", state);
      const int64_t history = own[kConv1d]->size(2) - 1;
      if (conv_state.size(2) < history) {
        fail("conv_states must have length of at least width-1 = ", history, ", got ",
             shape_text(conv_state));
      }
    }
  }

  /// Returns whether the stream in front of a layer is another tensor than x.
  bool has_stream(size_t layer) const {
    return layer > 0 || args.residual || args.stream_dtype != dtype_of(args.x);
  }

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
             none},
            /*group=*/nullptr,
            {args.inner_eps, own[kDtNorm], own[kBNorm], own[kCNorm]}};
  }
};

}  // namespace

std::tuple<Tensor, Tensor, TensorList> stack_forward(const LayerOps& ops,
                                                     const StackArguments& args,
                                                     const StackStates& states, bool saves) {
  const Stack stack(ops, args);
  stack.check_states(states, saves);
  if (saves) stack.check_backward();
  TensorList all_kept;
  Tensor hidden = args.x;
  OptionalTensor stream = args.residual;
  for (size_t i = 0; i < stack.depth; ++i) {
    const Weights own = stack.weights_of(i);
    const bool has_stream = stack.has_stream(i);
    Tensor normed;
    if (stack.is_mixer_alone) {
      normed = cast(hidden, stack.product_dtype);
    } else {
      Tensor total;
      std::tie(normed, total) =
          ops.norm.forward(hidden, stream, *own[kNorm], args.eps, stack.product_dtype,
                           has_stream ? std::optional(args.stream_dtype) : std::nullopt);
      stream = has_stream ? total : args.x;
    }
    std::optional<LayerStates> of_states;
    if (!states.states.empty()) {
      of_states = {states.conv_states[i], states.states[i], states.begins};
    }
    auto [out, of_layer] = layer_forward(ops, stack.mixer_arguments(normed, own), saves,
                                         of_states ? &*of_states : nullptr);
    hidden = out;
    if (!saves) continue;
    KeptOfLayer kept{*stream, normed, std::move(of_layer)};
    for (const Tensor* it : kept.members(has_stream, args.bidirectional)) all_kept.push_back(*it);
  }
  if (!args.norm_f) return {hidden, stream.value_or(Tensor()), all_kept};
  const auto [out, total] =
      ops.norm.forward(hidden, stream, *args.norm_f, args.eps, args.out_dtype,
                       saves ? std::optional(args.stream_dtype) : std::nullopt);
  if (saves) all_kept.push_back(total);
  return {out, Tensor(), all_kept};
}

std::tuple<Tensor, Tensor, TensorList, Tensor> stack_backward(
    const LayerOps& ops, const StackArguments& args, const Tensor& dout,
    const OptionalTensor& dstream, const TensorList& kept, bool needs_dx) {
  const Stack stack(ops, args);
  stack.check_backward();
  std::vector<KeptOfLayer> of_layers(stack.depth);
  auto next = kept.begin();
  for (size_t i = 0; i < stack.depth; ++i) {
    of_layers[i].stream = args.x;
    for (Tensor* it : of_layers[i].members(stack.has_stream(i), args.bidirectional)) {
      if (next == kept.end()) fail("kept must hold the tensors of all layers");
      *it = *next++;
    }
  }
  if (kept.end() - next != (args.norm_f ? 1 : 0)) fail("kept must hold the tensors of all layers");

  TensorList dweights(args.weights.size());
  Tensor dhidden = dout, dnorm_f;
  OptionalTensor dtotal = dstream;
  // A norm's backward pass returns the gradient of its sum in the dtype of what was added, and in
  // that of the stream if this is another one.
  const auto through_norm = [&](const Tensor& dnormed, const Tensor& total, const Tensor& weight,
                                std::optional<ScalarType> dtype, ScalarType stream_dtype) {
    const bool is_shared = !dtype || *dtype == stream_dtype;
    const auto [of_hidden, of_stream, of_weight] =
        ops.norm.backward(dnormed, dtotal, total, weight, args.eps, dtype,
                          is_shared ? stack.no_dtype : stream_dtype, true);
    dhidden = of_hidden;
    dtotal = if_defined(is_shared ? of_hidden : of_stream);
    return of_weight;
  };
  if (args.norm_f) {
    dnorm_f = through_norm(dout, *next, *args.norm_f, stack.product_dtype, args.stream_dtype);
  }
  for (size_t i = stack.depth; i-- > 0;) {
    const Weights own = stack.weights_of(i);
    KeptOfLayer& of_layer = of_layers[i];
    LayerGradients made = layer_backward(ops, stack.mixer_arguments(of_layer.normed, own), dhidden,
                                         std::move(of_layer.layer), stack.product_dtype);
    Tensor dnorm;
    if (i > 0) {
      dnorm = through_norm(made.dxz, of_layer.stream, *own[kNorm], stack.product_dtype,
                           args.stream_dtype);
    } else {
      const ScalarType dtype = dtype_of(args.x);
      dnorm = through_norm(made.dxz, of_layer.stream, *own[kNorm],
                           needs_dx ? std::optional(dtype) : std::nullopt,
                           args.residual ? dtype_of(*args.residual) : dtype);
    }
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
  return {dhidden, args.residual ? dtotal.value_or(Tensor()) : Tensor(), dweights, dnorm_f};
}

}  // namespace selective_scan::op
