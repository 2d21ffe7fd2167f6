// How the prompt kernels divide work among lanes, and their shared memory.
#pragma once

#include "../kit/barrier_state.h"
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

/// A lane holds kStates of a channel's states. A lane that moves rows along steps has kGroups times
/// four consecutive steps of a chunk.
template <int kStates_>
struct Shape {
  static constexpr int kStates = kStates_;
  static constexpr int kLaneBits = kStates == 1 ? 4 : 3;
  static constexpr int kLanes = 1 << kLaneBits;  // of a channel, also as they move its rows
  static_assert(kLanes * kStates == kPaddedStates);
  static constexpr int kChannels = kWarpSize / kLanes;  // of a warp
  static constexpr int kSteps = 2 * kChunk;             // of a chunk
  static constexpr int kGroupSteps = kLanes * kBlockSteps;
  static constexpr int kGroups = kSteps / kGroupSteps;
  static constexpr int kMostWarps = 16;  // of a block, which bounds registers

  // These count floats. Rows are 16 bytes longer than their steps, so that eight neighbouring ones
  // have banks of their own; the planes of two channels, which are written together, lie half of
  // all banks apart.
  static constexpr int kRow = kSteps + 4;
  static constexpr int kProjections = 2 * kPaddedStates * kRow;  // rows of B, then of C
  static constexpr int kRows = 2 * kChannels * kRow;             // of Δ, then of inputs, of a warp
  static constexpr int kPlanes = kLanes * kRow + 16;             // of a channel
  static constexpr int kBiases = 4;  // and as many of D: no fewer than channels, 16 bytes
  static constexpr int kSums = kChannels * kRow;  // of parts of y, of a warp
  static constexpr int scanner_floats(Along along) {
    return kBuffers * kRows + kChannels * kPlanes + 2 * kBiases +
           (is_along_steps(along) ? 0 : kSums);
  }

  // These count bytes of what comes as it lies in memory: u and delta of a warp, and B and C.
  static constexpr int raw_row_bytes(int size) { return 2 * kChannels * kSteps * size; }
  static constexpr int raw_projection_bytes(int size) { return 2 * kPaddedStates * kSteps * size; }

  static constexpr int shared_bytes(int size, int scanners, Along along) {
    constexpr int kFloat = sizeof(float);
    return raw_projection_bytes(size) + kBuffers * kProjections * kFloat +
           scanners * (raw_row_bytes(size) + scanner_floats(along) * kFloat) +
           (is_along_steps(along) ? 0 : static_cast<int>(sizeof(BarrierState)));
  }
};

}  // namespace selective_scan::cuda::prompt
