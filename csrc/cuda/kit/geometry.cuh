// Tells a block and a lane where they stand in a launch of that geometry.
#pragma once

#include "../../core/params.h"
#include "geometry.h"

namespace selective_scan::cuda {

/// The part of the problem that a block takes at a time.
struct WorkItem {
  int64_t batch;
  int64_t group;
  int64_t tile;
  int64_t sum_index;
  int64_t first_channel;
  int channels;
  int64_t segment;
  int64_t begin;  // first step
  int64_t end;    // behind the last step
};

/// `Count` counts a round's items; division takes long with 64 bits. Where every item has a block
/// of its own, there are no more than 31 bits count.
template <class Count = uint32_t>
__device__ __forceinline__ WorkItem work_item(const ScanParams& params, const Geometry& geometry,
                                              int64_t index) {
  WorkItem item;
  int64_t round = 0;
  if (geometry.tiles_per_sum > 1) {
    round = index / geometry.work_items;
    index -= round * geometry.work_items;
  }
  auto rest = static_cast<Count>(index);
  const auto take = [&](int64_t count) {
    const Count digit = rest % static_cast<Count>(count);
    rest /= static_cast<Count>(count);
    return static_cast<int64_t>(digit);
  };
  item.sum_index = take(geometry.sums_per_group);
  item.tile = item.sum_index + round * geometry.sums_per_group;
  item.group = take(params.groups);
  item.batch = take(params.batch);
  item.segment = rest;
  const int64_t offset = item.tile * geometry.tile_channels();
  const int64_t left = geometry.group_channels - offset;  // none for the last round's last blocks
  item.first_channel = item.group * geometry.group_channels + offset;
  item.channels =
      static_cast<int>(left < geometry.tile_channels() ? left : geometry.tile_channels());
  item.begin = item.segment * geometry.segment_steps;
  item.end = item.begin + geometry.segment_steps;
  if (geometry.segments == 1 || item.end > params.seqlen) item.end = params.seqlen;
  return item;
}

__device__ __forceinline__ WorkItem any_work_item(const ScanParams& params,
                                                  const Geometry& geometry, int64_t index) {
  return geometry.work_items >> 32 == 0 ? work_item(params, geometry, index)
                                        : work_item<uint64_t>(params, geometry, index);
}

/// Which of its warp's channels a lane works on, and which part of that channel's states it holds.
///
/// Lanes of one part read the same B and C. A broadcast of 16-byte words is fastest where
/// neighbours (lane bit 0 or 1 flipped) share an address, so each of these two bits belongs to
/// another coordinate where that is possible.
struct LaneRole {
  int channel;
  int part;
};

__device__ __forceinline__ LaneRole lane_role(int lane, int lane_bits) {
  const int last_part = (1 << lane_bits) - 1;
  if (lane_bits < 2 || (1 << lane_bits) == kWarpSize) return {lane >> lane_bits, lane & last_part};
  return {((lane >> 1) & 1) | ((lane >> (lane_bits + 1)) << 1),
          ((lane & 1) | ((lane >> 2) << 1)) & last_part};
}

/// The lanes that differ in bit `bit` of their part alone differ by this mask.
__device__ __forceinline__ int part_bit_mask(int bit, int lane_bits) {
  return 1 << (bit > 0 && (1 << lane_bits) < kWarpSize ? bit + 1 : bit);
}

}  // namespace selective_scan::cuda
