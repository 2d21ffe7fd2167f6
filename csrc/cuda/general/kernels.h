// The kernels as the launcher sees them: one table entry per scalar type, states per lane, method.
#pragma once

#include <cuda_runtime_api.h>

#include "../kit/gradient_sums.h"
#include "../plan/path_plans.h"
#include "copy_plans.h"

namespace selective_scan::cuda::general {

/// All steps at once; or, of a sequence in segments, the summaries of these, or their steps.
enum class Mode : int8_t { kWhole, kSummarize, kResume };

struct ForwardArgs {
  ForwardParams params;
  Geometry geometry;
  SharedLayout layout;
  InputPlans plans;
  RowPlan out;
  Mode mode;
  SegmentStates segments;
};

struct BackwardArgs {
  BackwardParams params;
  Geometry geometry;
  SharedLayout layout;
  InputPlans plans;
  RowPlan dout;
  RowPlan du;
  RowPlan ddelta;
  RowPlan dz;
  Mode mode;
  BackwardWorkspace workspace;
};

/// The launches of one instantiation.
template <class T, int kStates, Method kMethod>
struct Scan {
  static cudaError_t forward(const ForwardArgs& args, const LaunchShape& shape,
                             cudaStream_t stream);
  static cudaError_t backward(const BackwardArgs& args, const LaunchShape& shape,
                              cudaStream_t stream);
};

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const GeneralForwardPlan& plan, void* memory,
                cudaStream_t stream);
cudaError_t run(const BackwardParams& params, const GeneralBackwardPlan& plan, void* memory,
                cudaStream_t stream);

}  // namespace selective_scan::cuda::general
