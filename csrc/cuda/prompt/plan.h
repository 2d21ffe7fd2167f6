// The plan of the prompt path, sequences too few to fill the device otherwise: what launch.cu turns
// into a launch. There is a forward pass alone.
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
  int lane_states;    // of an instantiation: see Shape
  int warp_channels;  // likewise
  int scanners;       // warps of a block that scan; the others make what these read
  int64_t waves;      // of blocks
  int64_t tiles;      // of a group
  LaunchShape shape;
  ForwardScratch scratch;  // none
};

/// Makes the plan, or has done nothing of use where it refuses.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);

}  // namespace selective_scan::cuda::prompt
