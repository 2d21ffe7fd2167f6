// How the prompt kernels divide work among lanes, and their shared memory layout.
#pragma once

#include "../kit/barrier_state.h"
#include "../kit/config.h"

namespace selective_scan::cuda::prompt {

constexpr int kPaddedStates = 16;

/// The number of buffers for a chunk's input: one is scanned while the next is filled.
constexpr int kBuffers = 2;

/// The layout of rows: as vectors along steps, where those of B and C have 16 bytes (kSteps) or
/// four steps (kFourSteps); as vectors along channels, with B and C along states; or along steps
/// with any alignment, so that single elements are moved.
enum class Along { kSteps, kFourSteps, kChannels, kElements };
constexpr bool is_along_steps(Along along) {
  return along != Along::kChannels;
}

/// The division of work if a lane holds kStates of a channel's states. If rows lie along steps, a
/// lane moves kGroups times four consecutive steps of a chunk.
template <int kStates_>
struct Shape {
  static constexpr int kStates = kStates_;
  static constexpr int kLaneBits = kStates == 1 ? 4 : 3;
  static constexpr int kLanes = 1 << kLaneBits;  // lanes of a channel, also when its rows are moved
  static_assert(kLanes * kStates == kPaddedStates);
  static constexpr int kChannels = kWarpSize / kLanes;  // channels of a warp
  static constexpr int kSteps = 2 * kChunk;             // steps of a chunk of this path
  static constexpr int kGroupSteps = kLanes * kBlockSteps;
  static constexpr int kGroups = kSteps / kGroupSteps;
  static constexpr int kMostWarps = 16;  // warps of a block; the number limits the registers

  // Sizes in floats. Rows are padded by 16 bytes so that eight neighboring rows use different
  // banks. The planes of two channels, which are written together, are half of all banks apart.
  static constexpr int kRow = kSteps + 4;
  static constexpr int kProjections = 2 * kPaddedStates * kRow;  // rows of B, then of C
  static constexpr int kRows = 2 * kChannels * kRow;             // a warp's rows of Δ, then of Δ·u
  static constexpr int kPlanes = kLanes * kRow + 16;             // a channel's planes
  static constexpr int kBiases = 4;  // at least kChannels, and 16 bytes; as many floats of D follow
  static constexpr int kSums = kChannels * kRow;  // a warp's rows of y
  static constexpr int scanner_floats(Along along) {
    return kBuffers * kRows + kChannels * kPlanes + 2 * kBiases +
           (is_along_steps(along) ? 0 : kSums);
  }

  // Sizes in bytes of inputs before their conversion: a warp's u and delta, and a chunk's B and C.
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
