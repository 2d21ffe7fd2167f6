// How the prompt kernels divide work among lanes, and their shared memory.
#pragma once

#include "../kit/config.h"

namespace selective_scan::cuda::prompt {

constexpr int kPaddedStates = 16;

/// A chunk's input has so many places in shared memory: one is scanned while the next is made.
constexpr int kBuffers = 2;

/// How rows lie: vectors along steps, or along channels, those of B and C along states then; or
/// along steps, but beginning anywhere, of which single elements are moved.
enum class Along { kSteps, kChannels, kElements };
constexpr bool is_along_steps(Along along) {
  return along != Along::kChannels;
}

/// A lane holds kStates of a channel's states. A lane that moves rows has kGroups times four
/// consecutive steps of a chunk.
template <int kStates_, int kGroups_>
struct Shape {
  static constexpr int kStates = kStates_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kLaneBits = kStates == 1 ? 4 : 3;
  static constexpr int kLanes = 1 << kLaneBits;  // of a channel, also as they move its rows
  static_assert(kLanes * kStates == kPaddedStates);
  static constexpr int kChannels = kWarpSize / kLanes;  // of a warp
  static constexpr int kGroupSteps = kLanes * kBlockSteps;
  static constexpr int kSteps = kGroups * kGroupSteps;  // of a chunk
  static_assert(kSteps % kChunk == 0);
  static constexpr int kMostWarps = kStates == 1 ? 24 : 16;  // of a block, which bounds registers

  // These count floats. Rows are 16 bytes longer than their steps, so that eight neighbouring ones
  // have banks of their own; the planes of two channels, which are written together, lie half of
  // all banks apart.
  static constexpr int kRow = kSteps + 4;
  static constexpr int kProjections = 2 * kPaddedStates * kRow;  // rows of B, then of C
  static constexpr int kRows = 2 * kChannels * kRow;             // of Δ, then of inputs, of a warp
  static constexpr int kPlanes = kLanes * kRow + 16;             // of a channel
  static constexpr int kBiases = 4;  // and as many of D: no fewer than channels, 16 bytes
  static constexpr int kScanner = kBuffers * kRows + kChannels * kPlanes + 2 * kBiases;

  // These count bytes of what comes as it lies in memory: u and delta of a warp, and B and C.
  static constexpr int raw_row_bytes(int size) { return 2 * kChannels * kSteps * size; }
  static constexpr int raw_projection_bytes(int size) { return 2 * kPaddedStates * kSteps * size; }

  static constexpr int shared_bytes(int size, int scanners) {
    constexpr int kFloat = sizeof(float);
    return raw_projection_bytes(size) + kBuffers * kProjections * kFloat +
           scanners * (raw_row_bytes(size) + kScanner * kFloat);
  }
};

}  // namespace selective_scan::cuda::prompt
