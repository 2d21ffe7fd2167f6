// A call of a layer: its checked arguments, its tensors in the dtype of the products, and its
// parts.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "checked_call.h"
#include "layer_rows.h"
#include "mamba_inner.h"
#include "ranks.h"

namespace selective_scan::op {

inline constexpr int64_t kNoPadding = -1;  // the slot of rows that are padding, which no row is

inline ScalarType at_least_single(ScalarType dtype) {
  return dtype == ScalarType::Double ? dtype : ScalarType::Float;
}

/// The weights and biases in the dtype of the matrix products; x_proj and delta_proj always exist.
struct ProductWeights {
  OptionalTensor in_proj, in_proj_bias, x_proj, delta_proj, out_proj, out_proj_bias;
};

/// One of a layer's scans, whose results are summed.
struct Scan {
  const Tensor& A;
  const OptionalTensor& D;
  bool reverse;
};

/// The parts of x_dbl: dt as a matrix, B and C as (batch, dstate, seqlen).
struct Projected {
  Tensor dt, B, C;
};

/// The gradients of rows that a scan writes. It writes the steps' gradient where dx will be.
struct RowGradients {
  Tensor du, dxz, dx_dbl;
};

/// A checked call, and what follows from its arguments.
struct Layer {
  const LayerOps& ops;
  const LayerArguments& args;
  int64_t batch, seqlen, dim, dstate, rank, d_model;
  ScalarType dtype;  // of the matrix products, their inputs and their results
  // In the dtype of the products:
  ProductWeights weights;
  Tensor input;             // rows; with in_proj_weight
  Tensor xz;                // its channel stride is 1
  Tensor A;                 // in its own dtype
  std::vector<Cast> casts;  // that fill some of these tensors
  std::optional<Ranks> ranks;
  const LayerStates* states;  // of a forward call that changes them

  /// Reuses the tensors that the forward pass saved in `kept`.
  Layer(const LayerOps& ops, const LayerArguments& args, LayerKept& kept,
        const LayerStates* states = nullptr)
      : ops(ops), args(args), states(states) {
    if (args.group) ranks.emplace(*args.group);
    check_options();
    check_tensors();
    const ScalarType given = dtype_of(args.xz);
    dtype = given == ScalarType::Double ? given : args.autocast_dtype.value_or(given);
    if (args.residual) check_residual(*args.residual);
    prepare_weights();
    if (args.in_proj_weight) {
      input = in_products_dtype(args.xz);
      if (dtype != given) kept.input = input;
      if (!kept.poles.defined() && !takes_step()) {
        kept.poles = allocate(args.xz, {dim, dstate}, at_least_single(dtype_of(args.A)));
        casts.push_back({as_contiguous(args.A), kept.poles, true});
      }
      A = kept.poles;
    } else {
      prepare_xz();
      A = args.A;
    }
  }

  /// Casts the weights whose dtype differs from the products'. All of them share one allocation.
  void prepare_weights() {
    weights = {args.in_proj_weight,    args.in_proj_bias,    args.x_proj_weight,
               args.delta_proj_weight, args.out_proj_weight, args.out_proj_bias};
    constexpr int64_t kAligned = 128;  // elements
    std::vector<Tensor*> others;
    std::vector<int64_t> offsets;
    int64_t count = 0;
    for (OptionalTensor* weight :
         {&weights.in_proj, &weights.in_proj_bias, &weights.x_proj, &weights.delta_proj,
          &weights.out_proj, &weights.out_proj_bias}) {
      if (!*weight || dtype_of(**weight) == dtype) continue;
      others.push_back(&**weight);
      offsets.push_back(count);
      count += round_up((*weight)->numel(), kAligned);
    }
    if (others.empty()) return;
    const Tensor memory = allocate(args.xz, {count}, dtype);
    for (size_t i = 0; i < others.size(); ++i) {
      const Tensor source = as_contiguous(*others[i]);
      *others[i] = view_as(memory, source.sizes(), source.strides(), offsets[i]);
      casts.push_back({source, *others[i]});
    }
  }

