// How the state update is divided among threads.
#pragma once

#include "../../core/update_params.h"
#include "../kit/launch_shape.h"

namespace selective_scan::cuda {

/// Lanes of a warp share a channel, each with 16 bytes of its states at a time, so that a warp
/// reads and writes whole lines. A block of a dense call takes channels of one row of the batch,
/// others take them of a few rows, one behind the other.
struct UpdatePlan {
  /// Whether a lane's states are moved together, or one by one.
  struct Vectors {
    bool state;
    bool A;
    bool B;
    bool C;
  };

  bool is_dense;    // dense.cuh runs it
  int lane_states;  // of a lane at a time: those of 16 bytes
  bool many_packs;  // a lane has more than one such pack of states
  int lane_bits;    // log2 of the lanes that share a channel
  int64_t tiles;    // blocks that it takes for all channels: the grid's first dimension
  int64_t rows;     // of the batch that a block takes where the call is not dense
  Vectors vectors;
  LaunchShape shape;
};

constexpr int kUpdateThreads = 128;
constexpr int kDenseStates = 16;  // of a channel in dense calls, as Mamba has them

UpdatePlan plan_update(const UpdateParams& params);

}  // namespace selective_scan::cuda
