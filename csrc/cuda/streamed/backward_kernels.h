// The interface of the streamed backward kernels to their launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/state_exchange.h"
#include "../kit/launch_shape.h"
#include "../kit/packed_chunks.cuh"
#include "../sums/gradient_sums.h"
#include "row_slices.cuh"

namespace selective_scan::cuda::streamed {

/// The (batch, channel, step) arrays of the backward pass.
enum class Row : int8_t {
  kU,
  kDelta,
  kZ,
  kDout,
  kDu,
  kDdelta,
  kDz,
  kInputDelta,
  kDinputDelta,
  kCount
};
constexpr int kRowArrays = static_cast<int>(Row::kInputDelta);  // without those of input_delta
constexpr int kMostRowArrays = static_cast<int>(Row::kCount);

struct BackwardArgs {
  BackwardParams params;
  Geometry geometry;
  BackwardWorkspace workspace;
  RowArray rows[kMostRowArrays];
  const char* projections;      // see PackedBC
  int64_t sequence_bytes;       // of the projections of a (batch, group)
  int split_tiles;              // see BlockOrder
  int* done;                    // flags of blocks that others wait for, or null
  bool summarizes_all = false;  // including the first segment

  SELECTIVE_SCAN_HD const RowArray& row(Row which) const { return rows[static_cast<int>(which)]; }
  /// Returns the chunks of packed sequences.
  SELECTIVE_SCAN_HD PackedChunks packed_chunks() const {
    return PackedChunks(projections + params.groups * sequence_bytes);
  }
};

/// Returns the work item of a block that works on a segment of packed sequences.
__device__ __forceinline__ WorkItem in_segment(WorkItem item, const PackedSegment& segment) {
  item.segment = segment.number;
  item.begin = static_cast<int64_t>(segment.first_chunk) * kChunk;
  item.end = item.begin + segment.chunks * kChunk;
  return item;
}

/// The launch of one instantiation. T is the type of the states, kElements that of u, delta, z and
/// their gradients; kVariable says whether B and C are variable; kMap is the map by which a warp
/// moves its rows.
template <class T, int kLaneBits, Elements kElements, bool kVariable, Method kMethod, LaneMap kMap>
struct StreamedBackward {
  static cudaError_t run(const BackwardArgs& args, const LaunchShape& shape, cudaStream_t stream);
};

/// Computes the map from the gradient that enters each segment at its end to the one that leaves
/// it, with variable B and C. Several warps may share the states (Geometry::state_warps). kSize is
/// the size of an element in bytes.
template <class T, int kLaneBits, int kSize, Method kMethod, LaneMap kMap>
struct StreamedSummary {
  static cudaError_t run(const BackwardArgs& args, const LaunchShape& shape, cudaStream_t stream);
};

/// The launch for real states that kWarps warps share (team_backward.cuh), with variable B and C.
template <int kWarps, int kSize, Method kMethod, LaneMap kMap>
struct TeamBackward {
  static cudaError_t run(const BackwardArgs& args, const LaunchShape& shape, cudaStream_t stream);
};

struct BackwardPlan;  // plan.h

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange);

}  // namespace selective_scan::cuda::streamed
