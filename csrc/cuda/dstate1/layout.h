// How the dstate 1 kernels divide work among lanes, and what lies in shared memory.
#pragma once

#include "../kit/config.h"

namespace selective_scan::cuda::dstate1 {

constexpr int kItems = 8;                                   // consecutive steps of a lane
constexpr int kChannelLanes = kChunk / kItems;              // lanes of a channel
constexpr int kWindowChannels = kWarpSize / kChannelLanes;  // channels of a warp at a time

// Warps of a block, and blocks of a multiprocessor that registers must suffice for. Forward, 4
// blocks of 4-byte elements keep memory busy, and 6 take longer.
constexpr int kForwardWarps = 4;
constexpr int forward_blocks(int element_size) {
  return element_size == 4 ? 4 : 6;
}
constexpr int kMaxBackwardWarps = 4;
constexpr int kBackwardBlocks = 4;
constexpr int kScatteredBackwardBlocks = 3;

/// Distance between the channels of a tile in shared memory: rows stay aligned to 16 bytes, and no
/// access has bank conflicts.
constexpr int kTileStride = kChunk + 4;
constexpr int kTileSize = kWindowChannels * kTileStride;

/// What a lane hands on from chunk to chunk.
struct alignas(16) LaneSums {
  float state_gradient;  // what leaves the chunk towards earlier steps
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
using WarpSums = float[2 * kChunk];

/// What every warp has in shared memory, in either pass.
struct WarpShared {
  float tile[kTileSize];
  float B[kChunk];
  float C[kChunk];
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

/// Distance between rows of vectors that come to shared memory a chunk at a time, of elements of so
/// many bytes, and the bytes of a window of them. Two rows of 2-byte elements fill all banks. One
/// of 4-byte elements does, so the next begins 16 bytes further on. No access has conflicts then.
constexpr int staged_row(int size) {
  return kChunk * size + (size == 4 ? 16 : 0);
}
constexpr int staged_bytes(int size) {
  return kWindowChannels * staged_row(size);
}
/// One chunk is scanned while the next one is on its way.
constexpr int kStages = 2;

/// Where the arrays of a block's tile begin in global memory, by BackwardRows::Number. In registers
/// they would crowd out what is kept of the steps.
struct alignas(16) TileOrigins {
  char* inputs[BackwardRows::kAll];
  char* gradients[BackwardRows::kAll];
};

constexpr int backward_shared_bytes(int warps) {
  return static_cast<int>(sizeof(TileOrigins)) +
         warps * static_cast<int>(sizeof(WarpShared) + 2 * sizeof(WarpSums) + sizeof(WindowRecord));
}

}  // namespace selective_scan::cuda::dstate1
