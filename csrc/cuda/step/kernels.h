// The kernel of a token's step as the launcher sees it.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace selective_scan::cuda::step {

struct StepArgs {
  StepParams params;  // whose `layer` is not the device's
  StepPlan plan;
  void* workspace;
  StepLayer layers[kMaxLayers];
};

}  // namespace selective_scan::cuda::step
