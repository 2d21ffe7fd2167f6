#include "mamba_inner.h"

#include <algorithm>

#include "layer_call.h"

namespace selective_scan::op {
namespace {

/// Moves the steps of x, (batch, dim, seqlen), into the convolution's last inputs.
void remember_steps(const LayerStates& states, const Tensor& x) {
  const Tensor& last = states.conv_state;
  const int64_t length = last.size(2), count = std::min(length, x.size(2)), older = length - count;
  if (older > 0) {
    Tensor target = steps_of(last, 0, older);
    if (states.begins) {
      torch::stable::zero_(target);
    } else {
      copy(target, torch::stable::clone(steps_of(last, count, older)));
    }
  }
  copy(steps_of(last, older, count), steps_of(x, x.size(2) - count, count));
}

}  // namespace

Tensor Layer::forward(bool saves, LayerKept& kept) {
  run_casts();
  const Tensor out = run(saves, kept);
  return args.residual ? ops.sum(as_contiguous(*args.residual), out) : out;
}

Tensor Layer::run(bool saves, LayerKept& kept) {
  project(kept);
  const Tensor u = convolve(half(0), kept);
  const Tensor x_dbl = new_rows(num_projected());
  multiply(x_dbl, u, *weights.x_proj, std::nullopt);
  const Projected projected = parts_of(x_dbl);
  const Tensor steps = new_rows(dim);
  project_steps(matrix_of(steps), projected.dt);
  const auto scan = [&](const Scan& it, LayerKept::OfScan& kept_of) {
    const Enter enter = [&](const Tensor& map) {
      std::tie(kept_of.entering, kept_of.factors) = ranks->state_before(map, it.reverse);
      return kept_of.entering;
    };
    OptionalTensor initial_state;
    if (states && !states->begins) initial_state = cast(states->state, at_least_single(dtype));
    const auto [scanned, last_state, saved] =
        ops.scan.forward({channels_of(u), channels_of(steps), it.A, projected.B, projected.C, it.D,
                          half(1), args.delta_bias, args.delta_softplus, args.discretization_method,
                          initial_state, it.reverse, args.cu_seqlens, std::nullopt},
                         saves, ranks ? &enter : nullptr, true);
    if (states) {
      copy(states->state, last_state);
      remember_steps(*states, half(0));
    }
    if (saves) kept_of.states = *saved;
    return rows_of(scanned);
  };
  const std::vector<Scan> all = scans();
  Tensor y = takes_step() ? update(u, steps, projected) : scan(all[0], kept.scan);
  if (all.size() > 1) add(y, scan(all[1], kept.second_scan));
  if (saves) {
    kept.x_dbl = x_dbl;
    if (weights.out_proj) kept.y = y;
    if (args.checkpoint_lvl == 0) {
      kept.u = u;
      kept.steps = steps;
    }
  }
  if (!weights.out_proj) return y;
  const Tensor out = new_rows(d_model);
  multiply(out, y, *weights.out_proj, weights.out_proj_bias);
  return out;
}

/// Fills `rows` except for dt's part of dx_dbl, and finds the gradients of the scan's other inputs.
/// dy may be rows.du, and delta may lie where the steps' gradient is written.
void Layer::scan_backward(const Tensor& dy, const Tensor& u, const Tensor& delta,
                          const LayerKept& kept, RowGradients& rows, LayerGradients& made) const {
  const auto run = [&](const Scan& it, const LayerKept::OfScan& kept_of, const RowGradients& into) {
    const Enter enter = [&](const Tensor& own) {
      return ranks->state_gradient_behind(own, kept_of.factors, it.reverse);
    };
    return ops.scan.backward(
        {channels_of(u), delta, it.A, B_of(kept.x_dbl), C_of(kept.x_dbl), it.D, half(1),
         args.delta_bias, args.delta_softplus, args.discretization_method,
         if_defined(kept_of.entering), it.reverse, args.cu_seqlens, std::nullopt},
        channels_of(dy), std::nullopt, if_defined(kept_of.states), channels_of(into.du),
        channels_of(into.dxz, 0, dim), B_of(into.dx_dbl), C_of(into.dx_dbl),
        channels_of(into.dxz, dim, dim), ranks ? &enter : nullptr, true);
  };
  const std::vector<Scan> all = scans();
  if (all.size() == 1) {
    std::tie(made.dA, made.dD, made.ddelta_bias, std::ignore, std::ignore) =
        run(all[0], kept.scan, rows);
    return;
  }
  // The first scan runs last because it may overwrite what the other one reads.
  RowGradients others{new_rows(dim), new_rows(2 * dim), new_rows(num_projected())};
  const auto [dA, dD, ddelta_bias, dstate, dsteps] = run(all[1], kept.second_scan, others);
  std::tie(made.dA, made.dD, made.ddelta_bias, std::ignore, std::ignore) =
      run(all[0], kept.scan, rows);
  if (args.A_b) {
    made.dA_b = dA;
  } else {
    add(made.dA, dA);
  }
  add(made.dD, dD);
  add(made.ddelta_bias, ddelta_bias);
  add(rows.du, std::move(others.du));
  add(rows.dxz, std::move(others.dxz));
  for (const Tensor& dx_dbl : {rows.dx_dbl, others.dx_dbl}) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(channels_of(dx_dbl, 0, rank).get()));
  }
  add(rows.dx_dbl, std::move(others.dx_dbl));
}

