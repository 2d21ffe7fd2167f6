// The relay path: which calls it takes, and how it divides the work.

#include <algorithm>

#include "../kit/packed_bc_layout.h"
#include "../relay/plan.h"
#include "arrays.h"
#include "figures.h"

namespace selective_scan::cuda::relay {
namespace {

using FourStates = Shape<4, 16>;    // 8 channels a block
using OneState = Shape<1, kChunk>;  // 2 channels a block

Refusal refuse(const ScanParams& params) {
  if (params.is_complex || params.is_double) return {"A must be real and arithmetic fp32"};
  if (!has_all_kernels(params.method)) return kNotThisMethod;
  if (!params.variable_B || !params.variable_C) return {"B and C must both be variable"};
  if (params.dstate <= kPaddedStates / 4 || params.dstate > kPaddedStates) {
    return {"dstate must be 5 to 16", params.dstate};
  }
  if (params.seqlen < 1) return {"seqlen must be positive", params.seqlen};
  if (params.batch > kMaxRows) return {"batch must be at most 65535", params.batch};
  if (params.groups > kMaxRows) return {"there must be at most 65535 groups", params.groups};
  return {};
}

/// Bytes of an element where all arrays with steps are vectors of one type, else 0.
template <class S, class Params>
int vector_size(const Params& params) {
  const auto rows = rows_of(params);
  const DType dtype = params.u.dtype;
  const int64_t size = element_size(dtype);
  const auto is_vector = [&](const ArrayView& view) {
    return view.dtype == dtype && has_step_vectors(params, view, S::kItems);
  };
  // These kernels read B and C themselves.
  const auto is_projection = [&](const ArrayView& view) {
    return S::kStepMajor || (view.dtype == dtype && has_step_vectors(params, view, 16 / size));
  };
  const bool are_vectors =
      all_of(rows, is_vector) && is_projection(params.B) && is_projection(params.C);
  return are_vectors ? static_cast<int>(size) : 0;
}

template <class S>
RelayGeometry make_geometry(const ScanParams& params, int64_t warps) {
  RelayGeometry geometry;
  geometry.group_channels = params.dim / params.groups;
  geometry.tiles = ceil_div(geometry.group_channels, S::kChannels);
  geometry.blocks = params.batch * params.groups * geometry.tiles;
  geometry.warps =
      static_cast<int>(std::clamp<int64_t>(ceil_div(params.seqlen, S::kSteps), 1, warps));
  return geometry;
}

/// The launch of a geometry whose warps are reduced to what shared memory has room for.
Refusal fit_warps(const ScanParams& params, const Device& device, int block_bytes, int warp_bytes,
                  RelayGeometry& geometry, LaunchShape& shape) {
  const int room = (device.block_shared_bytes - block_bytes) / warp_bytes;
  if (room <= 0) return kNotEnoughSharedMemory;
  geometry.warps = std::min(geometry.warps, room);
  shape = {geometry.tiles, geometry.warps * kWarpSize, block_bytes + geometry.warps * warp_bytes};
  shape.rows = params.groups;
  shape.layers = params.batch;
  return {};
}

}  // namespace

Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  if (params.wanted == ForwardWanted::kMapAlone) return kNotMapAlone;
  if (const Refusal refusal = refuse(params)) return refusal;
  plan.geometry = make_geometry<FourStates>(params, kMaxRelayWarps);
  RelayGeometry& geometry = plan.geometry;
  plan.vector_size = vector_size<FourStates>(params);
  // Blocks of half the warps share a multiprocessor.
  if (geometry.blocks > device.multiprocessors &&
      params.seqlen < figures_of(device).choice.relay_shared_steps) {
    geometry = make_geometry<FourStates>(params, kMaxRelayWarps / 2);
  }
  const Refusal refusal = fit_warps(params, device, handover_bytes(FourStates::kStates),
                                    ForwardLayout<FourStates>::kSize * 4, geometry, plan.shape);
  if (refusal) return refusal;
  plan.shape.is_dependent = true;
  plan.scratch.packed_bc =
      plan.scratch.take(true, PackedBC(params, kPaddedStates).bytes(params), 1);
  return {};
}

Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan) {
  if (params.wanted == BackwardWanted::kStateAlone) return kNotStateAlone;
  if (const Refusal refusal = refuse(params)) return refusal;
  plan.geometry = make_geometry<OneState>(params, kMaxRelayWarps);
  // Blocks that share a multiprocessor share the warps it has room for.
  const int64_t share = ceil_div(plan.geometry.blocks, device.multiprocessors);
  plan.geometry = make_geometry<OneState>(params, std::max<int64_t>(1, kMaxRelayWarps / share));
  plan.vector_size = vector_size<OneState>(params);
  const int warp_bytes = 4 * (plan.vector_size == 2 ? BackwardLayout<OneState, 2>::kSize
                                                    : BackwardLayout<OneState, 4>::kSize);
  const Refusal refusal =
      fit_warps(params, device, kBackwardBlockBytes, warp_bytes, plan.geometry, plan.shape);
  if (refusal) return refusal;
  BackwardScratch& scratch = plan.scratch;
  const int64_t rows = params.batch * params.dim;
  scratch.dBC_partials = scratch.take(
      true, plan.geometry.tiles * params.batch * params.groups * params.seqlen * 2 * kPaddedStates,
      sizeof(float));
  scratch.take_sums(params, rows * kPaddedStates, sizeof(float), rows, sizeof(float));
  return {};
}

}  // namespace selective_scan::cuda::relay
