// How the dstate 1 kernels divide work among lanes, and what lies in shared memory.
#pragma once

#include "../../core/complex.h"
#include "../kit/config.h"

namespace selective_scan::cuda::dstate1 {

constexpr int kItems = 8;                                   // consecutive steps of a lane
constexpr int kChannelLanes = kChunk / kItems;              // lanes of a channel
constexpr int kWindowChannels = kWarpSize / kChannelLanes;  // channels of a warp at a time

// Warps of a block, and blocks of a multiprocessor that registers must suffice for.
constexpr int kForwardWarps = 4;
template <class T>
constexpr int kForwardBlocks = is_complex_v<T> ? 3 : 4;
constexpr int kMaxBackwardWarps = 4;
template <class T>
constexpr int kBackwardBlocks = is_complex_v<T> ? 2 : 3;

/// Distance between the channels of a tile in shared memory: rows stay aligned to 16 bytes, and no
/// access has bank conflicts.
constexpr int kTileStride = kChunk + 4;
constexpr int kTileSize = kWindowChannels * kTileStride;

/// What a lane keeps of a window between chunks. T: the type of the state.
template <class T>
struct LaneRecord {
  T state_gradient;  // what leaves the chunk towards earlier steps
  T dA;
  float dD, ddelta_bias;
  T A;
  float D, delta_bias;
  T initial_state;
  T B, C, dB, dC;  // of constant B and C
};

/// Sums of dB and dC over a warp's channels, (step, dB|dC).
template <class T>
using WarpSums = T[2 * kChunk];

template <class T>
struct BackwardWarpShared {
  float tile[kTileSize];
  T B[kChunk];
  T C[kChunk];
};

template <class T>
constexpr int backward_shared_bytes(int warps, int slots) {
  return warps * static_cast<int>(sizeof(BackwardWarpShared<T>) + 2 * sizeof(WarpSums<T>) +
                                  slots * kWarpSize * sizeof(LaneRecord<T>));
}

}  // namespace selective_scan::cuda::dstate1
