// Who computes what on the relay path, and what lies where in shared memory.
//
// The path is for problems of few channels, whose warps could not fill the device if each walked
// through time alone. A block owns the few channels that one warp can hold, and its warps divide
// time in chunks. What a chunk does to the state that enters it, x → factor·x + offset, a warp
// learns on its own. Warps take turns, warp w with chunks w, w + W, w + 2W and so on, of W warps:
// it waits for that state, hands the next warp the state that leaves, and only then computes y. So
// one hand-over through shared memory is all that is serial.
#pragma once

#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "kernels.h"
#include "layout.h"

namespace selective_scan::cuda::relay {

/// This says where a thread stands.
struct Place {
  int lane;
  int warp;
  LaneRole role;
  int64_t batch;
  int64_t group;
  int64_t tile;
  int64_t first_channel;
  int channels;  // of the tile that exist

  /// The grid is one of tiles, groups and batches.
  __device__ __forceinline__ explicit Place(const RelayGeometry& geometry)
      : lane(threadIdx.x % kWarpSize),
        warp(threadIdx.x / kWarpSize),
        role(lane_role(lane, kLaneBits)),
        batch(blockIdx.z),
        group(blockIdx.y),
        tile(blockIdx.x) {
    first_channel = group * geometry.group_channels + tile * kChannels;
    const int64_t left = geometry.group_channels - tile * kChannels;
    channels = static_cast<int>(left < kChannels ? left : kChannels);
  }

  /// The channel whose states the lane holds.
  __device__ bool exists() const { return role.channel < channels; }
  __device__ int64_t channel() const { return first_channel + role.channel; }
  __device__ int first_state() const { return role.part * kStates; }
  /// Returns where its states lie in a (batch, channel, state) array.
  __device__ int64_t state_base(const ArrayView& view) const {
    return batch * view.batch + channel() * view.channel;
  }

  /// The channel and the first step of the items it moves.
  __device__ int item_channel() const { return lane / kLanes; }
  __device__ int item_step() const { return lane % kLanes * kItems; }
  __device__ bool item_exists() const { return item_channel() < channels; }
  __device__ int64_t item_channel_index() const { return first_channel + item_channel(); }
  /// Entry of a (channel) array, zero where absent.
  __device__ float item_component(const ArrayView& view) const {
    return item_exists() ? load_component<float>(view, item_channel_index() * view.channel) : 0.0f;
  }
};

/// The lane's states of B and C in shared memory.
struct TileReader {
  const float* tile;

  __device__ __forceinline__ TileReader(const float* tile, int part)
      : tile(tile + part * kStates) {}

  /// kBlockSteps steps of B (or C) from `step` on.
  template <bool kIsC>
  __device__ __forceinline__ void load(int step, float (&values)[kBlockSteps][kStates]) const {
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
      const auto pack = load_pack<float, kStates>(tile + ((step + j) * 2 + kIsC) * kPaddedStates);
#pragma unroll
      for (int s = 0; s < kStates; ++s) values[j][s] = pack.v[s];
    }
  }
};

}  // namespace selective_scan::cuda::relay
