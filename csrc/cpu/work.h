// How a pass is divided into tasks. Nothing here depends on the instruction set.
#pragma once

#include <cstdint>

#include "../core/config.h"

namespace selective_scan::cpu {

// These are always inlined, which std::min and std::max need not be: see SELECTIVE_SCAN_HD.
SELECTIVE_SCAN_HD int64_t lesser_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
SELECTIVE_SCAN_HD int64_t greater_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/// Bytes of a number of the compute type; a complex one has two parts.
template <class Params>
SELECTIVE_SCAN_HD int64_t number_bytes(const Params& params) {
  return (params.is_double ? 8 : 4) * (params.is_complex ? 2 : 1);
}

/// The sequences in segments of equal length, the last perhaps shorter; see selective/segments.h.
/// This has for each segment the affine map that it applies to a state, and the states between the
/// segments, as the kernels know them: of the compute type, complex interleaved.
struct Segmentation {
  int64_t steps = 0;  // of a segment, whole chunks; 0: sequences are not segmented
  int64_t count = 0;
  int64_t lanes = 1;           // segments that a vector walks at a time; 1: lanes are channels
  void* factors = nullptr;     // (batch, channel, segment, state)
  void* boundaries = nullptr;  // (batch, channel, segment and one more, state)

  SELECTIVE_SCAN_HD bool present() const { return steps > 0; }
  SELECTIVE_SCAN_HD bool lanes_are_segments() const { return lanes > 1; }
  /// How many parts there are of a channel's steps, each a block's.
  SELECTIVE_SCAN_HD int64_t parts() const { return present() ? ceil_div(count, lanes) : 1; }
};

/// What a kernel scans at a time: channels of one group of one batch entry, through some of the
/// steps. The state before these is the initial state or, but for the first segment, a boundary.
struct Block {
  int64_t batch = 0;
  int64_t group = 0;
  int64_t index = 0;  // among the blocks of its group
  int64_t first_channel = 0;
  int64_t channels = 0;
  int64_t lane_channels = 1;  // between the channels of two lanes; of a group, if lanes are groups
  bool lanes_are_groups = false;
  int64_t first_step = 0;  // of the first lane
  int64_t steps = 0;       // of a lane
  int64_t part = 0;        // of the sequence
  Segmentation segmentation;
  bool finds_map = false;  // where lanes are channels: the segment's affine map is wanted, too

  SELECTIVE_SCAN_HD int64_t segment() const { return part * segmentation.lanes; }
  SELECTIVE_SCAN_HD bool is_first() const { return part == 0; }
  SELECTIVE_SCAN_HD bool is_last() const { return part == segmentation.parts() - 1; }
};

/// Divides every group into equal blocks of channels, and these into parts of the sequence. Groups
/// that are lanes are taken together, as many as a vector has lanes.
struct Partition {
  int64_t batch = 0;
  int64_t dim = 0;
  int64_t groups = 0;  // or how many vectors of groups there are
  int64_t lane_groups = 1;
  int64_t group_channels = 0;  // of lane_groups groups
  int64_t block_channels = 0;
  int64_t blocks_per_group = 0;
  int64_t seqlen = 0;
  Segmentation segmentation;

  /// Blocks of channels.
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

/// Hands out parts of a buffer, each aligned for any vector; over a null base it only measures.
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
