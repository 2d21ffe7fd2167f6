// The plans of the narrow path, few states of many channels: what launch.cu turns into launches.
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
  int padded_states;  // of an instantiation
  int warp_channels;  // likewise
  RowLayout rows;
  int64_t tiles;  // of a group's channels, a warp each
  LaunchShape shape;
  Scratch scratch;
};
using ForwardPlan = Plan<ForwardScratch>;
using BackwardPlan = Plan<BackwardScratch>;

/// Each makes the plan, or has done nothing of use where it refuses.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

}  // namespace selective_scan::cuda::narrow
