// The plans of the floor, which takes every call. launch.cu turns a plan into launches.
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
  Geometry geometry;  // including segments, to which packed sequences are dealt out
  SharedLayout layout;
  LaunchShape shape;
  PassScratch scratch;
};
struct ForwardPlan : Plan<ForwardScratch> {};
struct BackwardPlan : Plan<BackwardScratch> {};

/// Makes the plan. If it returns a refusal, `plan` holds nothing of use.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

}  // namespace selective_scan::cuda::floor
