// How the dstate 1 kernels divide work among lanes, and what lies in shared memory.
#pragma once

#include "../kit/config.h"

namespace selective_scan::cuda::dstate1 {

constexpr int kItems = 8;                                   // consecutive steps of a lane
constexpr int kChannelLanes = kChunk / kItems;              // lanes of a channel
constexpr int kWindowChannels = kWarpSize / kChannelLanes;  // channels of a warp at a time

// Warps of a block, and blocks of a multiprocessor that registers must suffice for.
constexpr int kForwardWarps = 4;
constexpr int kForwardBlocks = 4;
constexpr int kMaxBackwardWarps = 4;
constexpr int kBackwardBlocks = 3;

/// Distance between the channels of a tile in shared memory: rows stay aligned to 16 bytes, and no
/// access has bank conflicts.
constexpr int kTileStride = kChunk + 4;
constexpr int kTileSize = kWindowChannels * kTileStride;

/// What a lane hands on from chunk to chunk of a window.
struct alignas(16) LaneSums {
  float state_gradient;  // what leaves the chunk towards earlier steps
  float dA, dD, ddelta_bias;
};
/// What a lane knows of its channel.
struct alignas(16) LaneChannel {
  float A, D, delta_bias, initial_state;
};
/// What a warp's lanes keep of a window: each is one access.
struct WindowRecord {
  LaneSums sums[kWarpSize];
  LaneChannel channels[kWarpSize];
};

/// Sums of dB and dC over a warp's channels, (step, dB|dC).
using WarpSums = float[2 * kChunk];

/// What every warp has in shared memory, in either pass.
struct WarpShared {
  float tile[kTileSize];
  float B[kChunk];
  float C[kChunk];
};

/// Dense rows of a window lie in this order in shared memory. Where there is no z it has no room.
struct ForwardRows {
  enum Number { kU, kDelta, kZ, kAll };

  static SELECTIVE_SCAN_HD int count(bool has_z) { return has_z ? kAll : kZ; }
};
struct BackwardRows {
  enum Number { kU, kDelta, kDout, kZ, kAll };

  static SELECTIVE_SCAN_HD int count(bool has_z) { return has_z ? kAll : kZ; }
};

constexpr int backward_shared_bytes(int warps, int slots) {
  return warps *
         static_cast<int>(sizeof(WarpShared) + 2 * sizeof(WarpSums) + slots * sizeof(WindowRecord));
}

}  // namespace selective_scan::cuda::dstate1
