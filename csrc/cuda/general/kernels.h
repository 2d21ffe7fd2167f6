// The kernels as the launcher sees them: one table entry per scalar type, states per lane, method.
#pragma once

#include <cuda_runtime_api.h>

#include "../kit/gradient_sums.h"
#include "shared_layout.h"

namespace selective_scan::cuda {

/// A launch of one instantiation. Everything is ready: geometry chosen, workspace laid out.
template <class T, int kStates, int kLaneBits, Method kMethod>
struct Scan {
  static cudaError_t forward(const ForwardParams& params, const Geometry& geometry,
                             const SegmentStates& segments, cudaStream_t stream);
  static cudaError_t backward(const BackwardParams& params, const Geometry& geometry,
                              const BackwardWorkspace& workspace, cudaStream_t stream);
};

}  // namespace selective_scan::cuda
