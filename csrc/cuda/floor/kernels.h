// The interface of the floor's kernels to their launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/state_exchange.h"
#include "../kit/launch_shape.h"
#include "../sums/gradient_sums.h"
#include "layout.h"

namespace selective_scan::cuda::floor {

/// The arguments of both passes besides their parameters.
struct Launch {
  Geometry geometry;
  SharedLayout layout;
  BackwardWorkspace workspace;  // in the forward pass, only its segments
  bool is_summary = false;      // computes only segments' maps, for Summaries::combine()
};

template <class Params>
struct Args : Launch {
  Params params;
};

/// The launches for states of type T, by any method.
template <class T>
struct Scan {
  static cudaError_t launch(const Args<ForwardParams>&, const LaunchShape&, cudaStream_t);
  static cudaError_t launch(const Args<BackwardParams>&, const LaunchShape&, cudaStream_t);
};

struct ForwardPlan;  // plan.h
struct BackwardPlan;

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange);
cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream, const StateExchange* exchange);

}  // namespace selective_scan::cuda::floor
