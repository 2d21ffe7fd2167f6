// What the kernels of the selective scan are called by.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "../work.h"

namespace selective_scan::cpu {

/// Gradients that more than one task contributes to, as the tasks leave them: in the compute type
/// (complex interleaved), to be added up afterwards in a fixed order.
struct BackwardPartials {
  int64_t rows = 0;    // a row for every sequence and set of its segments
  void* dA = nullptr;  // (row, channel, state)
  void* dB = nullptr;  // constant B: (row, channel, state)
  void* dC = nullptr;
  void* dD = nullptr;  // (row, channel)
  void* ddelta_bias = nullptr;
  // Variable B and C of groups of several blocks: (batch, group, block, chunk, component, state,
  // kStateChunk). Null where a block is a whole group; it then writes the gradient itself.
  void* dB_blocks = nullptr;
  void* dC_blocks = nullptr;
  int64_t blocks_per_group = 1;
};

/// The kernels of one compute type, real or complex, for all methods.
struct Kernels {
  int64_t lanes;  // of a vector
  /// Each with the scratch memory that it needs for a block no larger than this one.
  int64_t (*forward_scratch_bytes)(const ForwardParams& params, const Block& block);
  void (*forward)(const ForwardParams& params, const Block& block, void* scratch);
  int64_t (*backward_scratch_bytes)(const BackwardParams& params, const Block& block);
  void (*backward)(const BackwardParams& params, const Block& block,
                   const BackwardPartials& partials, void* scratch);
  /// The affine maps of a block's segments, before a pass over segmented sequences.
  int64_t (*map_scratch_bytes)(const ScanParams& params, const Block& block);
  void (*forward_maps)(const ForwardParams& params, const Block& block, void* scratch);
  void (*backward_maps)(const BackwardParams& params, const Block& block, void* scratch);
  /// Finds the maps where nothing else is wanted, from the end that remembers the other one's
  /// states least: what is forgotten on the way is left out.
  void (*forward_maps_alone)(const ForwardParams& params, const Block& block, void* scratch);
  void (*backward_maps_alone)(const BackwardParams& params, const Block& block, void* scratch);
};

}  // namespace selective_scan::cpu
