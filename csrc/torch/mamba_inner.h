// Everything between the projections of a Mamba layer, or the whole layer, composed of one
// backend's ops and PyTorch's matrix products. It covers real layers that use B and C as x_proj
// gives them.
//
// Nearly all calls bypass PyTorch's dispatcher, whose latency a small layer would notice. Tensors
// are channel-last: rows are (batch, seqlen, channels), as matrix products take and return them;
// the scan and the convolution read them as (batch, channels, seqlen). Parts of a row (x and z of
// xz; dt, B and C of x_dbl) are read in place, and their gradients are written in place.
// selective_scan/mamba_inner.py composes the same from differentiable parts, for every layer.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "conv_ops.h"
#include "norm_ops.h"
#include "scan_ops.h"
#include "update_ops.h"

namespace selective_scan::op {

/// A cast of a tensor to another dtype, or −exp of it, in the same or another dtype. Both tensors
/// are contiguous.
struct Cast {
  Tensor source, target;
  bool negates_exp = false;
};

/// The functions by which a backend computes a layer.
struct LayerOps {
  const ScanOps& scan;
  const ConvOps& conv;
  decltype(&selective_state_update<void>) update;
  NormOps norm;
  /// out = left·right
  AOTITorchError (*mm_out)(AtenTensorHandle out, AtenTensorHandle left, AtenTensorHandle right);
  /// out = beta·self + alpha·left·right
  AOTITorchError (*addmm_out)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle left,
                              AtenTensorHandle right, double beta, double alpha);
  /// True if PyTorch can multiply float16 and bfloat16 matrices into a float32 result.
  bool has_single_products;
  /// Fills the targets.
  void (*cast)(const std::vector<Cast>& casts);
  /// Adds contiguous tensors. The sum has the residual's dtype and is rounded once.
  Tensor (*sum)(const Tensor& residual, const Tensor& product);
};

/// The RMS norms of a layer's dt, B and C, whose weights may be absent. There are none if eps is
/// negative.
struct InnerNorms {
  double eps = -1;
  OptionalTensor dt, B, C;
};

/// The arguments of a layer.
///
/// With in_proj_weight, xz is the layer's input, (batch, seqlen, d_input), and A is the logarithm
/// of −A. Without out_proj_weight, the result is the rows that this projection would take. The
/// residual is added to out, which then has its dtype; its gradient is that of out.
///
/// With `bidirectional` or A_b, a second scan of the same inputs, from the last step to the first,
/// is added: `bidirectional` uses A and no D, A_b has its own poles and uses D. With `reverse` the
/// only scan runs from the last step to the first, and the convolution looks at later steps.
///
/// With a group, xz holds one rank's steps of a sequence that runs through the steps of all ranks.
///
/// A layer with inner norms, such as FalconMamba's and Jamba's, has no backward pass.
struct LayerArguments : tables::MambaInnerArguments {
  const Text* group = nullptr;
  InnerNorms inner_norms = {};
};

/// The tensors that the backward pass wants; undefined if nothing is kept. `input`, `xz_rows` and
/// `poles` exist only with in_proj_weight, and `input` only if it had to be cast: then it stands
/// for xz. `y` exists only with out_proj_weight. `before`, `counts`, `entering` and `factors` exist
/// only with a group.
struct LayerKept {
  /// The saved states of a scan, the state that entered it, and the factors of all ranks' maps.
  struct OfScan {
    Tensor states, entering, factors;
  };
  Tensor input, xz_rows, poles, x_dbl, y, u, steps;
  OfScan scan, second_scan;
  Tensor before, counts;  // the steps before a rank's own, and all ranks' numbers of steps

  /// The tensors that both ops pass, in their order; with a group there are more.
  auto of_ops() {
    return std::tie(xz_rows, poles, x_dbl, y, u, steps, scan.states, second_scan.states);
  }
  auto of_ops(const Text& /*group*/) {
    return std::tuple_cat(of_ops(), std::tie(before, counts, scan.entering, scan.factors,
                                             second_scan.entering, second_scan.factors));
  }
};

