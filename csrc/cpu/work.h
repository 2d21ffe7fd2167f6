// How a pass is divided into tasks, and the table of kernels that run them. Nothing here depends
// on the instruction set.
#pragma once

#include <cstdint>

#include "../core/diagonal_params.h"
#include "../core/method_table.h"
#include "../core/params.h"
#include "../core/unitary_params.h"

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

/// Gradients that more than one task contributes to, as the tasks leave them: in the compute type
/// (complex interleaved), to be added up afterwards in a fixed order.
struct BackwardPartials {
  int64_t rows = 0;    // a row for every batch entry and set of segments
  void* dA = nullptr;  // (row, channel, state)
  void* dB = nullptr;  // constant B: (row, channel, state)
  void* dC = nullptr;
  void* dD = nullptr;  // (row, channel)
  void* ddelta_bias = nullptr;
  // Variable B and C of groups of several blocks: (batch, group, block, chunk, component, state,
  // kStateChunk). Null where a block is a whole group; it then writes the gradient itself.
  void* dB_blocks = nullptr;
  void* dC_blocks = nullptr;
  int64_t blocks_per_group = 1;
};

/// The kernels of one combination of compute type, real or complex, and method.
struct Kernels {
  int64_t lanes;  // of a vector
  /// Each with the scratch memory that it needs for a block no larger than this one.
  int64_t (*forward_scratch_bytes)(const ForwardParams& params, const Block& block);
  void (*forward)(const ForwardParams& params, const Block& block, void* scratch);
  int64_t (*backward_scratch_bytes)(const BackwardParams& params, const Block& block);
  void (*backward)(const BackwardParams& params, const Block& block,
                   const BackwardPartials& partials, void* scratch);
  /// The affine maps of a block's segments, before a pass over segmented sequences.
  int64_t (*map_scratch_bytes)(const ScanParams& params, const Block& block);
  void (*forward_maps)(const ForwardParams& params, const Block& block, void* scratch);
  void (*backward_maps)(const BackwardParams& params, const Block& block, void* scratch);
};

/// How the diagonal scan divides its rows. See diagonal_kernel.h.
struct DiagonalSplit {
  int64_t segments = 1;  // of time, of every row
  int64_t segment_steps = 0;
  bool lanes_are_segments = false;  // else rows along one of their dimensions
  int lane_dim = 0;
  int64_t lane_rows = 1;
  int64_t outers = 1;  // combinations of the other dimensions

  /// Vectors that cover what the lanes go along.
  SELECTIVE_SCAN_HD int64_t blocks(int64_t width) const {
    return ceil_div(lanes_are_segments ? segments : lane_rows, width);
  }
  SELECTIVE_SCAN_HD int64_t tasks(int64_t width) const {
    return blocks(width) * outers * (lanes_are_segments ? lane_rows : segments);
  }
  SELECTIVE_SCAN_HD int64_t outer_offset(const DiagonalScanParams& params, const RowArray& array,
                                         int64_t outer) const {
    int64_t offset = 0;
    for (int dim = params.row_dims - 1; dim >= 0; --dim) {
      if (dim == lane_dim) continue;
      offset += outer % params.row_sizes[dim] * array.row[dim];
      outer /= params.row_sizes[dim];
    }
    return offset;
  }
};

/// The kernels of the diagonal scan in one direction, of one compute type.
template <class Params>
struct DiagonalPass {
  void (*map)(const Params& params, const DiagonalSplit& split, int64_t task, void* maps);
  void (*scan)(const Params& params, const DiagonalSplit& split, int64_t task, const void* maps);
};

struct DiagonalKernels {
  int64_t lanes;
  DiagonalPass<DiagonalForwardParams> forward;
  DiagonalPass<DiagonalBackwardParams> backward;
};

/// The kernels of the adaptive unitary scan, of one compute type.
struct UnitaryKernels {
  int64_t block_channels;
  void (*forward)(const UnitaryForwardParams& params, const Block& block);
  void (*backward)(const UnitaryBackwardParams& params, const Block& block);
};

/// All kernels of one instruction set.
struct Capability {
  const char* name;
  MethodTable<Kernels> kernels[2][2];  // is_double, is_complex
  UnitaryKernels unitary[2];           // is_double
  DiagonalKernels diagonal[2][2];      // is_double, is_complex
};

extern const Capability kDefaultCapability;
extern const Capability kAvx2Capability;
extern const Capability kAvx512Capability;

/// The best that the processor has.
const Capability& chosen_capability();

}  // namespace selective_scan::cpu
