// The interface of the prompt kernels to their launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"
#include "../kit/launch_shape.h"
#include "layout.h"

namespace selective_scan::cuda::prompt {

/// The kernels' arguments, small enough to be read at once; strides in bytes.
struct PromptArgs {
  struct Rows {  // (batch, channel, step)
    char* data;
    int64_t batch;
    int row;  // channel stride, or step stride for arrays along channels
  };
  struct Projection {  // (batch, group, state, step)
    const char* data;
    int64_t batch;
    int group;
    int row;  // state stride, or step stride for arrays along states
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

/// The launch of one instantiation; kStates as in Shape. kFourSteps and kElements have kernels for
/// kStates = 1 only, and kFourSteps for 2-byte types only.
template <class Element, int kStates, Along kAlong>
struct PromptForward {
  static cudaError_t launch(const PromptArgs& args, const LaunchShape& shape, cudaStream_t stream);
};

struct ForwardPlan;  // plan.h

/// Enqueues the pass. It takes no scratch memory.
cudaError_t run(const ForwardParams& params, const ForwardPlan& plan, void* memory,
                cudaStream_t stream);

}  // namespace selective_scan::cuda::prompt
