// How a pass is divided into tasks. Nothing here depends on the instruction set.
#pragma once

#include <cstdint>

#include "../core/config.h"

namespace selective_scan::cpu {

/// The sequences in segments of equal length, the last perhaps shorter; see segments.h. Of each
/// segment the affine map that it applies to a state, and the states between the segments, as the
/// kernels know them: of the compute type, complex interleaved.
struct Segmentation {
  int64_t steps = 0;  // of a segment, whole chunks; 0: sequences are not segmented
  int64_t count = 0;
  int64_t lanes = 0;           // segments that a vector walks at a time
  void* factors = nullptr;     // (batch, channel, segment, state)
  void* boundaries = nullptr;  // (batch, channel, segment and one more, state)

  SELECTIVE_SCAN_HD bool present() const { return steps > 0; }
  /// How many vectors a channel's segments fill.
  SELECTIVE_SCAN_HD int64_t sets() const { return present() ? ceil_div(count, lanes) : 1; }
};

/// What one task scans: channels of one group of one batch entry, through all steps or, where
/// sequences are segmented, through one vector of segments.
struct Block {
  int64_t batch = 0;
  int64_t group = 0;
  int64_t index = 0;  // among the blocks of its group
  int64_t first_channel = 0;
  int64_t channels = 0;
  Segmentation segmentation;
  int64_t segment_set = 0;
};

/// Divides every group into equal blocks of channels, and these into sets of segments.
struct Partition {
  int64_t batch = 0;
  int64_t groups = 0;
  int64_t group_channels = 0;
  int64_t block_channels = 0;
  int64_t blocks_per_group = 0;
  Segmentation segmentation;

  SELECTIVE_SCAN_HD int64_t count() const {
    return batch * groups * blocks_per_group * segmentation.sets();
  }

  SELECTIVE_SCAN_HD Block block(int64_t task) const {
    Block block;
    block.segmentation = segmentation;
    block.segment_set = task % segmentation.sets();
    task /= segmentation.sets();
    block.index = task % blocks_per_group;
    block.group = task / blocks_per_group % groups;
    block.batch = task / blocks_per_group / groups;
    const int64_t first = block.index * block_channels;
    block.first_channel = block.group * group_channels + first;
    const int64_t left = group_channels - first;
    block.channels = left < block_channels ? left : block_channels;
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
