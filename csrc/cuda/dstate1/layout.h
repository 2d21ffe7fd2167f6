// The division of work among lanes in the dstate 1 kernels, and the layout of their shared memory.
#pragma once

#include "../../core/affine_map.h"
#include "../kit/config.h"

namespace selective_scan::cuda::dstate1 {

constexpr int kItems = 8;  // consecutive steps of a lane

using StepMap = AffineMap<float>;

/// The shape of a window, the part of the problem that a warp works on at a time: some channels,
/// and as many steps as the lanes that share a channel hold. Warps that share channels work on a
/// round of windows, which follow one another in time.
template <int kLanes, int kSharers = 1>
struct WindowShape {
  static constexpr int kWarps = kSharers;
  static constexpr int kChannelLanes = kLanes;
  static constexpr int kChannels = kWarpSize / kLanes;
  static constexpr int kSteps = kLanes * kItems;
  static constexpr int kRoundSteps = kWarps * kSteps;
  static constexpr int kChunks = kSteps / kChunk;
  /// The steps of B and C in shared memory. In a window of one channel lanes load their own steps,
  /// so these are only what an array must have at least to keep the next one aligned.
  static constexpr int kSharedSteps = kChannels > 1 ? kSteps : 4;

  /// The distance between the channels of a tile in shared memory: rows stay aligned to 16 bytes,
  /// and accesses in windows of several channels have no bank conflicts.
  static constexpr int kTileStride = kSteps + 4;
  static constexpr int kTileSize = kChannels * kTileStride;
};
/// The lanes from one saved state to the next.
constexpr int kChunkLanes = kChunk / kItems;
/// Eight channels of one chunk each, if this makes enough warps for the device.
using WideWindow = WindowShape<kChunkLanes>;
/// One channel. This makes eight times as many warps, each of which is through a sequence eight
/// times as soon.
using LongWindow = WindowShape<kWarpSize>;
/// One channel for four warps, if one warp per channel would leave most of the device idle.
using SharedWindow = WindowShape<kWarpSize, 4>;

/// Returns visit(shape) for the shape of windows of `channels` channels that `warps` warps share.
template <class Visit>
constexpr auto visit_shape(int channels, int warps, const Visit& visit) {
  if (warps > 1) return visit(SharedWindow{});
  return channels > 1 ? visit(WideWindow{}) : visit(LongWindow{});
}

// Warps per block, and blocks per multiprocessor for which registers must suffice. In the forward
// pass, 4 blocks of 4-byte elements keep memory busy, and 6 take longer.
constexpr int kForwardWarps = 4;
template <class Shape>
constexpr int forward_blocks(int element_size) {
  return element_size == 4 || Shape::kChannels == 1 ? 4 : 6;
}
template <class Shape>
constexpr int kMaxBackwardWarps = Shape::kWarps > 1 ? 16 : 4;
template <class Shape>
constexpr int backward_blocks(bool has_vectors) {
  if constexpr (Shape::kWarps > 1) return 1;
  return has_vectors && Shape::kChannels > 1 ? 4 : 3;
}

/// The values that a lane hands on from window to window.
struct alignas(16) LaneSums {
  float state_gradient;  // leaves the window toward earlier steps
  float dA, dD, ddelta_bias;
};
/// The parameters of a lane's channel.
struct alignas(16) LaneChannel {
  float A, D, delta_bias, initial_state;
};
/// The values that a warp's lanes keep. Each struct is one access.
struct WindowRecord {
  LaneSums sums[kWarpSize];
  LaneChannel channels[kWarpSize];
};

/// The sums of dB and dC over a warp's channels, (step, dB|dC).
template <class Shape>
using WarpSums = float[2 * Shape::kSteps];

/// The maps by which warps that share channels tell one another how they change the state: two per
/// warp, for one round and the next.
template <class Shape>
constexpr int kMaps = Shape::kWarps > 1 ? 2 : 0;

/// A warp's part of shared memory, in either pass.
template <class Shape>
struct WarpShared {
  float tile[Shape::kTileSize];
  float B[Shape::kSharedSteps];
  float C[Shape::kSharedSteps];
};

/// The backward kernel of several states (states.cuh): the states that a warp owns, those of a
/// channel at most, and the warps of a block.
constexpr int kWarpStates = 2;
constexpr int kMostStates = 16;
constexpr int kMostStatesWarps = 12;
/// Returns the warps that share a channel.
SELECTIVE_SCAN_HD constexpr int channel_warps(int dstate) {
  return ceil_div(dstate, kWarpStates);
}

/// A warp's part of shared memory in that kernel.
struct alignas(16) StatesShared {
  float projections[LongWindow::kSteps][2 * kWarpStates];  // contributions to dB, then dC
  float rows[3][kItems][kWarpSize];                        // to du, ddelta and y
  float tile[LongWindow::kTileSize];
};

/// The (batch, channel, step) arrays that a pass reads, in the order of their rows in shared
/// memory. Without z there is no room for it.
struct ForwardRows {
  enum Number { kU, kDelta, kZ, kAll };

  static SELECTIVE_SCAN_HD int count(bool has_z) { return has_z ? kAll : kZ; }
};
struct BackwardRows {
  enum Number { kU, kDelta, kDout, kZ, kAll };

  static SELECTIVE_SCAN_HD int count(bool has_z) { return has_z ? kAll : kZ; }
};

/// Returns the distance between rows of vectors that come to shared memory a window at a time, with
/// elements of `size` bytes; staged_bytes() returns the bytes of a window of them. Two rows of a
/// chunk of 2-byte elements fill all banks. One row of 4-byte elements does, so the next one begins
/// 16 bytes further on. Then no access has bank conflicts.
template <class Shape>
constexpr int staged_row(int size) {
  return Shape::kSteps * size + (size == 4 ? 16 : 0);
}
template <class Shape>
constexpr int staged_bytes(int size) {
  return Shape::kChannels * staged_row<Shape>(size);
}
/// The windows in shared memory: one is scanned while the next one is copied.
constexpr int kStages = 2;

/// The addresses at which the arrays of a block's tile begin in global memory, by
/// BackwardRows::Number. In registers, they would crowd out the values kept for the steps.
struct alignas(16) TileOrigins {
  char* inputs[BackwardRows::kAll];
  char* gradients[BackwardRows::kAll];
};

template <class Shape>
constexpr int backward_shared_bytes(int warps) {
  return static_cast<int>(sizeof(TileOrigins)) +
         warps * static_cast<int>(sizeof(WarpShared<Shape>) + 2 * sizeof(WarpSums<Shape>) +
                                  kMaps<Shape> * sizeof(StepMap) + sizeof(WindowRecord));
}

}  // namespace selective_scan::cuda::dstate1
