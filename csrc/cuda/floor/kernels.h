// The kernels as the launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/state_exchange.h"
#include "../kit/launch_shape.h"
#include "../sums/gradient_sums.h"
#include "layout.h"

namespace selective_scan::cuda::floor {

/// What both passes are given beside their parameters.
struct Launch {
  Geometry geometry;
  SharedLayout layout;
  BackwardWorkspace workspace;  // forwards of segments alone
  bool is_summary = false;      // of each segment, that Summaries::combine() takes
};

template <class Params>
struct Args : Launch {
  Params params;
};

/// The launches for states of type T, by any method.
template <class T>
struct Scan {
  static cudaError_t launch(const Args<ForwardParams>& args, const LaunchShape& shape,
                            cudaStream_t stream);
  static cudaError_t launch(const Args<BackwardParams>& args, const LaunchShape& shape,
                            cudaStream_t stream);
};

struct ForwardPlan;  // plan.h
struct BackwardPlan;

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange);
cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange);

}  // namespace selective_scan::cuda::floor
