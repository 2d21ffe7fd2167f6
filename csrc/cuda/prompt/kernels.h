// The prompt kernels as their launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "layout.h"

namespace selective_scan::cuda::prompt {

/// What the kernels take: little enough to be read at once, with distances in bytes.
struct PromptArgs {
  struct Rows {  // (batch, channel, step)
    char* data;
    int64_t batch;
    int row;  // from a channel to the next, of arrays along channels from a step
  };
  struct Projection {  // (batch, group, state, step)
    const char* data;
    int64_t batch;
    int group;
    int row;  // from a state to the next, of arrays along channels from a step
  };
  Rows u, delta, z, out;
  Projection B, C;
  ArrayView A, D, delta_bias, initial_state, last_state;
  float* states;
  int dstate;
  int seqlen;
  int dim;
  int group_channels;
  int scanners;  // warps of a block that scan
  bool has_output;
  bool delta_softplus;
};

/// kStates: see Shape. Single elements are moved with one state a lane alone.
template <class Element, int kStates, Along kAlong>
struct PromptForward {
  static cudaError_t launch(const PromptArgs& args, const LaunchShape& shape, cudaStream_t stream);
};

struct ForwardPlan;  // plan.h

/// Enqueues the pass. It takes no scratch memory.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream);

}  // namespace selective_scan::cuda::prompt
