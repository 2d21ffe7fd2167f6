// The relay path: which calls it takes, and how it divides the work.

#include <algorithm>

#include "../kit/packed_bc_layout.h"
#include "../relay/plan.h"
#include "arrays.h"
#include "figures.h"

namespace selective_scan::cuda::relay {
namespace {

Refusal refuse(const ForwardParams& params) {
  if (params.is_complex || params.is_double) return {"A must be real and arithmetic fp32"};
  if (!has_all_kernels(params.method)) return kNotThisMethod;
  if (!params.variable_B || !params.variable_C) return {"B and C must both be variable"};
  if (params.dstate <= kPaddedStates / 4 || params.dstate > kPaddedStates) {
    return {"dstate must be 5 to 16", params.dstate};
  }
  if (params.seqlen < 1) return {"seqlen must be positive", params.seqlen};
  if (params.batch > kMaxRows) return {"batch must be at most 65535", params.batch};
  if (params.groups > kMaxRows) return {"there must be at most 65535 groups", params.groups};
  const auto is_vector = [&](const ArrayView& view) {
    return view.dtype == params.u.dtype && has_step_vectors(params, view, kItems);
  };
  if (!all_of(rows_of(params), is_vector)) {
    return {"rows must have one dtype, be contiguous along steps and aligned to 4 of them"};
  }
  return {};
}

RelayGeometry make_geometry(const ScanParams& params, int64_t warps) {
  RelayGeometry geometry;
  geometry.group_channels = params.dim / params.groups;
  geometry.tiles = ceil_div(geometry.group_channels, kChannels);
  geometry.blocks = params.batch * params.groups * geometry.tiles;
  geometry.warps = static_cast<int>(std::clamp<int64_t>(ceil_div(params.seqlen, kSteps), 1, warps));
  return geometry;
}

}  // namespace

Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan) {
  if (params.wanted == ForwardWanted::kMapAlone) return kNotMapAlone;
  if (const Refusal refusal = refuse(params)) return refusal;
  RelayGeometry& geometry = plan.geometry;
  geometry = make_geometry(params, kMaxRelayWarps);
  // Blocks of half the warps share a multiprocessor.
  if (geometry.blocks > device.multiprocessors &&
      params.seqlen < figures_of(device).choice.relay_shared_steps) {
    geometry = make_geometry(params, kMaxRelayWarps / 2);
  }
  constexpr int kWarpBytes = Layout::kSize * static_cast<int>(sizeof(float));
  const int room = (device.block_shared_bytes - kHandoverBytes) / kWarpBytes;
  if (room <= 0) return kNotEnoughSharedMemory;
  geometry.warps = std::min(geometry.warps, room);
  plan.shape = {geometry.tiles, geometry.warps * kWarpSize,
                kHandoverBytes + geometry.warps * kWarpBytes};
  plan.shape.rows = params.groups;
  plan.shape.layers = params.batch;
  plan.shape.is_dependent = true;
  plan.scratch.packed_bc =
      plan.scratch.take(true, PackedBC(params, kPaddedStates).bytes(params), 1);
  return {};
}

}  // namespace selective_scan::cuda::relay
