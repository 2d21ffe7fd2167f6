// What the backward kernels leave behind, and its sums.
#pragma once

#include "../kit/packed_chunks.cuh"
#include "../kit/segments.h"

namespace selective_scan::cuda {

/// Scratch memory of the backward pass, all of the compute type; null where not needed. The sizes
/// are those of GradientParts.
struct BackwardWorkspace {
  void* dBC_partials = nullptr;  // dB, dC: (slice, tile, batch, group, step, B | C, state)
  // Sums over the steps of a segment: (segment, batch, channel, padded state)
  void* dA = nullptr;
  void* dB = nullptr;  // of a constant B
  void* dC = nullptr;
  // These are (segment, batch, channel, part), too, and real.
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

/// How many partial sums there are.
struct GradientParts {
  int64_t tiles = 1;             // of dB and dC: of a group, or as many as share none
  int64_t rows = 1;              // of all else: segments · batch
  int padded_states = 1;         // of a channel
  int slices = 1;                // of these, each of which has dB and dC to itself
  int channel_parts = 1;         // of dD and ddelta_bias in a row
  PackedChunks chunks{nullptr};  // where the steps are those of packed sequences in chunks
};

/// Adds up what the workspace holds and stores the gradients: one launch.
cudaError_t add_gradients(const BackwardParams& params, const BackwardWorkspace& workspace,
                          const GradientParts& parts, cudaStream_t stream);

}  // namespace selective_scan::cuda