  /// Returns a contiguous tensor. If a cast is needed, run_casts() fills it later.
  Tensor in_products_dtype(const Tensor& tensor) {
    const Tensor source = as_contiguous(tensor);
    if (dtype_of(source) == dtype) return source;
    const Tensor target = allocate(source, source.sizes(), source.strides(), dtype);
    casts.push_back({source, target});
    return target;
  }

  void run_casts() {
    if (!casts.empty()) ops.cast(casts);
    casts.clear();
  }

  void prepare_xz() {
    xz = cast(args.xz, dtype);
    if (xz.stride(1) == 1) return;
    const Tensor rows = new_rows(2 * dim);
    copy(channels_of(rows), xz);
    xz = channels_of(rows);
  }

  /// Computes xz by the input projection, if the layer has one, unless the forward pass saved it.
  void project(LayerKept& kept) {
    if (!args.in_proj_weight) return;
    if (!kept.xz_rows.defined()) {
      kept.xz_rows = new_rows(2 * dim);
      multiply(kept.xz_rows, input, *weights.in_proj, weights.in_proj_bias);
    }
    check_kept("xz_rows", kept.xz_rows, {"2*dim", 2 * dim});
    xz = channels_of(kept.xz_rows);
  }

  void check_options() {
    parse_method(args.discretization_method);
    if (args.checkpoint_lvl != 0 && args.checkpoint_lvl != 1) {
      fail("checkpoint_lvl must be one of 1, 0, got ", args.checkpoint_lvl);
    }
    if (args.autocast_dtype && *args.autocast_dtype != ScalarType::Half &&
        *args.autocast_dtype != ScalarType::BFloat16) {
      fail("autocast_dtype must be None or one of torch.float16, torch.bfloat16, got torch.",
           dtype_name(*args.autocast_dtype));
    }
    check_directions();
  }

  void check_directions() const {
    const auto refuse = [](const char* name, bool is_set, const char* other, bool is_given) {
      if (is_set && is_given) fail(name, " must be False where ", other, " is given, got True");
    };
    refuse("reverse", args.reverse, "bidirectional", args.bidirectional);
    refuse("reverse", args.reverse, "A_b", args.A_b.has_value());
    refuse("reverse", args.reverse, "cu_seqlens", args.cu_seqlens.has_value());
    refuse("bidirectional", args.bidirectional, "A_b", args.A_b.has_value());
    refuse("reverse", args.reverse, "group", ranks.has_value());
    if (args.cu_seqlens && ranks) fail("cu_seqlens must be None where group is given");
    if (args.A_b && args.in_proj_weight) fail("A_b must be None where in_proj_weight is given");
    if (args.out_proj_bias && !args.out_proj_weight) {
      fail("out_proj_bias must be None where out_proj_weight is None");
    }
  }

  void check_tensors() {
    CheckedCall call(tables::kMambaInner, {.is_given = args.in_proj_weight.has_value()},
                     args.tensors());
    call.check_shapes([&](const Tensor& tensor) {
      if (&tensor == &args.A && is_complex_dtype(dtype_of(tensor))) {
        fail("A must be real, got a complex one");
      }
    });
    batch = call[tables::kBatch];
    seqlen = call[tables::kSeqlen];
    dim = call[tables::kDim];
    dstate = call[tables::kDstate];
    rank = call[tables::kDtRank];
    d_model = call[tables::kDModel];
    check_shape("x_proj_weight", args.x_proj_weight,
                {{"dt_rank+dstate+dstate", num_projected()}, {"dim", dim}});
  }

  /// Refuses a residual that is less precise than out would be without it.
  void check_residual(const Tensor& residual) const {
    const ScalarType single = at_least_single(dtype);
    if (dtype == single) {
      check_dtype("residual", residual, {dtype});
    } else {
      check_dtype("residual", residual, {dtype, single});
    }
  }

