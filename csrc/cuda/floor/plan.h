// The plans of the floor, which takes every call: what launch.cu turns into launches.
#pragma once

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"
#include "layout.h"

namespace selective_scan::cuda::floor {

template <class PassScratch>
struct Plan {
  Geometry geometry;  // with segments; of packed sequences these are what they are dealt out to
  SharedLayout layout;
  LaunchShape shape;
  PassScratch scratch;
};
struct ForwardPlan : Plan<ForwardScratch> {};
struct BackwardPlan : Plan<BackwardScratch> {};

/// Each makes the plan, or has done nothing of use where it refuses.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

}  // namespace selective_scan::cuda::floor
