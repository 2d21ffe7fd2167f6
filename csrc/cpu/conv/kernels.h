// What the kernels of the causal convolution are called by.
#pragma once

#include <cstdint>

#include "../../core/conv_params.h"

namespace selective_scan::cpu {

/// How a pass is divided: into blocks of channels and, along time, into segments, which tasks walk
/// a tile at a time. It depends on the shape and the layout alone.
struct ConvSplit {
  int64_t block_channels = 0;
  int64_t tile_steps = 0;
  int64_t blocks = 0;
  int64_t segments = 0;
  int64_t segment_steps = 0;
};

struct ConvTask {
  int64_t batch = 0;
  int64_t segment = 0;
  int64_t block = 0;
};

/// The kernels of one compute type. `parts` receives the task's sums for dweight's taps and, behind
/// them, for dbias: (batch, segment, tap, channel), contiguous, of the compute type.
struct ConvKernels {
  int64_t vector_channels;
  int64_t max_block_channels;
  int64_t tile_elements;
  void (*forward)(const ConvForwardParams& params, const ConvSplit& split, const ConvTask& task);
  void (*backward)(const ConvBackwardParams& params, const ConvSplit& split, const ConvTask& task,
                   void* parts);
  /// Writes one sequence's final states, or what it leaves of dfinal_states if it has no steps.
  void (*end_forward)(const ConvForwardParams& params, const ConvSplit& split, int64_t sequence,
                      int64_t block);
  void (*end_backward)(const ConvBackwardParams& params, const ConvSplit& split, int64_t sequence,
                       int64_t block);
  void (*update)(const ConvUpdateParams& params, const ConvSplit& split, int64_t row,
                 int64_t block);
};

}  // namespace selective_scan::cpu