/// The states of a layer's sequences, which a forward call replaces by those behind its last step.
/// The caller has checked them.
struct LayerStates {
  Tensor conv_state;  // (batch, dim, length): the convolution's last inputs, at least width - 1
  Tensor state;       // (batch, dim, dstate)
  bool begins;        // whether the sequences begin with the call, whatever the states hold
};

struct LayerForward {
  Tensor out;
  LayerKept kept;
};

struct LayerGradients {
  Tensor dxz, din_proj_weight, din_proj_bias, dconv1d_weight, dconv1d_bias, dx_proj_weight,
      ddelta_proj_weight, dout_proj_weight, dout_proj_bias, dA, dA_b, dD, ddelta_bias;
};

/// With `states`, the layer has in_proj_weight, one direction and one sequence per batch entry.
LayerForward layer_forward(const LayerOps& ops, const LayerArguments& args, bool saves,
                           const LayerStates* states = nullptr);
/// Recomputes `kept` if it is empty. xz may be the cast input that stands for it; its dtype was
/// xz_dtype.
LayerGradients layer_backward(const LayerOps& ops, const LayerArguments& args, const Tensor& dout,
                              LayerKept kept, ScalarType xz_dtype);

template <class... Types>
struct TypeList {};
/// The type in which an op takes a tensor that may have been kept.
template <class Kept>
using Given = const OptionalTensor&;

/// The ops. Arguments are the types of a layer's arguments except the residual, OfOps those of
/// LayerKept::of_ops(), and Group a group or nothing.
template <class Arguments, class OfOps, class... Group>
struct LayerOpsOf;
template <class... Arguments, class... Kept, class... Group>
struct LayerOpsOf<TypeList<Arguments...>, std::tuple<Kept...>, Group...> {
  /// Returns out and the kept tensors.
  template <const LayerOps& kOps>
  static auto forward(Arguments... layer, const OptionalTensor& residual, Group... group,
                      bool save_states) {
    auto [out, kept] = layer_forward(kOps, {{layer..., residual}, &group...}, save_states);
    const auto if_kept = [](const auto&... tensors) {
      return std::make_tuple(if_defined(tensors)...);
    };
    return std::tuple_cat(std::make_tuple(out, if_defined(kept.input)),
                          std::apply(if_kept, kept.of_ops(group...)));
  }

  /// Returns the gradients.
  template <const LayerOps& kOps>
  static auto backward(const Tensor& dout, Arguments... layer, Group... group, Given<Kept>... given,
                       ScalarType xz_dtype) {
    LayerKept kept;
    kept.of_ops(group...) = std::make_tuple(or_undefined(given)...);
    const LayerGradients made = layer_backward(kOps, {{layer..., std::nullopt}, &group...}, dout,
                                               std::move(kept), xz_dtype);
    return std::make_tuple(made.dxz, made.din_proj_weight, made.din_proj_bias, made.dconv1d_weight,
                           made.dconv1d_bias, made.dx_proj_weight, made.ddelta_proj_weight,
                           made.dout_proj_weight, made.dout_proj_bias, made.dA, made.dA_b, made.dD,
                           made.ddelta_bias);
  }

  /// Registers the ops for one backend.
  template <const LayerOps& kOps>
  static void implement(auto& library, const std::string& name) {
    implement_forward<&forward<kOps>>(library, name + "_fwd");
    library.impl((name + "_bwd").c_str(), TORCH_BOX(&backward<kOps>));
  }
};

template <const LayerOps& kOps>
void implement_mamba_inner(auto& library) {
  using Arguments =
      TypeList<const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
               const OptionalTensor&, const Tensor&, const Tensor&, const OptionalTensor&,
               const OptionalTensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor&, bool, int64_t, const Text&, bool, bool, const OptionalTensor&,
               std::optional<ScalarType>>;
  using OfOps = decltype(LayerKept().of_ops());
  using OfOpsOfRanks = decltype(LayerKept().of_ops(Text()));
  LayerOpsOf<Arguments, OfOps>::template implement<kOps>(library, "mamba_inner");
  LayerOpsOf<Arguments, OfOpsOfRanks, const Text&>::template implement<kOps>(
      library, "mamba_inner_of_ranks");
}

}  // namespace selective_scan::op