  /// Checks rows that the backward pass is given.
  void check_kept(const char* name, const Tensor& rows, const Dim& channels) const {
    check_beside(name, rows, "xz", args.xz, {dtype},
                 {{"batch", batch}, {"seqlen", seqlen}, channels});
    if (!rows.is_contiguous()) fail(name, " must be contiguous");
  }

  int64_t num_projected() const { return rank + 2 * dstate; }

  /// Returns whether the call takes one step from its states, for which convolution and scan have
  /// kernels that change the states in place.
  bool takes_step() const { return states && !states->begins && seqlen == 1; }

  Tensor new_rows(int64_t channels) const { return new_rows(channels, dtype); }
  Tensor new_rows(int64_t channels, ScalarType of) const {
    return allocate(args.xz, {batch, seqlen, channels}, of);
  }

  /// Turns (batch, dim, seqlen) into rows.
  Tensor rows_of(const Tensor& channels) const {
    return as_contiguous(view_as(channels, {batch, seqlen, dim},
                                 {channels.stride(0), channels.stride(2), channels.stride(1)}));
  }

  /// Returns x (0) or z (1), the halves of xz.
  Tensor half(int64_t index) const {
    return view_as(xz, {batch, dim, seqlen}, {xz.stride(0), 1, xz.stride(2)}, index * dim);
  }

  /// out = left·right; both factors are of `dtype`
  void multiply(const Tensor& out, const Tensor& left, const Tensor& right) const {
    if (dtype_of(out) == dtype) {
      TORCH_ERROR_CODE_CHECK(ops.mm_out(out.get(), left.get(), right.get()));
    } else if (ops.has_single_products && dtype_of(out) == ScalarType::Float) {
      call("aten::mm", "dtype_out", left, right, ScalarType::Float, out);
    } else {
      const Tensor product = allocate(out, {left.size(0), right.size(1)}, dtype);
      multiply(product, left, right);
      copy(out, product);
    }
  }
  /// Does the same as torch.nn.functional.linear, on contiguous rows.
  void multiply(const Tensor& out, const Tensor& rows, const Tensor& weight,
                const OptionalTensor& bias) const {
    const Tensor target = matrix_of(out), left = matrix_of(rows), right = transposed(weight);
    if (!bias) return multiply(target, left, right);
    TORCH_ERROR_CODE_CHECK(
        ops.addmm_out(target.get(), bias->get(), left.get(), right.get(), 1.0, 1.0));
  }
  /// out += left·right
  void accumulate(const Tensor& out, const Tensor& left, const Tensor& right) const {
    TORCH_ERROR_CODE_CHECK(ops.addmm_out(out.get(), out.get(), left.get(), right.get(), 1.0, 1.0));
  }
  /// Returns the gradient of a product's weight from the rows that enter the product and the
  /// gradients of its results.
  Tensor weight_gradient(const Tensor& weight, const Tensor& gradient, const Tensor& rows) const {
    const Tensor result = allocate_like(weight);
    multiply(result, transposed(gradient), rows);
    return result;
  }

  /// Returns an undefined tensor if there is no bias.
  Tensor bias_gradient(const OptionalTensor& bias, const Tensor& gradient) const {
    if (!bias) return Tensor();
    const std::array<int64_t, 1> rows = {0};
    return cast(
        torch::stable::sum(gradient, IntHeaderOnlyArrayRef(rows), false, at_least_single(dtype)),
        dtype_of(*bias));
  }

