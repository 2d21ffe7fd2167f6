// How the relay kernels divide work among warps and lanes, and what lies where in shared memory.
#pragma once

#include <cstdint>

#include "../../core/config.h"
#include "../kit/config.h"

namespace selective_scan::cuda::relay {

/// States that a channel has room for.
constexpr int kPaddedStates = 16;
constexpr int kMaxRelayWarps = 16;

/// A lane holds kStates states of one channel, kLanes lanes hold the channel; a chunk has kSteps
/// steps, and in registers a lane keeps kStates·kSteps values of abar.
template <int kStates_, int kSteps_>
struct Shape {
  static constexpr int kStates = kStates_;
  static constexpr int kSteps = kSteps_;
  static constexpr int kLanes = kPaddedStates / kStates;
  static constexpr int kLaneBits = kLanes == 2 ? 1 : kLanes == 4 ? 2 : 4;
  static constexpr int kChannels = kWarpSize / kLanes;
  static_assert(kLanes == 1 << kLaneBits);

  /// A lane moves kItems consecutive steps of channel lane / kLanes of an array (channel, step).
  static constexpr int kItems = kSteps / kLanes;

  /// Distance between rows along time; rows stay aligned to 16 bytes, columns spread over banks.
  static constexpr int kRow = kSteps + 4;

  /// B and C lie as [step][B | C][state] where a lane has several states, as a kernel in front
  /// (kit/packed_bc.cu) has written them, else as [B | C][state][step]; either way a lane
  /// reads 16 bytes at a time.
  static constexpr bool kStepMajor = kStates > 1;
  static constexpr int kTile = 2 * kPaddedStates * (kStepMajor ? kSteps : kRow);
};

struct RelayGeometry {
  int warps = 1;
  int64_t tiles = 1;  // of a group
  int64_t group_channels = 1;
  int64_t blocks = 1;
};

/// A row of raw B or C of a chunk: `size` bytes an element, and what spreads rows over the banks.
SELECTIVE_SCAN_HD constexpr int raw_row_bytes(int steps, int size) {
  return steps * size + 16;
}

// --- forward.cuh ---

/// What the warps of a block share: Handover.
constexpr int handover_bytes(int states) {
  constexpr int kBarrier = 8;
  const int lanes = kWarpSize * states * static_cast<int>(sizeof(float));
  return 2 * kMaxRelayWarps * (kBarrier + lanes);
}

/// Arrays of one warp, in floats from the start of its shared memory.
template <class S>
struct ForwardLayout {
  static constexpr int kItemsSize = kWarpSize * S::kItems;  // one pack a lane

  static constexpr int kDelta = 0;
  static constexpr int kInput = kDelta + S::kChannels * S::kRow;  // Δ·u
  static constexpr int kTile = kInput + S::kChannels * S::kRow;   // B and C, of two chunks
  /// A lane's part of y, [channel][lane of the channel][step].
  static constexpr int kPlanes = kTile + 2 * S::kTile;
  static constexpr int kRawU = kPlanes + kWarpSize * S::kRow;  // of two chunks
  static constexpr int kRawDelta = kRawU + 2 * kItemsSize;
  static constexpr int kRawZ = kRawDelta + kItemsSize;
  static constexpr int kOrigins = kRawZ + kItemsSize;
  static constexpr int kSize = kOrigins + 4 * kWarpSize * 2;
  static_assert(kSize % 4 == 0 && kOrigins % 2 == 0);
};

// --- backward.cuh ---

/// Arrays of one warp, in floats from the start of its shared memory.
/// kBytes: of an element of B and C, 4 where these are of any type.
template <class S, int kBytes>
struct BackwardLayout {
  static constexpr int kRows = S::kChannels * S::kRow;  // of one (channel, step) array
  static constexpr int kItemsSize = kWarpSize * S::kItems;

  static constexpr int kDelta = 0;
  static constexpr int kInput = kDelta + kRows;  // u
  static constexpr int kDy = kInput + kRows;
  static constexpr int kDu = kDy + kRows;
  static constexpr int kDdelta = kDu + kRows;
  static constexpr int kY = kDdelta + kRows;
  static constexpr int kTile = kY + kRows;
  static constexpr int kRawU = kTile + S::kTile;
  static constexpr int kRawDelta = kRawU + kItemsSize;
  static constexpr int kRawZ = kRawDelta + kItemsSize;
  static constexpr int kRawDout = kRawZ + kItemsSize;
  static constexpr int kRawB = kRawDout + kItemsSize;
  static constexpr int kRawC = kRawB + kPaddedStates * raw_row_bytes(S::kSteps, kBytes) / 4;
  static constexpr int kOrigins = kRawC + kPaddedStates * raw_row_bytes(S::kSteps, kBytes) / 4;
  static constexpr int kSize = kOrigins + 9 * kWarpSize * 2;
  static_assert(kSize % 4 == 0 && kOrigins % 2 == 0);
};

/// What every warp of a block leaves for the block's sums.
struct BlockSums {
  float dA[kMaxRelayWarps][kWarpSize];
  float dD[kMaxRelayWarps][2];
  float ddelta_bias[kMaxRelayWarps][2];
};

/// What the warps of a block share: a barrier and a state of every warp's lanes, and BlockSums.
constexpr int kBackwardBlockBytes =
    kMaxRelayWarps * (8 + kWarpSize * static_cast<int>(sizeof(float))) +
    static_cast<int>(sizeof(BlockSums));

}  // namespace selective_scan::cuda::relay
