// The relay kernels as their launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "layout.h"

namespace selective_scan::cuda::relay {

struct RelayForwardArgs {
  ForwardParams params;
  RelayGeometry geometry;
  const char* projections = nullptr;  // see PackedBC
  int64_t sequence_bytes = 0;         // of one (batch, group) of these
  bool is_dependent = false;          // launched behind the kernel that writes them
};

/// Of arrays of one type of kSize bytes, 2 or 4, that are contiguous along steps and aligned so
/// that a lane moves its items at once; vectors exist as a whole.
template <int kSize>
struct RelayForward {
  static cudaError_t launch(const RelayForwardArgs& args, const LaunchShape& shape,
                            cudaStream_t stream);
};

struct ForwardPlan;  // plan.h

/// Enqueues a pass. `memory` is the scratch memory that the plan asks for.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream);

}  // namespace selective_scan::cuda::relay
