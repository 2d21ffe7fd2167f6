// How the streamed forward kernels divide work among lanes.
#pragma once

#include "../../core/complex.h"
#include "../../core/discretization.h"
#include "../kit/config.h"
#include "row_array.h"

namespace selective_scan::cuda::streamed {

/// Threads that a multiprocessor has room for, which bounds the registers of each.
constexpr int kResidentThreads = kMaxThreads;
constexpr int kFewRegistersResidentThreads = 640;

/// Chunks of B and C in shared memory.
constexpr int kRingSlots = 4;

/// How a warp divides channels and states among its lanes.
template <class T, int kStates, int kLaneBits>
struct WarpShape {
  static constexpr int kLanes = 1 << kLaneBits;             // of a channel
  static constexpr int kChannels = kWarpSize >> kLaneBits;  // of a warp
  static constexpr int kPadded = kLanes * kStates;          // states

  // A lane's states lie in quads of 16 bytes, and the quads of a channel's lanes side by side.
  static constexpr int kQuad = 16 / static_cast<int>(sizeof(T));
  static constexpr int kQuads = kStates / kQuad;
  static constexpr SELECTIVE_SCAN_HD int first_state(int part, int quad) {
    return (quad * kLanes + part) * kQuad;
  }

  // Rows of a plane are kRowStride floats apart; a plane's rows begin so far behind the one's
  // before that neither writing (two channels and four lanes at a time) nor reading (two channels)
  // has bank conflicts.
  static constexpr int kRows = kChannels * kRowStride;
  static constexpr int kAccess = 4;
  static constexpr int kPlane = kRows + kAccess * ((8 + 2 - kRows / kAccess % 8) % 8);
  static constexpr int kWarpFloats = 2 * kRows + kLanes * kPlane;
};

/// Whether a shape is that of up to 16 real states, which most calls have. It has kernels of all
/// methods and for packed sequences, with variable B and C; by kCommonMethod also for constant
/// ones, which lanes keep in registers, and for an input that has steps of its own. Instead of
/// kChannels it takes LaneMap::kStepPairs and kElements: two kernels, which are faster than one.
/// Any other shape has kernels of kCommonMethod alone.
template <class T, int kStates>
constexpr bool kIsCommonShape = !is_complex_v<T> && kStates == 4;

/// Whether packed sequences may lie in this way. Elements of 4 bytes go one by one however they
/// lie, which is one kernel less.
SELECTIVE_SCAN_HD constexpr bool has_packed(LaneMap map, int64_t size) {
  return map == LaneMap::kElements || (map == LaneMap::kStepPairs && size == 2);
}

/// Whether there is a kernel with few registers too, of which more blocks run at a time. Elements
/// of `size` bytes; those of 4 need too many registers on their way.
template <class T, int kStates, Method kMethod>
SELECTIVE_SCAN_HD constexpr bool has_few_registers(LaneMap map, int64_t size) {
  using F = Formula<kMethod>;
  return kIsCommonShape<T, kStates> && F::kAbarIsExponential && !F::kBbarDependsOnA && size == 2 &&
         map == LaneMap::kSteps;
}

/// How a launch divides the problem.
struct ForwardGeometry {
  int warps = 0;               // of a block
  int64_t tiles = 1;           // of a group's channels
  int64_t segments = 1;        // of time, worked on independently
  int64_t segment_chunks = 0;  // the last segment may have fewer
  int shared_bytes = 0;
  bool few_registers = false;  // many blocks a multiprocessor: see has_few_registers()
};

}  // namespace selective_scan::cuda::streamed
