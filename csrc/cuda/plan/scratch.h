// Lays out the arrays of a call in its scratch memory.
#pragma once

#include <cstdint>
#include <functional>

#include "../../core/config.h"

namespace selective_scan::cuda {

/// Gives a pass scratch memory whenever it asks: that many bytes, aligned to 256, whose content
/// does not matter. What is enqueued on the same stream behind the pass may have it again. No
/// kernel allocates.
using ScratchMemory = std::function<void*(int64_t bytes)>;

/// This says where an array lies.
class ScratchArray {
 public:
  constexpr ScratchArray() = default;  // there is no such array
  explicit constexpr ScratchArray(int64_t offset) : offset_(offset) {}

  constexpr int64_t offset() const { return offset_; }
  constexpr bool present() const { return offset_ >= 0; }
  /// Null where there is no such array.
  template <class T = void>
  T* in(void* memory) const {
    return !present() ? nullptr : reinterpret_cast<T*>(static_cast<char*>(memory) + offset_);
  }

 private:
  int64_t offset_ = -1;
};

/// Hands out consecutive arrays.
struct ScratchLayout {
  int64_t bytes = 0;

  /// None where it is not wanted.
  ScratchArray take(bool wanted, int64_t count, int64_t size) {
    constexpr int64_t kAlignment = 256;
    if (!wanted) return ScratchArray();
    const ScratchArray array(bytes);
    bytes += round_up(count * size, kAlignment);
    return array;
  }
};

/// Arrays of either pass.
struct ForwardScratch : ScratchLayout {
  ScratchArray packed_bc;         // see PackedBC
  ScratchArray factors, offsets;  // see SegmentStates

  void take_segments(bool wanted, int64_t states, int64_t state_bytes) {
    factors = take(wanted, states, state_bytes);
    offsets = take(wanted, states, state_bytes);
  }
};

/// Arrays of a backward pass: see BackwardWorkspace.
struct BackwardScratch : ForwardScratch {
  ScratchArray dBC_partials, dA, dB, dC, dD, ddelta_bias;
  ScratchArray flags;  // of the blocks that others wait for

  /// The sums over steps: `states` values of `state_bytes` each where a channel's states have one
  /// each, `channels` values of `real_bytes` where it has one alone.
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
