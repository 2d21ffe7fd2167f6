// The interface of the causal convolution's kernels.
#pragma once

#include <cstdint>

#include "../../core/conv_params.h"

namespace selective_scan::cpu {

/// The division of a pass into blocks of channels and segments of time. A task walks one segment of
/// one block a tile at a time. The division depends on the shape and the layout alone.
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

/// The kernels of one compute type. `parts` receives the task's sums for the taps of dweight, then
/// for dbias: (batch, segment, tap, channel), contiguous, of the compute type.
struct ConvKernels {
  int64_t vector_channels;
  int64_t max_block_channels;
  int64_t tile_elements;
  void (*forward)(const ConvForwardParams& params, const ConvSplit& split, const ConvTask& task);
  void (*backward)(const ConvBackwardParams& params, const ConvSplit& split, const ConvTask& task,
                   void* parts);
  /// end_forward writes a sequence's final states; end_backward passes dfinal_states of a sequence
  /// without steps on to dinitial_states.
  void (*end_forward)(const ConvForwardParams& params, const ConvSplit& split, int64_t sequence,
                      int64_t block);
  void (*end_backward)(const ConvBackwardParams& params, const ConvSplit& split, int64_t sequence,
                       int64_t block);
  void (*update)(const ConvUpdateParams& params, const ConvSplit& split, int64_t row,
                 int64_t block);
};

}  // namespace selective_scan::cpu
