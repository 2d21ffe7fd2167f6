// The kernels as the launcher sees them: one table entry per scalar type, states per lane, method.
#pragma once

#include <cuda_runtime_api.h>

#include "geometry.cuh"

namespace selective_scan::cuda {

/// Scratch memory of the backward pass, all of the compute type; null where not needed.
struct BackwardWorkspace {
  void* projections = nullptr;  // dB, dC: (tile, batch, group, step, B|C, padded state)
  void* dA = nullptr;           // (batch, channel, padded state)
  void* dB = nullptr;           // of a constant B, likewise
  void* dC = nullptr;
  void* dD = nullptr;           // (batch, channel), real
  void* ddelta_bias = nullptr;  // likewise
};

/// A launch of one instantiation. Everything is ready: geometry chosen, workspace laid out.
template <class T, int kStates, Method kMethod>
struct Scan {
  static cudaError_t forward(const ForwardParams& params, const Geometry& geometry,
                             cudaStream_t stream);
  static cudaError_t backward(const BackwardParams& params, const Geometry& geometry,
                              const BackwardWorkspace& workspace, cudaStream_t stream);
};

/// Adds up the partial sums of the backward pass in a fixed order and stores the gradients.
template <class T>
cudaError_t reduce_gradients(const BackwardParams& params, const Geometry& geometry,
                             int padded_states, const BackwardWorkspace& workspace,
                             cudaStream_t stream);


}  // namespace selective_scan::cuda
