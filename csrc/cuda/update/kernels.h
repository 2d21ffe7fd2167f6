// The kernels of the state update as the launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan/update.h"

namespace selective_scan::cuda::update {

/// The kernel for states of type T, kStates of them in 16 bytes and kPacks times as many in a lane.
template <class T, int kStates, int kPacks, Method kMethod>
struct Update {
  static cudaError_t launch(const UpdateParams& params, const UpdatePlan& plan,
                            cudaStream_t stream);
};

/// The kernel of calls for which UpdatePlan::is_plain, by the types of their states and inputs.
template <class State, class Input, Method kMethod>
struct PlainUpdate {
  static cudaError_t launch(const UpdateParams& params, const UpdatePlan& plan,
                            cudaStream_t stream);
};

}  // namespace selective_scan::cuda::update
