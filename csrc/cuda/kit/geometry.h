// The division of work: a launch's geometry, a block's work item, a lane's channel and states.
//
// Every (batch, channel) is an independent recurrence over dstate states. `lanes` lanes of a warp
// (a power of two) share a channel and hold kStates states each; if 32 lanes do not suffice,
// `state_warps` warps share it. `channel_warps` such warps form a block. It owns the tile of
// channels that they hold, all of one group, so that B and C are staged once for the whole tile.
#pragma once

#include "../../core/config.h"
#include "config.h"

namespace selective_scan::cuda {

struct Geometry {
  int lane_bits = 0;  // log2 of the lanes that share a channel
  int state_warps = 1;
  int channel_warps = 1;
  int64_t group_channels = 1;  // dim / groups
  int64_t tiles = 1;           // per group
  int64_t tiles_per_sum = 1;   // that blocks work on one after another
  int64_t sums_per_group = 1;  // partial sums of dB and dC
  int64_t segments = 1;        // of time, worked on independently
  int64_t segment_steps = 0;   // a multiple of kChunk if there are several segments
  int64_t work_items = 0;      // segments · batch · groups · sums_per_group

  SELECTIVE_SCAN_HD int lanes() const { return 1 << lane_bits; }
  SELECTIVE_SCAN_HD int warp_channels() const { return kWarpSize >> lane_bits; }
  SELECTIVE_SCAN_HD int tile_channels() const { return warp_channels() * channel_warps; }
  SELECTIVE_SCAN_HD int warps() const { return state_warps * channel_warps; }
  SELECTIVE_SCAN_HD int threads() const { return warps() * kWarpSize; }
  /// Sets the numbers of tiles. Call this when the shape of a block is final.
  SELECTIVE_SCAN_HD void set_tiles(int64_t new_tiles_per_sum = 1) {
    tiles = ceil_div(group_channels, tile_channels());
    tiles_per_sum = new_tiles_per_sum;
    sums_per_group = ceil_div(tiles, tiles_per_sum);
  }
  /// Returns the states of one channel that the lanes have room for; those from dstate on stay
  /// zero.
  SELECTIVE_SCAN_HD int padded_states(int states_per_lane) const {
    return state_warps * lanes() * states_per_lane;
  }
};

}  // namespace selective_scan::cuda
