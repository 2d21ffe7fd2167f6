// The streamed forward kernels as their launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/discretization.h"
#include "../kit/gradient_sums.h"
#include "row_slices.cuh"

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
  static constexpr int kComponents = is_complex_v<T> ? 2 : 1;

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

/// Whether kernels take LaneMap::kStepPairs and kElements, which are faster, instead of kChannels,
/// which is one kernel instead of two.
template <class T, int kStates>
constexpr bool kHasOwnMaps = !is_complex_v<T> && kStates == 4;

/// How a launch divides the problem.
struct ForwardGeometry {
  int warps = 0;               // of a block
  int64_t tiles = 1;           // of a group's channels
  int64_t segments = 1;        // of time, worked on independently
  int64_t segment_chunks = 0;  // the last segment may have fewer
  int shared_bytes = 0;
  bool few_registers = false;  // many blocks a multiprocessor: see has_few_registers()
};

struct ForwardArgs : ForwardGeometry {
  ForwardParams params;
  RowArray u, delta, z, out;
  LaneMap map = LaneMap::kChannels;
  int64_t chunks = 0;                 // of a sequence
  SegmentStates states;               // null where there is one segment
  const char* projections = nullptr;  // see PackedBC; null where B and C are constant
  bool is_dependent = false;          // launched behind the kernel that writes the projections
};

/// What a block works on.
struct BlockItem {
  int64_t batch;
  int64_t group;
  int64_t first_channel;
  int channels;
  int64_t segment;
  int first_chunk;
  int chunks;
};

/// Blocks of one segment are neighbours: they read the same B and C.
SELECTIVE_SCAN_HD BlockItem block_item(const ForwardArgs& args, int64_t tiles, int tile_channels,
                                       int64_t block) {
  const ScanParams& params = args.params;
  const int64_t tile = block % tiles;
  block /= tiles;
  const int64_t sequences = params.batch * params.groups;
  const int64_t sequence = block % sequences;
  const int64_t group_channels = params.dim / params.groups;
  const int64_t offset = tile * tile_channels;
  const int64_t left = group_channels - offset;
  BlockItem item;
  item.batch = sequence / params.groups;
  item.group = sequence % params.groups;
  item.first_channel = item.group * group_channels + offset;
  item.channels = static_cast<int>(left < tile_channels ? left : tile_channels);
  item.segment = block / sequences;
  const int64_t first_chunk = item.segment * args.segment_chunks;
  const int64_t chunks_left = args.chunks - first_chunk;
  item.first_chunk = static_cast<int>(first_chunk);
  item.chunks =
      static_cast<int>(chunks_left < args.segment_chunks ? chunks_left : args.segment_chunks);
  return item;
}

template <class T, int kStates, int kLaneBits, Method kMethod>
struct StreamedForward {
  using Shape = WarpShape<T, kStates, kLaneBits>;
  using F = Formula<kMethod>;
  static constexpr bool kHasConstant = kStates * Shape::kComponents == 4;  // constant B and C

  /// Whether there is a kernel with few registers too, of which more blocks run at a time. Elements
  /// of `size` bytes; those of 4 need too many registers on their way.
  static constexpr SELECTIVE_SCAN_HD bool has_few_registers(LaneMap map, int64_t size) {
    return !is_complex_v<T> && kStates == 4 && F::kAbarIsExponential && !F::kBbarDependsOnA &&
           size == 2 && map == LaneMap::kSteps;
  }

  static cudaError_t launch(const ForwardArgs& args, cudaStream_t stream);
  /// Finds how each segment but the last maps the state that enters it. B and C are variable.
  static cudaError_t summarize(const ForwardArgs& args, cudaStream_t stream);
};

}  // namespace selective_scan::cuda::streamed
