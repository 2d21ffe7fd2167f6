// The plans of the general path, correct for everything: what launch.cu turns into launches.
#pragma once

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"
#include "shared_layout.h"

namespace selective_scan::cuda::general {

template <class PassScratch>
struct Plan {
  TypeSizes sizes;    // of the instantiation's types
  Geometry geometry;  // with segments
  SharedLayout layout;
  LaunchShape shape;
  PassScratch scratch;
};
struct ForwardPlan : Plan<ForwardScratch> {};
struct BackwardPlan : Plan<BackwardScratch> {};

/// Each makes the plan, or has done nothing of use where it refuses.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

}  // namespace selective_scan::cuda::general
