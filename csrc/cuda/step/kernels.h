// The arguments of the kernel for a token's step.
#pragma once

#include "plan.h"

namespace selective_scan::cuda::step {

struct StepArgs {
  StepParams params;  // whose `layer` points to host memory
  StepPlan plan;
  void* workspace;
  StepLayer layers[kMostLayers];
};

}  // namespace selective_scan::cuda::step
