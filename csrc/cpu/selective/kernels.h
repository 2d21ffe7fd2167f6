// The interface of the selective scan's kernels.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../work.h"

namespace selective_scan::cpu {

/// The tasks' contributions to gradients that several tasks share, in the compute type (complex
/// interleaved). They are added up afterwards in a fixed order.
struct BackwardPartials {
  int64_t rows = 0;    // one row per sequence and set of its segments
  void* dA = nullptr;  // (row, channel, state)
  void* dB = nullptr;  // constant B: (row, channel, state)
  void* dC = nullptr;
  void* dD = nullptr;  // (row, channel)
  void* ddelta_bias = nullptr;
  // Variable B and C, if a group has several blocks: (batch, group, block, chunk, component, state,
  // kStateChunk). Null if a block is a whole group, which then writes the gradient itself.
  void* dB_blocks = nullptr;
  void* dC_blocks = nullptr;
  int64_t blocks_per_group = 1;
};

/// The kernels of one compute type, real or complex, for all methods.
struct Kernels {
  int64_t lanes;  // of a vector
  /// Each kernel comes with a function for the scratch bytes that it needs for blocks no larger
  /// than `block`.
  int64_t (*forward_scratch_bytes)(const ForwardParams& params, const Block& block);
  void (*forward)(const ForwardParams& params, const Block& block, void* scratch);
  int64_t (*backward_scratch_bytes)(const BackwardParams& params, const Block& block);
  void (*backward)(const BackwardParams& params, const Block& block,
                   const BackwardPartials& partials, void* scratch);
  /// Compute the affine maps of a block's segments, before a pass over segmented sequences.
  int64_t (*map_scratch_bytes)(const ScanParams& params, const Block& block);
  void (*forward_maps)(const ForwardParams& params, const Block& block, void* scratch);
  void (*backward_maps)(const BackwardParams& params, const Block& block, void* scratch);
  /// Compute the maps when nothing else is wanted. Chunks are visited from the end of the scan
  /// backwards, and chunks that are forgotten by that end are left out.
  void (*forward_maps_alone)(const ForwardParams& params, const Block& block, void* scratch);
  void (*backward_maps_alone)(const BackwardParams& params, const Block& block, void* scratch);
};

}  // namespace selective_scan::cpu
