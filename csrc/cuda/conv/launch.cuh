// The choice of an instantiation, which the launchers of the causal convolution share.
#pragma once

#include <type_traits>

#include "../kit/launch_tools.h"
#include "../launch.h"
#include "columns.cuh"
#include "rows.cuh"
#include "states.cuh"

namespace selective_scan::cuda::conv {

/// Calls visit with the number of taps that the kernels for this width have, as a constant.
template <class Visit>
cudaError_t with_taps(const ConvParams& params, const Visit& visit) {
  if (params.width == kCommonWidth) return visit(std::integral_constant<int, kCommonWidth>{});
  return visit(std::integral_constant<int, taps_of(kMaxConvWidth)>{});
}

/// Calls visit with a null pointer of the compute type.
template <class Visit>
cudaError_t with_real(const ConvParams& params, const Visit& visit) {
  return params.is_double ? visit(static_cast<double*>(nullptr))
                          : visit(static_cast<float*>(nullptr));
}

inline LaunchShape state_shape(const ConvParams& params) {
  return {ceil_div(params.sequences * params.dim, int64_t{kStateThreads}), kStateThreads};
}

}  // namespace selective_scan::cuda::conv
