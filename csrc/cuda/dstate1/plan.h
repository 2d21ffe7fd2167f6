// The plans of the dstate 1 path, which serves one real state in fp32 and, backward, up to 16
// states of few short rows. launch.cu turns a plan into launches.
#pragma once

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"

namespace selective_scan::cuda::dstate1 {

/// The way in which rows are moved: see the storages in kernels.h.
enum class Rows { kVectors, kHalfVectors, kDense, kScattered };

template <class Scratch>
struct Plan {
  Rows rows;
  int window_channels;
  int window_warps;  // warps that share channels: their steps, or their states if these are several
  int work_items;    // batch · groups · windows or, in the backward pass, tiles
  LaunchShape shape;
  Scratch scratch;
};
struct ForwardPlan : Plan<ForwardScratch> {
  int windows;  // per group
};
struct BackwardPlan : Plan<BackwardScratch> {
  int warps;              // per block
  int tiles;              // per group
  int padded_states = 1;  // of partial sums
};

/// Makes the plan. If it returns a refusal, `plan` holds nothing of use.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

}  // namespace selective_scan::cuda::dstate1