  /// Returns the convolution of x as rows.
  Tensor convolve(const Tensor& x, LayerKept& kept) const {
    const Tensor taps = taps_of(args.conv1d_weight);
    if (takes_step()) {
      const Tensor u = new_rows(dim);
      ops.conv.update({step_of(x), states->conv_state, taps, args.conv1d_bias, kSilu, std::nullopt,
                       std::nullopt, kNoPadding, step_of(channels_of(u))});
      return u;
    }
    const int64_t history = taps.size(1) - 1;
    if (ranks && !kept.before.defined()) {
      std::tie(kept.before, kept.counts) = ranks->steps_before(x, history);
    }
    if (states && !states->begins) {
      const Tensor& last = states->conv_state;
      kept.before = cast(steps_of(last, last.size(2) - history, history), dtype);
    }
    return rows_of(
        std::get<0>(ops.conv.forward({x, taps, args.conv1d_bias, std::nullopt, args.cu_seqlens,
                                      if_defined(kept.before), false, kSilu},
                                     args.reverse)));
  }
  /// Fills dx and returns the gradients of weight and bias.
  std::tuple<Tensor, Tensor> convolution_backward(const Tensor& du, const Tensor& x,
                                                  const LayerKept& kept, const Tensor& dx) const {
    const auto [same_dx, dweight, dbias, dstates] =
        ops.conv.backward({x, taps_of(args.conv1d_weight), args.conv1d_bias, std::nullopt,
                           args.cu_seqlens, if_defined(kept.before), false, kSilu},
                          du, std::nullopt, dx, args.reverse);
    if (ranks) ranks->exchange_step_gradients(dstates, kept.counts, dx);
    return {dweight, dbias};
  }
  /// Computes the time steps; both are matrices.
  void project_steps(const Tensor& steps, const Tensor& dt) const {
    multiply(steps, dt, transposed(*weights.delta_proj));
  }
  /// Takes one step of the scan.
  Tensor update(const Tensor& u, const Tensor& steps, const Projected& projected) const {
    const Tensor y = new_rows(dim);
    ops.update({states->state, step_of(channels_of(u)), step_of(channels_of(steps)), args.A,
                step_of(projected.B), step_of(projected.C), args.D, step_of(half(1)),
                args.delta_bias, args.delta_softplus, std::nullopt, std::nullopt, kNoPadding,
                step_of(channels_of(y)), args.discretization_method, /*A_is_log=*/true,
                std::nullopt});
    return y;
  }
  Projected parts_of(const Tensor& x_dbl) const {
    const InnerNorms& norms = args.inner_norms;
    if (norms.eps < 0) return {matrix_of(x_dbl, 0, rank), B_of(x_dbl), C_of(x_dbl)};
    const auto normed = [&](int64_t first, int64_t count, const OptionalTensor& weight) {
      const Tensor part = view_as(x_dbl, {batch, seqlen, count}, x_dbl.strides(), first);
      return std::get<0>(
          ops.norm.forward(part, std::nullopt, weight, norms.eps, dtype, std::nullopt));
    };
    return {matrix_of(normed(0, rank, norms.dt)), channels_of(normed(rank, dstate, norms.B)),
            channels_of(normed(rank + dstate, dstate, norms.C))};
  }
  Tensor B_of(const Tensor& x_dbl) const { return channels_of(x_dbl, rank, dstate); }
  Tensor C_of(const Tensor& x_dbl) const { return channels_of(x_dbl, rank + dstate, dstate); }

  /// Lists the layer's scans. If there are two, both are gated; if both use A, only the first has
  /// D.
  std::vector<Scan> scans() const {
    static const OptionalTensor kNoD;
    std::vector<Scan> all{{A, args.D, args.reverse}};
    if (args.bidirectional) all.push_back({A, kNoD, true});
    if (args.A_b) all.push_back({*args.A_b, args.D, true});
    return all;
  }
  void add(Tensor& total, Tensor term) const {
    if (term.defined()) total = ops.sum(total, term);
  }

  Tensor forward(bool saves, LayerKept& kept);
  Tensor run(bool saves, LayerKept& kept);
  LayerGradients backward(const Tensor& dout, LayerKept& kept, ScalarType xz_dtype);
  void scan_backward(const Tensor& dy, const Tensor& u, const Tensor& delta, const LayerKept& kept,
                     RowGradients& rows, LayerGradients& made) const;
};

}  // namespace selective_scan::op
