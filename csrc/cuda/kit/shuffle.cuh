// Shuffles of numbers among the lanes of a warp.
#pragma once

#include <cuda_runtime.h>

#include "../../core/complex.h"
#include "config.h"

namespace selective_scan::cuda {

/// Applies f to a number, or to each part of a complex number.
template <class R, class F>
__device__ R for_each_part(R value, const F& f) {
  return f(value);
}
template <class R, class F>
__device__ Complex<R> for_each_part(Complex<R> value, const F& f) {
  return {f(value.re), f(value.im)};
}

/// Shuffles within kLanes lanes, an aligned power of two in a warp. Other lanes may have exited.
template <int kLanes, class T>
__device__ T shuffle_xor(T value, int lane_mask) {
  const unsigned lanes = kFullMask >> (kWarpSize - kLanes)
                                          << threadIdx.x % kWarpSize / kLanes * kLanes;
  return for_each_part(value, [&](auto x) { return __shfl_xor_sync(lanes, x, lane_mask, kLanes); });
}

/// Returns the sum of the values of kLanes lanes, with the same bits to all of them.
template <int kLanes = kWarpSize, class T>
__device__ T sum_over_lanes(T value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += shuffle_xor<kLanes>(value, distance);
  }
  return value;
}

/// Returns the value of the lane `distance` below; a lane that has none keeps its value.
template <class T>
__device__ T shuffle_up(T value, int distance) {
  return for_each_part(value, [&](auto x) { return __shfl_up_sync(kFullMask, x, distance); });
}

template <class T>
__device__ T shuffle(T value, int lane) {
  return for_each_part(value, [&](auto x) { return __shfl_sync(kFullMask, x, lane); });
}

/// Returns the warp's index in the block. The shuffle lets the compiler know that all lanes branch
/// alike on it.
__device__ __forceinline__ int warp_index() {
  return shuffle(static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

/// Two lanes of a warp that differ in lane bit `bit` share the sums of their 2·kKept values: the
/// lane without the bit keeps the first half.
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
