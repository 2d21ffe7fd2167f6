// How the dstate 1 kernels divide work among lanes, and what lies in shared memory.
#pragma once

#include "../../core/affine_map.h"
#include "../kit/config.h"

namespace selective_scan::cuda::dstate1 {

constexpr int kItems = 8;  // consecutive steps of a lane

using StepMap = AffineMap<float>;

/// A window is what a warp works on at a time: some channels, and as many steps as lanes that share
/// a channel hold. Warps that share channels work on a round of windows, one behind the other.
template <int kLanes, int kSharers = 1>
struct WindowShape {
  static constexpr int kWarps = kSharers;
  static constexpr int kChannelLanes = kLanes;
  static constexpr int kChannels = kWarpSize / kLanes;
  static constexpr int kSteps = kLanes * kItems;
  static constexpr int kRoundSteps = kWarps * kSteps;
  static constexpr int kChunks = kSteps / kChunk;

  /// Distance between the channels of a tile in shared memory: rows stay aligned to 16 bytes, and
  /// no access of windows of several channels has bank conflicts.
  static constexpr int kTileStride = kSteps + 4;
  static constexpr int kTileSize = kChannels * kTileStride;
};
/// Lanes from one saved state to the next.
constexpr int kChunkLanes = kChunk / kItems;
/// Eight channels of a chunk each, where these are warps enough for the device.
using WideWindow = WindowShape<kChunkLanes>;
/// One channel, which makes eight times as many warps, each of which is through a sequence eight
/// times as soon.
using LongWindow = WindowShape<kWarpSize>;
/// One channel of four warps, where one warp each would leave most of the device idle.
using SharedWindow = WindowShape<kWarpSize, 4>;

/// Returns visit(shape) for the shape of windows of so many channels, which so many warps share.
template <class Visit>
constexpr auto visit_shape(int channels, int warps, const Visit& visit) {
  if (warps > 1) return visit(SharedWindow{});
  return channels > 1 ? visit(WideWindow{}) : visit(LongWindow{});
}

// Warps of a block, and blocks of a multiprocessor that registers must suffice for. Forward, 4
// blocks of 4-byte elements keep memory busy, and 6 take longer.
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

/// What a lane hands on from window to window.
struct alignas(16) LaneSums {
  float state_gradient;  // what leaves the window towards earlier steps
  float dA, dD, ddelta_bias;
};
/// What a lane knows of its channel.
struct alignas(16) LaneChannel {
  float A, D, delta_bias, initial_state;
};
/// What a warp's lanes keep: each is one access.
struct WindowRecord {
  LaneSums sums[kWarpSize];
  LaneChannel channels[kWarpSize];
};

/// Sums of dB and dC over a warp's channels, (step, dB|dC).
template <class Shape>
using WarpSums = float[2 * Shape::kSteps];

/// Maps by which warps that share channels tell one another what they do to the state: two of each,
/// for a round and the next one.
template <class Shape>
constexpr int kMaps = Shape::kWarps > 1 ? 2 : 0;

/// What every warp has in shared memory, in either pass.
template <class Shape>
struct WarpShared {
  float tile[Shape::kTileSize];
  float B[Shape::kSteps];
  float C[Shape::kSteps];
};

/// The arrays with steps that a pass reads, in the order in which rows of them lie in shared
/// memory. Where there is no z it has no room there.
struct ForwardRows {
  enum Number { kU, kDelta, kZ, kAll };

  static SELECTIVE_SCAN_HD int count(bool has_z) { return has_z ? kAll : kZ; }
};
struct BackwardRows {
  enum Number { kU, kDelta, kDout, kZ, kAll };

  static SELECTIVE_SCAN_HD int count(bool has_z) { return has_z ? kAll : kZ; }
};

/// Distance between rows of vectors that come to shared memory a window at a time, of elements of
/// so many bytes, and the bytes of a window of them. Two rows of a chunk of 2-byte elements fill
/// all banks. One of 4-byte elements does, so the next begins 16 bytes further on. No access has
/// conflicts then.
template <class Shape>
constexpr int staged_row(int size) {
  return Shape::kSteps * size + (size == 4 ? 16 : 0);
}
template <class Shape>
constexpr int staged_bytes(int size) {
  return Shape::kChannels * staged_row<Shape>(size);
}
/// One window is scanned while the next one is on its way.
constexpr int kStages = 2;

/// Where the arrays of a block's tile begin in global memory, by BackwardRows::Number. In registers
/// they would crowd out what is kept of the steps.
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
