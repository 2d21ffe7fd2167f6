// The kernel of a token's step as the launcher sees it.
#pragma once

#include "plan.h"

namespace selective_scan::cuda::step {

struct StepArgs {
  StepParams params;  // whose `layer` is the host's
  StepPlan plan;
  void* workspace;
  StepLayer layers[kMostLayers];
};

}  // namespace selective_scan::cuda::step
