// The plans of the narrow path (few states of many channels), which launch.cu turns into launches.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"
#include "layout.h"

namespace selective_scan::cuda::narrow {

template <class Scratch>
struct Plan {
  int padded_states;  // the instantiation's number of states, at least dstate
  int warp_channels;  // channels of a warp in this instantiation
  RowLayout rows;
  int64_t tiles;  // tiles of a group's channels, one warp per tile
  LaunchShape shape;
  Scratch scratch;
};
using ForwardPlan = Plan<ForwardScratch>;
using BackwardPlan = Plan<BackwardScratch>;

/// Both make the plan. If they refuse the call, the contents of `plan` are meaningless.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

}  // namespace selective_scan::cuda::narrow
