// What the backward kernels leave behind, and its sums.
#pragma once

#include "packed_chunks.cuh"
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

inline BackwardWorkspace backward_workspace(const BackwardScratch& scratch, void* memory) {
  BackwardWorkspace workspace;
  workspace.dBC_partials = scratch.dBC_partials.in(memory);
  workspace.dA = scratch.dA.in(memory);
  workspace.dB = scratch.dB.in(memory);
  workspace.dC = scratch.dC.in(memory);
  workspace.dD = scratch.dD.in(memory);
  workspace.ddelta_bias = scratch.ddelta_bias.in(memory);
  workspace.segments = segment_states(scratch, memory);
  return workspace;
}

/// Adds up the partial sums of the backward pass in a fixed order and stores the gradients.
template <class T>
cudaError_t reduce_gradients(const BackwardParams& params, const Geometry& geometry,
                             int padded_states, const BackwardWorkspace& workspace,
                             cudaStream_t stream);

/// The same of real states in fp32 where packed sequences are scanned in chunks (in_chunks()).
cudaError_t reduce_packed_gradients(const BackwardParams& params, const PackedChunks& chunks,
                                    const Geometry& geometry, int padded_states,
                                    const BackwardWorkspace& workspace, cudaStream_t stream);

}  // namespace selective_scan::cuda
