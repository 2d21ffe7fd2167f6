// The interface of the streamed forward kernels to their launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/state_exchange.h"
#include "../kit/launch_shape.h"
#include "../kit/packed_chunks.cuh"
#include "../kit/segments.h"
#include "forward_shape.h"
#include "row_array.h"

namespace selective_scan::cuda::streamed {

struct ForwardArgs : ForwardGeometry {
  ForwardParams params;
  RowArray u, delta, z, out, input_delta;
  LaneMap map = LaneMap::kChannels;
  int64_t chunks = 0;                 // of a sequence; the most that packed sequences can have
  SegmentStates states;               // null if there is one segment
  const char* projections = nullptr;  // see PackedBC; null if B and C are constant
  bool summarizes_all = false;        // including the last segment

  /// Returns the chunks of packed sequences. A chunk of B and C has `chunk_bytes` bytes.
  SELECTIVE_SCAN_HD PackedChunks packed_chunks(int chunk_bytes) const {
    return PackedChunks(projections + params.groups * chunks * chunk_bytes);
  }
};

/// The part of the problem that a block works on.
struct BlockItem {
  int64_t batch;
  int64_t group;
  int64_t first_channel;
  int channels;
  int64_t segment;
  int first_chunk;
  int chunks;
};

/// Returns the work item of a block. Blocks of the same segment are neighbors, since they read the
/// same B and C.
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

/// Returns the item of a block that works on a segment of packed sequences.
__device__ __forceinline__ BlockItem in_segment(BlockItem item, const PackedSegment& segment) {
  item.segment = segment.number;
  item.first_chunk = segment.first_chunk;
  item.chunks = segment.chunks;
  return item;
}

template <class T, int kStates, int kLaneBits, Method kMethod>
struct StreamedForward {
  static cudaError_t launch(const ForwardArgs& args, const LaunchShape& shape, cudaStream_t stream);
  /// Computes the map from the state that enters each segment to the one that leaves it. B and C
  /// are variable.
  static cudaError_t summarize(const ForwardArgs& args, cudaStream_t stream);
};

struct ForwardPlan;  // plan.h

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange);

}  // namespace selective_scan::cuda::streamed
