// Lays out the arrays of a call in its scratch memory.
#pragma once

#include <cstdint>
#include <functional>

#include "../../core/config.h"

namespace selective_scan::cuda {

/// A function that a pass calls for scratch memory: it returns `bytes` bytes, aligned to 256, with
/// any content. Work that is enqueued on the same stream after the pass may reuse them. No kernel
/// allocates.
using ScratchMemory = std::function<void*(int64_t bytes)>;

/// The position of an array in scratch memory.
class ScratchArray {
 public:
  constexpr ScratchArray() = default;  // an absent array
  explicit constexpr ScratchArray(int64_t offset) : offset_(offset) {}

  constexpr bool present() const { return offset_ >= 0; }
  /// Returns null for an absent array.
  template <class T = void>
  T* in(void* memory) const {
    return !present() ? nullptr : reinterpret_cast<T*>(static_cast<char*>(memory) + offset_);
  }

 private:
  int64_t offset_ = -1;
};

/// Allocates consecutive arrays.
struct ScratchLayout {
  int64_t bytes = 0;

  /// Returns an absent array if it is not wanted.
  ScratchArray take(bool wanted, int64_t count, int64_t size) {
    constexpr int64_t kAlignment = 256;
    if (!wanted) return ScratchArray();
    const ScratchArray array(bytes);
    bytes += round_up(count * size, kAlignment);
    return array;
  }
};

/// The arrays of either pass.
struct ForwardScratch : ScratchLayout {
  ScratchArray packed_bc;         // see PackedBC
  ScratchArray factors, offsets;  // see SegmentStates

  void take_segments(bool wanted, int64_t states, int64_t state_bytes) {
    factors = take(wanted, states, state_bytes);
    offsets = take(wanted, states, state_bytes);
  }
};

/// The arrays of a backward pass: see BackwardWorkspace.
struct BackwardScratch : ForwardScratch {
  ScratchArray dBC_partials, dA, dB, dC, dD, ddelta_bias;
  ScratchArray flags;  // of blocks that others wait for

  /// Takes the sums over steps. Per-state sums have `states` values of `state_bytes` each,
  /// per-channel sums `channels` values of `real_bytes`.
  template <class Params>
  void take_sums(const Params& params, int64_t states, int64_t state_bytes, int64_t channels,
                 int64_t real_bytes) {
    dA = take(true, states, state_bytes);
    dB = take(!params.variable_B, states, state_bytes);
    dC = take(!params.variable_C, states, state_bytes);
    dD = take(params.dD.present(), channels, real_bytes);
    ddelta_bias = take(params.ddelta_bias.present(), channels, real_bytes);
  }
};

}  // namespace selective_scan::cuda
