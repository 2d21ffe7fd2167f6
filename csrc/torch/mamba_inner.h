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
/// y is there with out_proj_weight alone. `room` is for rows like y that the pass makes, and y's
/// own memory where no later pass wants y. What was before a rank's steps is there with a group.
struct LayerKept {
  /// The saved states of a scan; the state that entered, and the factors of all ranks' maps.
  struct OfScan {
    Tensor states, entering, factors;
  };
  Tensor input, xz_rows, poles, x_dbl, y, u, steps;
  OfScan scan, second_scan;
  Tensor before, counts;  // steps, and how many of them every rank has
  Tensor room;
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

/// The ops, of which the types are those of a layer's arguments without the residual.
template <class... Types>
struct LayerOpsOf {
  /// Returns out and what is kept.
  template <const LayerOps& kOps>
  static auto forward(Types... layer, const OptionalTensor& residual, bool save_states) {
    return results_of(layer_forward(kOps, {{layer..., residual}}, save_states));
  }

  /// Returns besides what is kept of other ranks.
  template <const LayerOps& kOps>
  static auto forward_of_ranks(Types... layer, const OptionalTensor& residual,
                               const std::string& group, bool save_states) {
    const LayerForward made = layer_forward(kOps, {{layer..., residual}, &group}, save_states);
    const LayerKept& kept = made.kept;
    return std::tuple_cat(
        results_of(made),
        std::make_tuple(if_defined(kept.before), if_defined(kept.counts),
                        if_defined(kept.scan.entering), if_defined(kept.scan.factors),
                        if_defined(kept.second_scan.entering),
                        if_defined(kept.second_scan.factors)));
  }

  /// Returns the gradients. Room is one tensor, rows like y that may be written over, or none.
  template <const LayerOps& kOps, class... Room>
  static auto backward(const Tensor& dout, Types... layer, const OptionalTensor& xz_rows,
                       const OptionalTensor& poles, const OptionalTensor& x_dbl,
                       const OptionalTensor& y, const OptionalTensor& u,
                       const OptionalTensor& steps, const OptionalTensor& states,
                       const OptionalTensor& second_states, ScalarType xz_dtype,
                       const Room&... room) {
    LayerKept kept = kept_of(xz_rows, poles, x_dbl, y, u, steps, states, second_states);
    ((kept.room = room), ...);
    return gradients_of(
        layer_backward(kOps, {{layer..., std::nullopt}}, dout, std::move(kept), xz_dtype));
  }

  template <const LayerOps& kOps, class... Room>
  static auto backward_of_ranks(const Tensor& dout, Types... layer, const std::string& group,
                                const OptionalTensor& xz_rows, const OptionalTensor& poles,
                                const OptionalTensor& x_dbl, const OptionalTensor& y,
                                const OptionalTensor& u, const OptionalTensor& steps,
                                const OptionalTensor& states, const OptionalTensor& second_states,
                                const OptionalTensor& before, const OptionalTensor& counts,
                                const OptionalTensor& entering, const OptionalTensor& factors,
                                const OptionalTensor& second_entering,
                                const OptionalTensor& second_factors, ScalarType xz_dtype,
                                const Room&... room) {
    LayerKept kept = kept_of(xz_rows, poles, x_dbl, y, u, steps, states, second_states);
    kept.before = or_undefined(before);
    kept.counts = or_undefined(counts);
    kept.scan.entering = or_undefined(entering);
    kept.scan.factors = or_undefined(factors);
    kept.second_scan.entering = or_undefined(second_entering);
    kept.second_scan.factors = or_undefined(second_factors);
    ((kept.room = room), ...);
    return gradients_of(
        layer_backward(kOps, {{layer..., std::nullopt}, &group}, dout, std::move(kept), xz_dtype));
  }

 private:
  static auto results_of(const LayerForward& made) {
    const LayerKept& kept = made.kept;
    return std::make_tuple(made.out, if_defined(kept.input), if_defined(kept.xz_rows),
                           if_defined(kept.poles), if_defined(kept.x_dbl), if_defined(kept.y),
                           if_defined(kept.u), if_defined(kept.steps), if_defined(kept.scan.states),
                           if_defined(kept.second_scan.states));
  }

  static LayerKept kept_of(const OptionalTensor& xz_rows, const OptionalTensor& poles,
                           const OptionalTensor& x_dbl, const OptionalTensor& y,
                           const OptionalTensor& u, const OptionalTensor& steps,
                           const OptionalTensor& states, const OptionalTensor& second_states) {
    LayerKept kept;
    kept.xz_rows = or_undefined(xz_rows);
    kept.poles = or_undefined(poles);
    kept.x_dbl = or_undefined(x_dbl);
    kept.y = or_undefined(y);
    kept.u = or_undefined(u);
    kept.steps = or_undefined(steps);
    kept.scan.states = or_undefined(states);
    kept.second_scan.states = or_undefined(second_states);
    return kept;
  }

  static auto gradients_of(const LayerGradients& made) {
    return std::make_tuple(made.dxz, made.din_proj_weight, made.din_proj_bias, made.dconv1d_weight,
                           made.dconv1d_bias, made.dx_proj_weight, made.ddelta_proj_weight,
                           made.dout_proj_weight, made.dout_proj_bias, made.dA, made.dA_b, made.dD,
                           made.ddelta_bias);
  }
};
using MambaInner =
    LayerOpsOf<const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
               const OptionalTensor&, const Tensor&, const Tensor&, const OptionalTensor&,
               const OptionalTensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor&, bool, int64_t, const std::string&, bool, bool,
               const OptionalTensor&, std::optional<ScalarType>>;

/// Registers them for one backend.
template <const LayerOps& kOps>
void implement_mamba_inner(auto& library) {
  implement_forward<&MambaInner::forward<kOps>>(library, "mamba_inner_fwd");
  library.impl("mamba_inner_bwd", TORCH_BOX(&MambaInner::backward<kOps>));
  library.impl("mamba_inner_bwd_over", TORCH_BOX((&MambaInner::backward<kOps, Tensor>)));
  implement_forward<&MambaInner::forward_of_ranks<kOps>>(library, "mamba_inner_of_ranks_fwd");
  library.impl("mamba_inner_of_ranks_bwd", TORCH_BOX(&MambaInner::backward_of_ranks<kOps>));
  library.impl("mamba_inner_of_ranks_bwd_over",
               TORCH_BOX((&MambaInner::backward_of_ranks<kOps, Tensor>)));
}

}  // namespace selective_scan::op
