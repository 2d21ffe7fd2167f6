// The kernels of the state update as the launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan/update.h"

namespace selective_scan::cuda::update {

struct UpdateArgs {
  UpdateParams params;
  UpdatePlan plan;
};

/// The kernel for states of type T, kStates of them in 16 bytes and kPacks times as many in a lane.
template <class T, int kStates, int kPacks, Method kMethod>
struct Update {
  static cudaError_t launch(const UpdateArgs& args, cudaStream_t stream);
};

/// How the plain kernel finds its numbers, by the types of states and inputs: in any call for which
/// UpdatePlan::is_plain, and where is_dense is true.
template <class State, class Input>
class StridedAccess;
template <class State, class Input>
class DenseAccess;

template <class Access, Method kMethod>
struct PlainUpdate {
  static cudaError_t launch(const typename Access::Args& args, const LaunchShape& shape,
                            cudaStream_t stream);
};

}  // namespace selective_scan::cuda::update
