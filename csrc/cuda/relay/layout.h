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
constexpr int kStates = 4;
constexpr int kSteps = 16;
constexpr int kLaneBits = 2;
constexpr int kLanes = 1 << kLaneBits;
constexpr int kChannels = kWarpSize / kLanes;  // of a warp
static_assert(kLanes * kStates == kPaddedStates);

/// A lane moves kItems consecutive steps of channel lane / kLanes of an array (channel, step).
constexpr int kItems = kSteps / kLanes;

/// Distance between rows along time; rows stay aligned to 16 bytes, columns spread over banks.
constexpr int kRow = kSteps + 4;

/// B and C of a chunk, [step][B | C][state], as a kernel in front (kit/packed_bc.cu) has written
/// them: a lane reads 16 bytes at a time.
constexpr int kTileFloats = 2 * kPaddedStates * kSteps;

struct RelayGeometry {
  int warps = 1;
  int64_t tiles = 1;  // of a group
  int64_t group_channels = 1;
  int64_t blocks = 1;
};

/// What the warps of a block share: Handover.
constexpr int kHandoverBytes = [] {
  constexpr int kBarrier = 8;
  return 2 * kMaxRelayWarps * (kBarrier + kWarpSize * kStates * static_cast<int>(sizeof(float)));
}();

/// Arrays of one warp, in floats from the start of its shared memory.
struct Layout {
  static constexpr int kItemsSize = kWarpSize * kItems;  // one pack a lane

  static constexpr int kDelta = 0;
  static constexpr int kInput = kDelta + kChannels * kRow;  // Δ·u
  static constexpr int kTile = kInput + kChannels * kRow;   // B and C, of two chunks
  /// A lane's part of y, [channel][lane of the channel][step].
  static constexpr int kPlanes = kTile + 2 * kTileFloats;
  static constexpr int kRawU = kPlanes + kWarpSize * kRow;  // of two chunks
  static constexpr int kRawDelta = kRawU + 2 * kItemsSize;
  static constexpr int kRawZ = kRawDelta + kItemsSize;
  static constexpr int kOrigins = kRawZ + kItemsSize;
  static constexpr int kSize = kOrigins + 4 * kWarpSize * 2;
  static_assert(kSize % 4 == 0 && kOrigins % 2 == 0);
};

}  // namespace selective_scan::cuda::relay
