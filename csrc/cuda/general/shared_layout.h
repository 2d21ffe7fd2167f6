// What lies where in a block's shared memory; the plan and the kernels both ask here.
#pragma once

#include "../../core/params.h"
#include "../kit/geometry.h"

namespace selective_scan::cuda::general {

/// Sizes of an instantiation's types.
struct TypeSizes {
  int states;       // per lane
  int state_bytes;  // of one state
  int real_bytes;
};

/// Byte offsets into dynamic shared memory. T: the type of states, R: its real type.
///
///   projections   T [buffer][step][B states | C states], a piece, staged by the whole block
///   raw           B and C of the next piece as they are in global memory
///   constants     T [thread][B | C][state], in place of a constant projection
///
/// then for each warp:
///
///   rows          R [array][channel][step]: Δ, u, ...
///   raw rows      u, delta, z, dout of the next chunk as they are in global memory
///   channels      R [D | delta_bias][channel]
///   planes        R [channel][part][step], forward: a row of y per lane
///   checkpoints   T [block of steps][lane][state], backward: the state before each block
///   products      T [step of block][dB | dC][lane][state]
///   sums          T [step][dB | dC][state]: dB and dC summed over the warp's channels
struct SharedLayout {
  int projection_row = 0;     // distance of two steps, in T
  int projection_buffer = 0;  // distance of the two buffers, in T; 0: there is only one
  int raw_B = 0;
  int raw_C = 0;
  int constants = 0;
  int warps = 0;       // where the first warp's part begins
  int warp_bytes = 0;  // of one warp's part
  int row_set = 0;     // distance of two arrays of rows, in R
  // From here on relative to a warp's part.
  int raw_u = 0;
  int raw_delta = 0;
  int raw_z = 0;
  int raw_dout = 0;
  int channels = 0;
  int planes = 0;
  int checkpoints = 0;
  int products = 0;
  int sums = 0;

  int bytes = 0;
};

/// Products lie this many lanes apart, which spreads neighbouring steps over the banks.
constexpr int kProductRow = kWarpSize + 4;

/// Rows of a channel: forward Δ, u and the gate; backward Δ, u, dy and what y gives dz.
constexpr int kForwardRows = 3;
constexpr int kBackwardRows = 4;

/// Steps whose dB and dC a warp gathers between two sums over the warps.
SELECTIVE_SCAN_HD int steps_between_sums(const Geometry& geometry) {
  const int lanes = geometry.lanes();
  const int steps = lanes <= 2 ? 16 : lanes >= 8 ? kBlockSteps : 32 / lanes;
  return steps < geometry.piece_steps ? steps : geometry.piece_steps;
}

/// Hands out consecutive pieces of memory, aligned to 16 bytes.
class Cursor {
 public:
  SELECTIVE_SCAN_HD explicit Cursor(int start) : at_(start) {}
  SELECTIVE_SCAN_HD int take(int64_t bytes) {
    const int start = at_;
    at_ += static_cast<int>(round_up(bytes, 16));
    return start;
  }
  SELECTIVE_SCAN_HD int at() const { return at_; }

 private:
  int at_;
};

inline SharedLayout block_layout(const ScanParams& params, const Geometry& geometry,
                                 TypeSizes sizes, int buffers) {
  SharedLayout layout;
  Cursor cursor(0);
  const int padded = geometry.padded_states(sizes.states);
  const bool any_variable = params.variable_B || params.variable_C;
  const bool any_constant = !params.variable_B || !params.variable_C;
  if (any_variable) {
    layout.projection_row = 2 * padded + (sizes.state_bytes < 16 ? 16 / sizes.state_bytes : 1);
    const int buffer = geometry.piece_steps * layout.projection_row;
    layout.projection_buffer = buffers > 1 ? buffer : 0;
    cursor.take(static_cast<int64_t>(buffers) * buffer * sizes.state_bytes);
    const auto raw_bytes = [&](const ArrayView& view) {
      const int components = params.is_complex ? 2 : 1;
      return geometry.piece_steps * ((padded + 3) / 4 * 4) * components * element_size(view.dtype);
    };
    if (params.variable_B) layout.raw_B = cursor.take(raw_bytes(params.B));
    if (params.variable_C) layout.raw_C = cursor.take(raw_bytes(params.C));
  }
  layout.constants = cursor.at();
  if (any_constant) cursor.take(geometry.threads() * 2 * sizes.states * sizes.state_bytes);
  layout.warps = cursor.at();
  layout.row_set = geometry.warp_channels() * kRowStride;
  return layout;
}

/// The arrays that both passes keep for each warp.
inline Cursor warp_layout(const ScanParams& params, const Geometry& geometry, TypeSizes sizes,
                          int rows, SharedLayout& layout) {
  Cursor cursor(0);
  cursor.take(static_cast<int64_t>(rows) * layout.row_set * sizes.real_bytes);
  const auto raw_bytes = [&](const ArrayView& view) {
    return view.present() ? geometry.warp_channels() * kChunk * element_size(view.dtype) : 0;
  };
  layout.raw_u = cursor.take(raw_bytes(params.u));
  layout.raw_delta = cursor.take(raw_bytes(params.delta));
  layout.raw_z = cursor.take(raw_bytes(params.z));
  layout.channels = cursor.take(2 * geometry.warp_channels() * sizes.real_bytes);
  return cursor;
}

inline SharedLayout forward_layout(const ScanParams& params, const Geometry& geometry,
                                   TypeSizes sizes) {
  SharedLayout layout = block_layout(params, geometry, sizes, 2);
  Cursor cursor = warp_layout(params, geometry, sizes, kForwardRows, layout);
  // The only lane of a channel may put y in place of Δ, which it has just read.
  layout.planes =
      geometry.lanes() == 1 ? 0 : cursor.take(kWarpSize * kRowStride * sizes.real_bytes);
  layout.warp_bytes = cursor.at();
  layout.bytes = layout.warps + geometry.warps() * layout.warp_bytes;
  return layout;
}

inline SharedLayout backward_layout(const ScanParams& params, const ArrayView& dout,
                                    const Geometry& geometry, TypeSizes sizes) {
  SharedLayout layout = block_layout(params, geometry, sizes, 1);
  Cursor cursor = warp_layout(params, geometry, sizes, kBackwardRows, layout);
  const int lane_bytes = sizes.states * sizes.state_bytes;
  layout.raw_dout = cursor.take(
      dout.present() ? geometry.warp_channels() * kChunk * element_size(dout.dtype) : 0);
  layout.checkpoints = cursor.take((kBlocksPerChunk - 1) * kWarpSize * lane_bytes);
  if (params.variable_B || params.variable_C) {
    const int lanes = geometry.lanes();
    layout.products = cursor.take(kBlockSteps * 2 * kProductRow * lane_bytes);
    layout.sums = cursor.take(steps_between_sums(geometry) * 2 * lanes * lane_bytes);
  }
  layout.warp_bytes = cursor.at();
  layout.bytes = layout.warps + geometry.warps() * layout.warp_bytes;
  return layout;
}

}  // namespace selective_scan::cuda::general
