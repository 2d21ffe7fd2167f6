// The division of work among lanes in the streamed forward kernels.
#pragma once

#include "../../core/complex.h"
#include "../../core/discretization.h"
#include "../kit/config.h"
#include "row_array.h"

namespace selective_scan::cuda::streamed {

/// The threads per multiprocessor that must fit. They bound the registers of a thread.
constexpr int kResidentThreads = kMaxThreads;
constexpr int kFewRegistersResidentThreads = 640;

/// The chunks of B and C that shared memory holds at a time.
constexpr int kRingSlots = 4;

/// The division of a warp's channels and states among its lanes.
template <class T, int kStates, int kLaneBits>
struct WarpShape {
  static constexpr int kLanes = 1 << kLaneBits;             // per channel
  static constexpr int kChannels = kWarpSize >> kLaneBits;  // per warp
  static constexpr int kPadded = kLanes * kStates;          // states of a channel

  // A lane's states form quads of 16 bytes. In memory, quad q of all lanes of a channel precedes
  // their quads q + 1.
  static constexpr int kQuad = 16 / static_cast<int>(sizeof(T));
  static constexpr int kQuads = kStates / kQuad;
  static constexpr SELECTIVE_SCAN_HD int first_state(int part, int quad) {
    return (quad * kLanes + part) * kQuad;
  }

  // Rows of a plane are kRowStride floats apart. The distance between planes is padded so that
  // neither writes (two channels and four lanes at a time) nor reads (two channels) have bank
  // conflicts.
  static constexpr int kRows = kChannels * kRowStride;
  static constexpr int kAccess = 4;
  static constexpr int kPlane = kRows + kAccess * ((8 + 2 - kRows / kAccess % 8) % 8);
  static constexpr int kWarpFloats = 2 * kRows + kLanes * kPlane;
};

/// True for the shape of up to 16 real states, which most calls have. With variable B and C, it has
/// kernels for every method and for packed sequences. With kCommonMethod, it also has kernels for
/// constant B and C, which lanes keep in registers, and for input_delta. Instead of
/// LaneMap::kChannels, it uses kStepPairs and kElements: two kernels, which are faster than one for
/// both cases. All other shapes have kernels for kCommonMethod alone.
template <class T, int kStates>
constexpr bool kIsCommonShape = !is_complex_v<T> && kStates == 4;

/// Returns whether packed sequences have kernels for this map. Their 4-byte elements are moved one
/// by one whatever their layout, which saves a kernel.
SELECTIVE_SCAN_HD constexpr bool has_packed(LaneMap map, int64_t size) {
  return map == LaneMap::kElements || (map == LaneMap::kStepPairs && size == 2);
}

/// Returns whether there is also a kernel with few registers, of which more blocks run at a time.
/// `size` is that of an element in bytes; 4-byte elements in flight take too many registers.
template <class T, int kStates, Method kMethod>
SELECTIVE_SCAN_HD constexpr bool has_few_registers(LaneMap map, int64_t size) {
  using F = Formula<kMethod>;
  return kIsCommonShape<T, kStates> && F::kAbarIsExponential && !F::kBbarDependsOnA && size == 2 &&
         map == LaneMap::kSteps;
}

/// The division of the problem among the blocks of a launch.
struct ForwardGeometry {
  int warps = 0;               // per block
  int64_t tiles = 1;           // per group
  int64_t segments = 1;        // of time, which run independently
  int64_t segment_chunks = 0;  // the last segment may have fewer
  int shared_bytes = 0;
  bool few_registers = false;  // for more blocks per multiprocessor: see has_few_registers()
};

}  // namespace selective_scan::cuda::streamed
