// The plans of the dstate 1 path, one real state in fp32: what launch.cu turns into launches.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "../plan/device.h"
#include "../plan/refusal.h"
#include "../plan/scratch.h"

namespace selective_scan::cuda::dstate1 {

/// How rows are moved: see the storages of kernels.h.
enum class Rows { kVectors, kHalfVectors, kDense, kScattered };

struct ForwardPlan {
  Rows rows;
  int window_channels;
  int window_warps;  // that share channels
  int windows;       // of a group's channels
  int work_items;    // batch · groups · windows
  LaunchShape shape;
  ForwardScratch scratch;
};

struct BackwardPlan {
  Rows rows;
  int window_channels;
  int window_warps;  // that share channels
  int warps;         // of a block
  int tiles;         // of a group's channels
  int work_items;    // batch · groups · tiles
  LaunchShape shape;
  BackwardScratch scratch;
};

/// Each makes the plan, or has done nothing of use where it refuses.
Refusal make_plan(const ForwardParams& params, const Device& device, ForwardPlan& plan);
Refusal make_plan(const BackwardParams& params, const Device& device, BackwardPlan& plan);

}  // namespace selective_scan::cuda::dstate1
