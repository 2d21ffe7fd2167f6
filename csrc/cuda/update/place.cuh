// The positions of the state update's threads.
#pragma once

#include "../kit/states.cuh"
#include "fetch.cuh"
#include "kernels.h"

namespace selective_scan::cuda::update {

/// The position of a lane.
struct Place {
  int64_t head;
  int64_t channel;
  int64_t group;
  int part;     // among the lanes that share the channel
  bool exists;  // false for surplus channels of the last block

  __device__ __forceinline__ Place(const UpdateParams& params, const UpdatePlan& plan) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t index =
        int64_t{blockIdx.x} * (kUpdateThreads >> plan.lane_bits) + (thread >> plan.lane_bits);
    part = thread & ((1 << plan.lane_bits) - 1);
    exists = index < params.heads * params.dim;
    head = params.heads == 1 || !exists ? 0 : index / params.dim;
    channel = exists ? index - head * params.dim : 0;
    group = params.groups == 1 ? 0 : params.group_of(head);
  }

  /// Returns the lane's offset in an array of channels, at row and step 0.
  __device__ __forceinline__ int64_t offset(const ArrayView& view) const {
    return head * view.group + channel * view.channel;
  }
};

}  // namespace selective_scan::cuda::update
