// What lies where in a block's shared memory; the launcher and the kernels both ask here.
#pragma once

#include "geometry.cuh"

namespace selective_scan::cuda {

/// Byte offsets into dynamic shared memory. T: the type of states, R: its real type.
///
///   projections   T [step][B states | C states]     staged by the whole block
///   constants     T [thread][B | C][state]          in place of a constant projection
///   then for each warp:
///     rows        R [kRows][channel][step]
///     planes      R [part of channel][step]          forward: partial sums of y, a row per lane
///     checkpoints T [block of steps][lane][state]    backward: the state before each block
///     products    T [step of block][dB | dC][lane][state]
///     sums        T [step][dB | dC][state]           dB and dC summed over the warp's channels
struct SharedLayout {
  int projection_row = 0;  // in T
  int row_set = 0;         // one of kRows arrays, in R
  int sum_steps = 0;       // steps between two sums over the warps
  int constants = 0;
  int warps = 0;       // where the first warp's part begins
  int warp_bytes = 0;  // of one warp's part
  int planes = 0;      // from here on relative to a warp's part
  int checkpoints = 0;
  int products = 0;
  int sums = 0;
  int bytes = 0;
};

/// kProductRow spreads the rows of neighbouring steps over the banks.
constexpr int kProductRow = kWarpSize + 4;

constexpr int kForwardRows = 3;   // Δ, u, gate
constexpr int kBackwardRows = 7;  // Δ, u, dy, dz's factor, and the sums du, dΔ, y

SELECTIVE_SCAN_HD int align_to_16(int bytes) {
  return (bytes + 15) / 16 * 16;
}

SELECTIVE_SCAN_HD SharedLayout common_layout(const ScanParams& params, const Geometry& geometry,
                                             int states, int state_bytes, int real_bytes,
                                             int rows) {
  SharedLayout layout;
  const int padded = geometry.state_warps * geometry.lanes() * states;
  layout.projection_row = 2 * padded + (state_bytes < 16 ? 16 / state_bytes : 1);
  layout.row_set = geometry.warp_channels() * kRowStride;
  const bool any_variable = params.variable_B || params.variable_C;
  const bool any_constant = !params.variable_B || !params.variable_C;
  layout.constants = any_variable ? align_to_16(kChunk * layout.projection_row * state_bytes) : 0;
  layout.warps = layout.constants;
  if (any_constant) layout.warps += align_to_16(geometry.threads() * 2 * states * state_bytes);
  layout.planes = rows * layout.row_set * real_bytes;
  return layout;
}

SELECTIVE_SCAN_HD SharedLayout forward_layout(const ScanParams& params, const Geometry& geometry,
                                              int states, int state_bytes, int real_bytes) {
  SharedLayout layout =
      common_layout(params, geometry, states, state_bytes, real_bytes, kForwardRows);
  layout.warp_bytes = layout.planes + kWarpSize * kRowStride * real_bytes;
  layout.bytes = layout.warps + geometry.warps() * layout.warp_bytes;
  return layout;
}

SELECTIVE_SCAN_HD SharedLayout backward_layout(const ScanParams& params, const Geometry& geometry,
                                               int states, int state_bytes, int real_bytes) {
  SharedLayout layout =
      common_layout(params, geometry, states, state_bytes, real_bytes, kBackwardRows);
  layout.checkpoints = layout.planes;
  layout.products =
      layout.checkpoints + align_to_16(kBlocksPerChunk * kWarpSize * states * state_bytes);
  layout.sums = layout.products;
  layout.warp_bytes = layout.products;
  if (params.variable_B || params.variable_C) {
    const int lanes = geometry.lanes();
    layout.sum_steps = lanes <= 2 ? kChunk : lanes >= 16 ? kBlockSteps : 64 / lanes;
    layout.sums += align_to_16(kBlockSteps * 2 * kProductRow * states * state_bytes);
    layout.warp_bytes =
        layout.sums + align_to_16(layout.sum_steps * 2 * lanes * states * state_bytes);
  } else {
    layout.sum_steps = kChunk;
  }
  layout.bytes = layout.warps + geometry.warps() * layout.warp_bytes;
  return layout;
}

}  // namespace selective_scan::cuda
