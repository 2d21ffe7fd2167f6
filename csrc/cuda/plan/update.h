// How the state update is divided among threads.
#pragma once

#include "../../core/update_params.h"
#include "../kit/launch_shape.h"

namespace selective_scan::cuda {

/// Lanes of a warp share a channel. Each lane handles 16 bytes of its states at a time, so that a
/// warp reads and writes whole cache lines. A block of a dense call works on channels of one batch
/// row; other blocks work on channels of a few rows, one after another.
struct UpdatePlan {
  /// True for arrays whose states a lane moves as one vector, not one by one.
  struct Vectors {
    bool state;
    bool A;
    bool B;
    bool C;
  };

  bool is_dense;    // dense.cuh runs it
  int lane_states;  // that a lane handles at a time: 16 bytes of them
  bool many_packs;  // a lane has more than one such pack
  int lane_bits;    // log2 of the lanes that share a channel
  int64_t tiles;    // blocks for all channels: the grid's first dimension
  int64_t rows;     // of the batch, per block, if the call is not dense
  Vectors vectors;
  LaunchShape shape;
};

constexpr int kUpdateThreads = 128;
constexpr int kDenseStates = 16;  // per channel in dense calls, as in Mamba

UpdatePlan plan_update(const UpdateParams& params);

}  // namespace selective_scan::cuda
