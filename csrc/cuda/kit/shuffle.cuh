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

template <int kLanes, class R>
__device__ R shuffle_xor(R value, int mask) {
  return __shfl_xor_sync(lanes_mask<kLanes>(), value, mask, kLanes);
}
template <int kLanes, class R>
__device__ Complex<R> shuffle_xor(Complex<R> value, int mask) {
  return {shuffle_xor<kLanes>(value.re, mask), shuffle_xor<kLanes>(value.im, mask)};
}

/// From the lane `distance` below; a lane that has none keeps its own.
template <int kLanes, class R>
__device__ R shuffle_up(R value, int distance) {
  return __shfl_up_sync(lanes_mask<kLanes>(), value, distance, kLanes);
}
template <int kLanes, class R>
__device__ Complex<R> shuffle_up(Complex<R> value, int distance) {
  return {shuffle_up<kLanes>(value.re, distance), shuffle_up<kLanes>(value.im, distance)};
}

/// From lane `lane` of the group.
template <int kLanes, class R>
__device__ R shuffle(R value, int lane) {
  return __shfl_sync(lanes_mask<kLanes>(), value, lane, kLanes);
}
template <int kLanes, class R>
__device__ Complex<R> shuffle(Complex<R> value, int lane) {
  return {shuffle<kLanes>(value.re, lane), shuffle<kLanes>(value.im, lane)};
}

}  // namespace selective_scan::cuda
