// The plans of the relay path, few channels of 5 to 16 real states in fp32, whose warps divide
// time: what launch.cu turns into launches.
#pragma once

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"
#include "layout.h"

namespace selective_scan::cuda::relay {

struct ForwardPlan {
  RelayGeometry geometry;
  LaunchShape shape;
  ForwardScratch scratch;
};

/// Makes the plan, or has done nothing of use where it refuses.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);

}  // namespace selective_scan::cuda::relay
