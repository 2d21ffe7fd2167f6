// The partial gradients that the backward kernels leave, and their sums.
#pragma once

#include "../kit/packed_chunks.cuh"
#include "../kit/segments.h"

namespace selective_scan::cuda {

/// The scratch memory of the backward pass, all of the compute type; null if not needed.
/// GradientParts has the sizes.
struct BackwardWorkspace {
  void* dBC_partials = nullptr;  // (slice, tile, batch, group, step, B | C, state)
  // Sums over the steps of a segment: (segment, batch, channel, padded state).
  void* dA = nullptr;
  void* dB = nullptr;  // of a constant B
  void* dC = nullptr;
  // Also sums over the steps of a segment, but real: (segment, batch, channel, part).
  void* dD = nullptr;
  void* ddelta_bias = nullptr;
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

/// The numbers of partial sums.
struct GradientParts {
  int64_t tiles = 1;             // of dB and dC per group; tiles that share a sum count once
  int64_t rows = 1;              // of all other gradients: segments · batch
  int padded_states = 1;         // of a channel
  int slices = 1;                // of the padded states, each with its own dB and dC
  int channel_parts = 1;         // of dD and ddelta_bias per channel
  PackedChunks chunks{nullptr};  // present if the steps are those of packed sequences in chunks
};

/// Sums the workspace's partial gradients and stores the results, in one launch.
cudaError_t add_gradients(const BackwardParams& params, const BackwardWorkspace& workspace,
                          const GradientParts& parts, cudaStream_t stream);

}  // namespace selective_scan::cuda
