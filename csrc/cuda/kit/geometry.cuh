// Computes the work of a block and of a lane from the launch's geometry.
#pragma once

#include "../../core/params.h"
#include "geometry.h"

namespace selective_scan::cuda {

/// The part of the problem that a block works on at a time.
struct WorkItem {
  int64_t batch;
  int64_t group;
  int64_t tile;
  int64_t sum_index;
  int64_t first_channel;
  int channels;
  int64_t segment;
  int64_t begin;  // first step
  int64_t end;    // end of the steps, exclusive
};

/// Returns work item `index`. `Count` can hold the number of a round's items: 32 bits if possible,
/// because 64-bit division is slow. If every item has its own block, there are fewer than 2^31.
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
  const int64_t left = geometry.group_channels - offset;  // 0 or less past the last tile
  item.first_channel = item.group * geometry.group_channels + offset;
  item.channels =
      static_cast<int>(left < geometry.tile_channels() ? left : geometry.tile_channels());
  item.begin = item.segment * geometry.segment_steps;
  item.end = item.begin + geometry.segment_steps;
  if (geometry.segments == 1 || item.end > params.seqlen) item.end = params.seqlen;
  return item;
}

/// The channel of its warp that a lane works on, and the part of that channel's states that it
/// holds.
///
/// Lanes with the same part read the same B and C. A broadcast of 16-byte words is fastest if
/// neighboring lanes (lane bit 0 or 1 flipped) share an address. So one of these two bits belongs
/// to the channel and one to the part, if possible.
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

/// Returns the mask by which lanes differ whose parts differ only in bit `bit`.
__device__ __forceinline__ int part_bit_mask(int bit, int lane_bits) {
  return 1 << (bit > 0 && (1 << lane_bits) < kWarpSize ? bit + 1 : bit);
}

}  // namespace selective_scan::cuda
