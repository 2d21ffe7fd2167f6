// The plans of the streamed path, many channels or long sequences in fp32 with B and C by bulk
// copies: what forward_launch.cu and backward_launch.cu turn into launches.
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
  int lane_states;    // of an instantiation
  int warp_channels;  // likewise
  int padded_states;  // of a channel
  LaneMap map;
  std::array<RowArray, 5> rows;  // u, delta, z, out, input_delta
  ForwardGeometry geometry;      // with segments
  PackedCuts cuts;
  int64_t chunks;  // of a sequence
  LaunchShape shape;
  ForwardScratch scratch;
};

struct BackwardPlan {
  int team_warps;     // that share a channel
  int padded_states;  // of a channel
  LaneMap map;
  LaneMap summary_map;
  std::array<RowArray, 9> rows;          // in the order of Row
  std::array<RowArray, 9> summary_rows;  // where there are segments
  Geometry geometry;
  PackedCuts cuts;
  int split_tiles;  // see BlockOrder, also of
  int64_t flags;    // of blocks that others wait for
  LaunchShape shape;
  LaunchShape summary_shape;
  BackwardScratch scratch;
};

/// Each makes the plan, or has done nothing of use where it refuses.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

/// Whether the kernels for the rows' type, if the path takes the call, sum the gradients of B and C
/// with as many digits as these have.
bool sums_have_digits(const BackwardParams& params);

/// How many warps a multiprocessor has if every channel has one place, at whatever time.
inline double warps_per_multiprocessor(const ScanParams& params, int warp_channels,
                                       const Device& device) {
  const int64_t warps =
      params.batch * params.groups * ceil_div(params.dim / params.groups, warp_channels);
  return static_cast<double>(warps) / device.multiprocessors;
}

}  // namespace selective_scan::cuda::streamed
