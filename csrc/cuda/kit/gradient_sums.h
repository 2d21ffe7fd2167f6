// What the backward kernels leave behind, and its sums.
#pragma once

#include "segments.h"

namespace selective_scan::cuda {

/// Scratch memory of the backward pass, all of the compute type; null where not needed.
struct BackwardWorkspace {
  void* dBC_partials = nullptr;  // dB, dC: (slice, tile of a round, batch, group, step, B|C, state)
  int slices = 1;                // of the padded states
  // Sums over the steps of a segment: (segment, batch, channel, padded state)
  void* dA = nullptr;
  void* dB = nullptr;  // of a constant B
  void* dC = nullptr;
  // Likewise (segment, batch, channel, part), real
  void* dD = nullptr;
  void* ddelta_bias = nullptr;
  int channel_parts = 1;
  SegmentStates segments;
};

/// Adds up the partial sums of the backward pass in a fixed order and stores the gradients.
template <class T>
cudaError_t reduce_gradients(const BackwardParams& params, const Geometry& geometry,
                             int padded_states, const BackwardWorkspace& workspace,
                             cudaStream_t stream);

}  // namespace selective_scan::cuda
