// Shuffles of numbers within groups of lanes, an aligned power of two of a warp's lanes.
#pragma once

#include <cuda_runtime.h>

#include "../../core/complex.h"
#include "config.h"

namespace selective_scan::cuda {

/// The lanes of the calling lane's group.
template <int kLanes>
__device__ unsigned lanes_mask() {
  if constexpr (kLanes == kWarpSize) {
    return kFullMask;
  } else {
    const unsigned first = threadIdx.x % kWarpSize / kLanes * kLanes;
    return ((1u << kLanes) - 1) << first;
  }
}

// `mask` are the lanes that take part at the same time: the group, or all of whose it is a part.

template <int kLanes, class R>
__device__ R shuffle_xor(R value, int lane_mask, unsigned mask = lanes_mask<kLanes>()) {
  return __shfl_xor_sync(mask, value, lane_mask, kLanes);
}
template <int kLanes, class R>
__device__ Complex<R> shuffle_xor(Complex<R> value, int lane_mask,
                                  unsigned mask = lanes_mask<kLanes>()) {
  return {shuffle_xor<kLanes>(value.re, lane_mask, mask),
          shuffle_xor<kLanes>(value.im, lane_mask, mask)};
}

/// From the lane `distance` below; a lane that has none keeps its own.
template <int kLanes, class R>
__device__ R shuffle_up(R value, int distance, unsigned mask = lanes_mask<kLanes>()) {
  return __shfl_up_sync(mask, value, distance, kLanes);
}
template <int kLanes, class R>
__device__ Complex<R> shuffle_up(Complex<R> value, int distance,
                                 unsigned mask = lanes_mask<kLanes>()) {
  return {shuffle_up<kLanes>(value.re, distance, mask),
          shuffle_up<kLanes>(value.im, distance, mask)};
}

/// From the lane `distance` above; a lane that has none keeps its own.
template <int kLanes, class R>
__device__ R shuffle_down(R value, int distance, unsigned mask = lanes_mask<kLanes>()) {
  return __shfl_down_sync(mask, value, distance, kLanes);
}
template <int kLanes, class R>
__device__ Complex<R> shuffle_down(Complex<R> value, int distance,
                                   unsigned mask = lanes_mask<kLanes>()) {
  return {shuffle_down<kLanes>(value.re, distance, mask),
          shuffle_down<kLanes>(value.im, distance, mask)};
}

/// From lane `lane` of the group.
template <int kLanes, class R>
__device__ R shuffle(R value, int lane, unsigned mask = lanes_mask<kLanes>()) {
  return __shfl_sync(mask, value, lane, kLanes);
}
template <int kLanes, class R>
__device__ Complex<R> shuffle(Complex<R> value, int lane, unsigned mask = lanes_mask<kLanes>()) {
  return {shuffle<kLanes>(value.re, lane, mask), shuffle<kLanes>(value.im, lane, mask)};
}

}  // namespace selective_scan::cuda