LayerGradients Layer::backward(const Tensor& dout, LayerKept& kept, ScalarType xz_dtype) {
  check_beside("dout", dout, "xz", args.xz, kRealDtypes,
               {{"batch", batch}, {"seqlen", seqlen}, {"d_model", d_model}});
  const Tensor gradient = in_products_dtype(dout);
  run_casts();
  Tensor own_y;  // of this pass, which alone may overwrite it
  if (kept.x_dbl.defined()) {
    project(kept);
  } else {
    run(true, kept);
    own_y = kept.y;
  }
  check_kept("x_dbl", kept.x_dbl, {"projected", num_projected()});
  if (weights.out_proj) check_kept("y", kept.y, {"dim", dim});
  if (kept.u.defined()) check_kept("u", kept.u, {"dim", dim});
  if (kept.steps.defined()) check_kept("steps", kept.steps, {"dim", dim});
  const Tensor& x_dbl = kept.x_dbl;
  const Tensor x = half(0);
  LayerGradients made;
  // Rows are long, so buffers are reused: the scan writes du over dy, which may lie in y's memory,
  // and the steps' gradient where dx will be. The steps lie there too, unless they were kept.
  RowGradients rows{own_y.defined() ? std::move(own_y) : new_rows(dim), new_rows(2 * dim),
                    new_rows(num_projected())};
  Tensor dy = gradient;
  if (weights.out_proj) {
    const Tensor of_out = matrix_of(gradient);
    made.dout_proj_weight = weight_gradient(*args.out_proj_weight, of_out, matrix_of(kept.y));
    made.dout_proj_bias = bias_gradient(args.out_proj_bias, of_out);
    dy = rows.du;
    multiply(matrix_of(dy), of_out, *weights.out_proj);
  }
  Tensor u = kept.u.defined() ? kept.u : convolve(x, kept);
  if (!kept.steps.defined()) {
    project_steps(matrix_of(rows.dxz, 0, dim), matrix_of(x_dbl, 0, rank));
  }
  const Tensor delta =
      kept.steps.defined() ? channels_of(kept.steps) : channels_of(rows.dxz, 0, dim);
  scan_backward(dy, u, delta, kept, rows, made);
  dy = Tensor();

  const Tensor &dxz = rows.dxz, &dx_dbl = rows.dx_dbl, dsteps = matrix_of(dxz, 0, dim);
  multiply(matrix_of(dx_dbl, 0, rank), dsteps, *weights.delta_proj);
  made.ddelta_proj_weight =
      weight_gradient(args.delta_proj_weight, dsteps, matrix_of(x_dbl, 0, rank));
  accumulate(matrix_of(rows.du), matrix_of(dx_dbl), *weights.x_proj);
  made.dx_proj_weight = weight_gradient(args.x_proj_weight, matrix_of(dx_dbl), matrix_of(u));
  u = Tensor();
  std::tie(made.dconv1d_weight, made.dconv1d_bias) =
      convolution_backward(channels_of(rows.du), x, kept, channels_of(dxz, 0, dim));
  rows.du = Tensor();
  const Tensor& taps = made.dconv1d_weight;
  made.dconv1d_weight =
      view_as(taps, {dim, 1, taps.size(1)}, {taps.stride(0), taps.stride(0), taps.stride(1)});
  if (!args.in_proj_weight) {
    made.dxz = cast(channels_of(dxz), xz_dtype);
    return made;
  }
  made.dxz = new_rows(input.size(2), xz_dtype);
  multiply(matrix_of(made.dxz), matrix_of(dxz), *weights.in_proj);
  made.din_proj_weight = weight_gradient(*args.in_proj_weight, matrix_of(dxz), matrix_of(input));
  made.din_proj_bias = bias_gradient(args.in_proj_bias, matrix_of(dxz));
  made.dA = cast(call("aten::mul", "Tensor", made.dA, A), dtype_of(args.A));
  return made;
}

LayerForward layer_forward(const LayerOps& ops, const LayerArguments& args, bool saves,
                           const LayerStates* states) {
  LayerForward made;
  Layer layer(ops, args, made.kept, states);
  made.out = layer.forward(saves, made.kept);
  if (!saves) made.kept = {};
  return made;
}

LayerGradients layer_backward(const LayerOps& ops, const LayerArguments& args, const Tensor& dout,
                              LayerKept kept, ScalarType xz_dtype) {
  return Layer(ops, args, kept).backward(dout, kept, xz_dtype);
}

}  // namespace selective_scan::op
