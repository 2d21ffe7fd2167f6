// Shuffles of numbers within the lanes of a team, an aligned power of two of a warp's lanes.
#pragma once

#include <cuda_runtime.h>

#include "../core/complex.h"
#include "config.cuh"

namespace selective_scan::cuda {

/// The lanes of the calling lane's team.
template <int kTeam>
__device__ unsigned team_mask() {
  if constexpr (kTeam == kWarpSize) {
    return kFullMask;
  } else {
    const unsigned first = threadIdx.x % kWarpSize / kTeam * kTeam;
    return ((1u << kTeam) - 1) << first;
  }
}

template <int kTeam, class R>
__device__ R shuffle_xor(R value, int mask) {
  return __shfl_xor_sync(team_mask<kTeam>(), value, mask, kTeam);
}
template <int kTeam, class R>
__device__ Complex<R> shuffle_xor(Complex<R> value, int mask) {
  return {shuffle_xor<kTeam>(value.re, mask), shuffle_xor<kTeam>(value.im, mask)};
}

/// From the lane `distance` below; a lane that has none keeps its own.
template <int kTeam, class R>
__device__ R shuffle_up(R value, int distance) {
  return __shfl_up_sync(team_mask<kTeam>(), value, distance, kTeam);
}
template <int kTeam, class R>
__device__ Complex<R> shuffle_up(Complex<R> value, int distance) {
  return {shuffle_up<kTeam>(value.re, distance), shuffle_up<kTeam>(value.im, distance)};
}

/// From lane `lane` of the team.
template <int kTeam, class R>
__device__ R shuffle(R value, int lane) {
  return __shfl_sync(team_mask<kTeam>(), value, lane, kTeam);
}
template <int kTeam, class R>
__device__ Complex<R> shuffle(Complex<R> value, int lane) {
  return {shuffle<kTeam>(value.re, lane), shuffle<kTeam>(value.im, lane)};
}

}  // namespace selective_scan::cuda
