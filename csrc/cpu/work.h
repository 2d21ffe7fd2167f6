// The division of a pass into tasks. Nothing here depends on the instruction set.
#pragma once

#include <cstdint>

#include "../core/config.h"

namespace selective_scan::cpu {

// Always inlined, which is not certain of std::min and std::max: see SELECTIVE_SCAN_HD.
SELECTIVE_SCAN_HD int64_t lesser_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
SELECTIVE_SCAN_HD int64_t greater_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/// Returns the bytes of a number of the compute type; a complex number has two components.
template <class Params>
SELECTIVE_SCAN_HD int64_t number_bytes(const Params& params) {
  return (params.is_double ? 8 : 4) * (params.is_complex ? 2 : 1);
}

/// The division of sequences into segments of equal length (the last may be shorter); see
/// selective/segments.h. Holds the affine map that each segment applies to a state, and the states
/// between the segments, in the kernels' format: of the compute type, complex interleaved.
struct Segmentation {
  int64_t steps = 0;  // of a segment, a multiple of the chunk; 0: sequences are not segmented
  int64_t count = 0;
  int64_t lanes = 1;           // segments that a vector walks at a time; 1: lanes are channels
  void* factors = nullptr;     // (batch, channel, segment, state)
  void* boundaries = nullptr;  // (batch, channel, count + 1, state)

  SELECTIVE_SCAN_HD bool present() const { return steps > 0; }
  SELECTIVE_SCAN_HD bool lanes_are_segments() const { return lanes > 1; }
  /// Returns the number of parts of a channel's steps, each of which is a block's.
  SELECTIVE_SCAN_HD int64_t parts() const { return present() ? ceil_div(count, lanes) : 1; }
};

/// The unit that a kernel scans: channels of one group of one batch entry, through some of the
/// steps. The state before these steps is the initial state for the first segment, else a boundary.
struct Block {
  int64_t batch = 0;
  int64_t group = 0;
  int64_t index = 0;  // among the blocks of its group
  int64_t first_channel = 0;
  int64_t channels = 0;
  int64_t lane_channels = 1;  // between the channels of two lanes; if lanes are groups, the
                              // channels of a group
  bool lanes_are_groups = false;
  int64_t first_step = 0;  // of the first lane
  int64_t steps = 0;       // of a lane
  int64_t part = 0;        // of the sequence
  Segmentation segmentation;
  bool finds_map = false;  // if lanes are channels: also compute the segment's affine map

  SELECTIVE_SCAN_HD int64_t segment() const { return part * segmentation.lanes; }
  SELECTIVE_SCAN_HD bool is_first() const { return part == 0; }
  SELECTIVE_SCAN_HD bool is_last() const { return part == segmentation.parts() - 1; }
};

/// Divides every group into equal blocks of channels, and these into parts of the sequence. If
/// lanes are groups, as many groups are taken together as a vector has lanes.
struct Partition {
  int64_t batch = 0;
  int64_t dim = 0;
  int64_t groups = 0;  // number of groups, or of vectors of groups
  int64_t lane_groups = 1;
  int64_t group_channels = 0;  // of lane_groups groups
  int64_t block_channels = 0;
  int64_t blocks_per_group = 0;
  int64_t seqlen = 0;
  Segmentation segmentation;

  /// Returns the number of blocks of channels.
  SELECTIVE_SCAN_HD int64_t chains() const { return batch * groups * blocks_per_group; }

  SELECTIVE_SCAN_HD Block block(int64_t chain, int64_t part) const {
    Block block;
    block.segmentation = segmentation;
    block.part = part;
    block.steps = seqlen;
    if (segmentation.present()) {
      block.first_step = block.segment() * segmentation.steps;
      block.steps = lesser_of(segmentation.steps, seqlen - block.first_step);
    }
    block.index = chain % blocks_per_group;
    block.group = chain / blocks_per_group % groups * lane_groups;
    block.batch = chain / blocks_per_group / groups;
    const int64_t group_channels_before = block.group / lane_groups * group_channels;
    const int64_t first = block.index * block_channels;
    block.first_channel = group_channels_before + first;
    const int64_t end = lesser_of(group_channels_before + group_channels, dim);
    block.channels = lesser_of(end - block.first_channel, block_channels);
    block.lanes_are_groups = lane_groups > 1;
    if (block.lanes_are_groups) block.lane_channels = group_channels / lane_groups;
    return block;
  }
};

/// Hands out parts of a buffer, each aligned for any vector. With a null base it only measures.
struct Arena {
  static constexpr int64_t kAlignment = 64;

  char* base = nullptr;
  int64_t bytes = 0;

  template <class T>
  SELECTIVE_SCAN_HD T* take(int64_t count) {
    T* part = base ? reinterpret_cast<T*>(base + bytes) : nullptr;
    bytes += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return part;
  }
};

}  // namespace selective_scan::cpu
