// The dstate 1 kernels as their launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"
#include "../kit/config.h"

namespace selective_scan::cuda::dstate1 {

constexpr int kItems = 8;                                   // consecutive steps of a lane
constexpr int kChannelLanes = kChunk / kItems;              // lanes of a channel
constexpr int kWindowChannels = kWarpSize / kChannelLanes;  // channels of a warp at a time

// Warps of a block, and blocks of a multiprocessor that registers must suffice for.
constexpr int kForwardWarps = 4;
constexpr int kForwardBlocks = 4;
constexpr int kMaxBackwardWarps = 4;
constexpr int kBackwardBlocks = 3;

/// How the (batch, channel, step) arrays of a problem lie in memory; all have one element type and
/// the same strides of channels and steps.
template <class Element>
struct Vectors {  // kItems steps are side by side and aligned to 16 bytes; B and C are alike
  using Type = Element;
};
template <class Element>
struct Scattered {  // any strides
  using Type = Element;
};

/// A (batch, channel, step) array; strides in bytes.
struct Sequence {
  char* data = nullptr;  // null: absent
  int64_t batch = 0;

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

/// What these arrays share. Offsets within a tile of channels fit 32 bits.
struct SequenceStrides {
  int64_t channel = 0;
  int step = 0;
  bool channels_are_closer = false;  // in memory, than steps
};

struct ForwardArgs {
  ForwardParams params;
  SequenceStrides strides;
  Sequence u, delta, z, out;
  int64_t windows;     // of a group's channels
  int64_t work_items;  // batch · groups · windows
};

/// Scratch memory of the backward pass; null where not needed.
struct BackwardWorkspace {
  float* dBC_partials = nullptr;  // (tile, batch, group, step, dB|dC)
  // Sums over steps, (channel, batch)
  float* dA = nullptr;
  float* dD = nullptr;
  float* ddelta_bias = nullptr;
  float* dB = nullptr;  // of a constant B
  float* dC = nullptr;
};

struct BackwardArgs {
  BackwardParams params;
  SequenceStrides strides;
  Sequence u, delta, z, dout, du, ddelta, dz;
  int warps;           // of a block
  int slots;           // windows that a warp takes in turns; a tile has warps · slots
  int64_t tiles;       // of a group's channels
  int64_t work_items;  // batch · groups · tiles
  BackwardWorkspace workspace;

  SELECTIVE_SCAN_HD int tile_channels() const { return warps * slots * kWindowChannels; }
};

template <Method kMethod, class Storage>
struct Kernels {
  static cudaError_t forward(const ForwardArgs& args, cudaStream_t stream);
  static cudaError_t backward(const BackwardArgs& args, cudaStream_t stream);
};

}  // namespace selective_scan::cuda::dstate1
