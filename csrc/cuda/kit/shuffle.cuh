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

/// What f makes of a number, or of each part of a complex one.
template <class R, class F>
__device__ R for_each_part(R value, const F& f) {
  return f(value);
}
template <class R, class F>
__device__ Complex<R> for_each_part(Complex<R> value, const F& f) {
  return {f(value.re), f(value.im)};
}

template <int kLanes, class T>
__device__ T shuffle_xor(T value, int lane_mask) {
  const unsigned lanes = lanes_mask<kLanes>();
  return for_each_part(value, [&](auto x) { return __shfl_xor_sync(lanes, x, lane_mask, kLanes); });
}

/// Gives the value of the lane `distance` below; a lane that has none keeps its own.
template <int kLanes, class T>
__device__ T shuffle_up(T value, int distance) {
  const unsigned lanes = lanes_mask<kLanes>();
  return for_each_part(value, [&](auto x) { return __shfl_up_sync(lanes, x, distance, kLanes); });
}

/// Gives the value of lane `lane` of the group.
template <int kLanes, class T>
__device__ T shuffle(T value, int lane) {
  const unsigned lanes = lanes_mask<kLanes>();
  return for_each_part(value, [&](auto x) { return __shfl_sync(lanes, x, lane, kLanes); });
}

/// Two lanes of a warp that differ in lane bit `bit` share the sums of their 2·kKept values: the
/// one without it keeps the first half.
template <int kKept, int kCount>
__device__ __forceinline__ void add_halves(float (&values)[kCount], int lane, int bit) {
  const bool keeps_second = lane & bit;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float kept = keeps_second ? values[i + kKept] : values[i];
    const float sent = keeps_second ? values[i] : values[i + kKept];
    values[i] = kept + __shfl_xor_sync(kFullMask, sent, bit);
  }
}

}  // namespace selective_scan::cuda
