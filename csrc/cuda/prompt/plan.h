// The plan of the prompt path (too few sequences to fill the device otherwise), which launch.cu
// turns into a launch. The path has a forward pass only.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"
#include "layout.h"

namespace selective_scan::cuda::prompt {

struct ForwardPlan {
  Along along;
  int lane_states;    // of an instantiation, see Shape
  int warp_channels;  // likewise
  int scanners;       // warps of a block that scan; the others, the makers, prepare their input
  int64_t waves;      // waves of blocks
  int64_t tiles;      // tiles of a group's channels
  LaunchShape shape;
  ForwardScratch scratch;  // always empty
};

/// Makes the plan. If it refuses the call, the contents of `plan` are meaningless.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);

}  // namespace selective_scan::cuda::prompt
