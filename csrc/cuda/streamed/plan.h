// The plans of the streamed path, which serves many channels or long sequences in fp32 and brings B
// and C to shared memory by bulk copies. forward_launch.cu and backward_launch.cu turn a plan into
// launches.
#pragma once

#include <array>
#include <cstdint>

#include "../../core/params.h"
#include "../kit/geometry.h"
#include "../kit/launch_shape.h"
#include "../kit/packed_chunks.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"
#include "forward_shape.h"
#include "row_array.h"

namespace selective_scan::cuda::streamed {

struct ForwardPlan {
  int lane_states;    // that a lane of the instantiation holds
  int warp_channels;  // of a warp of the instantiation
  int padded_states;  // of a channel, padding included
  LaneMap map;
  std::array<RowArray, 5> rows;  // u, delta, z, out, input_delta
  ForwardGeometry geometry;      // including segments
  PackedCuts cuts;
  int64_t chunks;  // in a sequence
  LaunchShape shape;
  ForwardScratch scratch;
};

struct BackwardPlan {
  int team_warps;     // warps that share a channel
  int padded_states;  // of a channel, padding included
  LaneMap map;
  LaneMap summary_map;
  std::array<RowArray, 9> rows;          // indexed by Row
  std::array<RowArray, 9> summary_rows;  // of the summary kernel, if it runs
  Geometry geometry;
  PackedCuts cuts;
  int split_tiles;  // worked on in two parts: see BlockOrder
  int64_t flags;    // one for each block that others wait for
  LaunchShape shape;
  LaunchShape summary_shape;
  BackwardScratch scratch;
};

/// Makes the plan. If it returns a refusal, `plan` holds nothing of use.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

/// Returns whether the kernels for the rows' dtype sum the gradients of B and C with at least the
/// precision of the gradients' dtypes; true if the path has no kernel for the call.
bool sums_have_digits(const BackwardParams& params);

/// Returns the warps per multiprocessor that all channels together make, as if all of them ran at
/// the same time.
inline double warps_per_multiprocessor(const ScanParams& params, int warp_channels,
                                       const Device& device) {
  const int64_t warps =
      params.batch * params.groups * ceil_div(params.dim / params.groups, warp_channels);
  return static_cast<double>(warps) / device.multiprocessors;
}

}  // namespace selective_scan::cuda::streamed
