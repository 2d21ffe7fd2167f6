// The relay kernels as their launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../kit/launch_shape.h"
#include "../sums/gradient_sums.h"
#include "layout.h"

namespace selective_scan::cuda::relay {

/// How arrays with steps are stored. Either all of them are vectors: of one type of 2 or 4 bytes,
/// contiguous along steps and aligned so that a lane moves its items, or 16 bytes of a row of B or
/// C, at once; vectors exist as a whole. Or they are taken element by element, of any type and
/// layout.
template <int kSize>
struct Vectors;
struct Scattered;

struct RelayForwardArgs {
  ForwardParams params;
  RelayGeometry geometry;
  const char* projections = nullptr;  // see PackedBC
  int64_t sequence_bytes = 0;         // of one (batch, group) of these
  bool is_dependent = false;          // launched behind the kernel that writes them
};

struct RelayBackwardArgs {
  BackwardParams params;
  RelayGeometry geometry;
  BackwardWorkspace workspace;  // partial sums: projections of every tile, the rest of every batch
};

/// kStates per lane and kSteps per chunk: see Shape.
template <int kStates, int kSteps, class Storage>
struct RelayForward {
  static cudaError_t launch(const RelayForwardArgs& args, const LaunchShape& shape,
                            cudaStream_t stream);
};

/// One state per lane, chunks of kChunk steps.
template <class Storage>
struct RelayBackward {
  static cudaError_t launch(const RelayBackwardArgs& args, const LaunchShape& shape,
                            cudaStream_t stream);
};

struct ForwardPlan;  // plan.h
struct BackwardPlan;

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream);
cudaError_t run(const BackwardParams& params, const BackwardPlan& plan, void* memory,
                cudaStream_t stream);

}  // namespace selective_scan::cuda::relay
