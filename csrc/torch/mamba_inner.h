// What lies between the projections of a Mamba layer, or the layer, of the ops of one backend and
// of PyTorch's matrix products: layers that are real and take B and C from x as they are.
//
// Nearly everything is called without PyTorch's dispatcher, which a small layer would wait for.
// Everything lies channel-last. Rows are (batch, seqlen, channels), which matrix products take and
// give, and the scan and the convolution read as (batch, channels, seqlen). What is a part of a
// row, x and z of xz, dt, B and C of x_dbl, is read where it lies, and its gradient written where
// it belongs. selective_scan/mamba_inner.py has the same for every layer, of differentiable parts.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "conv_ops.h"
#include "scan_ops.h"

namespace selective_scan::op {

/// What a tensor is in another dtype; or −exp of it, in its own or another. Both are contiguous.
struct Cast {
  Tensor source, target;
  bool negates_exp = false;
};

/// What a backend computes a layer with.
struct LayerOps {
  const ScanOps& scan;
  const ConvOps& conv;
  /// out = left·right
  AOTITorchError (*mm_out)(AtenTensorHandle out, AtenTensorHandle left, AtenTensorHandle right);
  /// out = beta·self + alpha·left·right
  AOTITorchError (*addmm_out)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle left,
                              AtenTensorHandle right, double beta, double alpha);
  /// Whether PyTorch multiplies float16 and bfloat16 to float32.
  bool has_single_products;
  /// Fills the targets.
  void (*cast)(const std::vector<Cast>& casts);
  /// Adds contiguous tensors; the sum has the residual's dtype, and is rounded once.
  Tensor (*sum)(const Tensor& residual, const Tensor& product);
};

/// With in_proj_weight, xz is the layer's input, (batch, seqlen, d_input), and A the logarithm of
/// −A. Without out_proj_weight the result is the rows that it would take. The residual, whose
/// gradient is that of out, is added to out, which has its dtype then.
///
/// A second scan of the same inputs, from the last step to the first, is added if `bidirectional`,
/// by the same poles and without D, or by those of A_b, with D. With `reverse` there is one scan,
/// from the last step to the first, and the convolution looks at the steps to come.
///
/// With a group, xz are one rank's steps of a sequence that runs through all ranks' steps.
struct LayerArguments : tables::MambaInnerArguments {
  const std::string* group = nullptr;
};

/// What the backward pass wants; undefined tensors where nothing is kept. The first three are there
/// with in_proj_weight alone, and `input` only where it had to be cast: it stands for xz then.
/// y is there with out_proj_weight alone. What was before a rank's steps is there with a group.
struct LayerKept {
  /// The saved states of a scan; the state that entered, and the factors of all ranks' maps.
  struct OfScan {
    Tensor states, entering, factors;
  };
  Tensor input, xz_rows, poles, x_dbl, y, u, steps;
  OfScan scan, second_scan;
  Tensor before, counts;  // steps, and how many of them every rank has

  /// What both ops have of it, in their order; and with a group.
  auto of_ops() {
    return std::tie(xz_rows, poles, x_dbl, y, u, steps, scan.states, second_scan.states);
  }
  auto of_ops(const std::string& /*group*/) {
    return std::tuple_cat(of_ops(), std::tie(before, counts, scan.entering, scan.factors,
                                             second_scan.entering, second_scan.factors));
  }
};

struct LayerForward {
  Tensor out;
  LayerKept kept;
};

struct LayerGradients {
  Tensor dxz, din_proj_weight, din_proj_bias, dconv1d_weight, dconv1d_bias, dx_proj_weight,
      ddelta_proj_weight, dout_proj_weight, dout_proj_bias, dA, dA_b, dD, ddelta_bias;
};

LayerForward layer_forward(const LayerOps& ops, const LayerArguments& args, bool saves);
/// `kept` is computed again if it is empty; xz may be what stands for it, whose dtype was xz_dtype.
LayerGradients layer_backward(const LayerOps& ops, const LayerArguments& args, const Tensor& dout,
                              LayerKept kept, ScalarType xz_dtype);

template <class... Types>
struct TypeList {};
/// How an op is given what may have been kept.
template <class Kept>
using Given = const OptionalTensor&;

/// The ops, with the types of a layer's arguments but for the residual, with what LayerKept has
/// of_ops(), and with a group or none.
template <class Arguments, class OfOps, class... Group>
struct LayerOpsOf;
template <class... Arguments, class... Kept, class... Group>
struct LayerOpsOf<TypeList<Arguments...>, std::tuple<Kept...>, Group...> {
  /// Returns out and what is kept.
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

  /// Registers them for one backend.
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
               const OptionalTensor&, bool, int64_t, const std::string&, bool, bool,
               const OptionalTensor&, std::optional<ScalarType>>;
  using OfOps = decltype(LayerKept().of_ops());
  using OfOpsOfRanks = decltype(LayerKept().of_ops(std::string()));
  LayerOpsOf<Arguments, OfOps>::template implement<kOps>(library, "mamba_inner");
  LayerOpsOf<Arguments, OfOpsOfRanks, const std::string&>::template implement<kOps>(
      library, "mamba_inner_of_ranks");
}

}  // namespace selective_scan::op
