// The dstate 1 path: which calls it takes, and how it divides their channels.

#include <algorithm>

#include "../dstate1/layout.h"
#include "../dstate1/plan.h"
#include "arrays.h"

namespace selective_scan::cuda::dstate1 {
namespace {

Refusal refuse(const ScanParams& params) {
  if (params.dstate != 1) return {"dstate must be 1", params.dstate};
  if (params.is_complex || params.is_double) return {"A must be real and arithmetic fp32"};
  if (!has_all_kernels(params.method)) return kNotThisMethod;
  if (!params.variable_B || !params.variable_C) return {"B and C must both be variable"};
  return {};
}

/// All arrays with steps have one element type and the same strides, and offsets within a tile of
/// channels fit 32 bits.
template <class Params>
Refusal refuse_arrays(const Params& params, int64_t tile_channels) {
  const auto has_strides_of_u = [&](const ArrayView& view) {
    return view.channel == params.u.channel && view.step == params.u.step;
  };
  const auto rows = rows_of(params);
  if (!have_one_dtype(params, rows) || !all_of(rows, has_strides_of_u)) {
    return {"u, delta, z and out or their gradients must have one dtype and the same strides"};
  }
  const auto fits = [&](const ArrayView& view) {
    const int64_t steps = params.seqlen + kChunk;  // what is on its way may lie behind the end
    return fits_32_bits({{steps, view.step}, {tile_channels, view.channel}},
                        element_size(view.dtype));
  };
  if (!fits(params.u) || !fits(params.B) || !fits(params.C)) {
    return {"a block's part of an array must lie within 2 GiB"};
  }
  return {};
}

/// Returns how many steps make a vector in all arrays, 0 if they are none. Kernels know of vectors
/// only together with B and C of the same type.
template <class Params>
int find_vector_steps(const Params& params) {
  if (params.B.dtype != params.u.dtype || params.C.dtype != params.u.dtype) return 0;
  const auto have_vectors = [&](int steps) {
    return all_of(rows_of(params),
                  [&](const ArrayView& view) { return has_step_vectors(params, view, steps); });
  };
  const bool has_long_vectors = params.u.dtype != DType::kFloat32 && have_vectors(kItems);
  return has_long_vectors ? kItems : have_vectors(kItems / 2) ? kItems / 2 : 0;
}

}  // namespace

Refusal make_plan(const ForwardParams& params, const Device&, ForwardPlan& plan) {
  if (params.wanted == ForwardWanted::kMapAlone) return kNotMapAlone;
  if (const Refusal refusal = refuse(params)) return refusal;
  if (const Refusal refusal = refuse_arrays(params, kWindowChannels)) return refusal;
  plan.vector_steps = find_vector_steps(params);
  plan.windows = ceil_div(params.dim / params.groups, kWindowChannels);
  plan.work_items = params.batch * params.groups * plan.windows;
  plan.shape = {std::min(ceil_div(plan.work_items, kForwardWarps), kMaxBlocks),
                kForwardWarps * kWarpSize};
  return {};
}

/// A tile has kMinBackwardTile channels or, if that is less, those of a group.
Refusal make_plan(const BackwardParams& params, const Device&, BackwardPlan& plan) {
  if (params.wanted == BackwardWanted::kStateAlone) return kNotStateAlone;
  if (const Refusal refusal = refuse(params)) return refusal;
  const int64_t windows = ceil_div(params.dim / params.groups, kWindowChannels);
  plan.warps = static_cast<int>(std::min<int64_t>(windows, kMaxBackwardWarps));
  plan.slots = static_cast<int>(std::min<int64_t>(
      ceil_div(windows, plan.warps), kMinBackwardTile / (plan.warps * kWindowChannels)));
  const int tile_windows = plan.warps * plan.slots;
  if (const Refusal refusal = refuse_arrays(params, tile_windows * kWindowChannels)) return refusal;
  plan.vector_steps = find_vector_steps(params);
  plan.tiles = ceil_div(windows, tile_windows);
  plan.work_items = params.batch * params.groups * plan.tiles;
  plan.shape = {std::min(plan.work_items, kMaxBlocks), plan.warps * kWarpSize,
                backward_shared_bytes(plan.warps, plan.slots)};
  BackwardScratch& scratch = plan.scratch;
  scratch.dBC_partials = scratch.take(
      true, plan.tiles * params.batch * params.groups * params.seqlen * 2, sizeof(float));
  const int64_t rows = params.batch * params.dim;
  scratch.take_sums(params, rows, sizeof(float), rows, sizeof(float));
  return {};
}

}  // namespace selective_scan::cuda::dstate1
