// How the causal convolution is divided among threads, and which kernels run it.
#pragma once

#include <cstdint>

#include "../../core/conv_params.h"
#include "../kit/launch_shape.h"
#include "device.h"

namespace selective_scan::cuda::conv {

/// What measurements chose for a pass; docs/kernels/convolution.md has them.
struct Tuning {
  int channels[2];   // of a thread of conv/columns.cuh: for elements of 2 bytes, and of 4
  int rounds_ahead;  // that a lane of conv/rows.cuh has on their way
  // A segment of a row has so many. More and shorter warps leave less of the last wave empty, but a
  // warp's taps and sums are some work, too.
  int most_rounds;
};
constexpr Tuning tuning(bool is_backward) {
  return is_backward ? Tuning{{2, 4}, 1, 8} : Tuning{{4, 2}, 2, 4};
}

// --- conv/columns.cuh: neighbouring channels are neighbours in memory ---

constexpr int kColumnThreads = 128;
/// Steps of a batch, of which a thread has one on its way and one at work.
constexpr int kBatchSteps = 4;
/// Most steps of a thread, a multiple of a batch.
constexpr int kMaxColumnSteps = 128;
/// Channels of a thread: few, so that many threads have the registers.
constexpr int column_channels(int64_t element_bytes, int taps, bool is_backward) {
  if (is_backward && taps > 4) return 2;  // which have as many registers of sums as 4 of 4 taps

  // nvcc 12 takes no element of a temporary's array for a constant.
  const Tuning chosen = tuning(is_backward);
  return chosen.channels[element_bytes > 2];
}

/// Blocks of a multiprocessor, so that a thread has the registers for what it keeps of each tap,
/// and of the run, unless that is the whole batch entry. `words` are the registers of a vector's
/// sums.
constexpr int column_blocks(int words, int taps, bool is_backward, bool is_whole) {
  const int spared = is_whole ? 0 : 2;
  if (is_backward && words > 2) return is_whole ? 3 : 2;
  if (is_backward) return (taps <= 4 ? 6 : 4) - spared;
  if (taps <= 4) return (words <= 2 ? 8 : 6) - spared;
  return words <= 2 ? 6 : 4;
}

/// How a launch is divided: blocks are (batch, tile of steps, lanes() vectors of channels).
struct ColumnSplit {
  int lane_bits = 0;  // log2 of the threads side by side
  int steps = 0;      // of a thread
  int64_t tiles = 0;
  int64_t channel_blocks = 0;
  // Bytes from one step to the next.
  int64_t x_stride = 0;
  int64_t dout_stride = 0;
  int64_t result_stride = 0;  // of out or dx

  SELECTIVE_SCAN_HD int lanes() const { return 1 << lane_bits; }
  SELECTIVE_SCAN_HD int64_t tile_steps() const {
    return int64_t{steps} * (kColumnThreads >> lane_bits);
  }
};

// --- conv/rows.cuh: neighbouring steps are ---

constexpr int kRowThreads = 128;
/// Blocks of a multiprocessor.
constexpr int row_blocks(int taps, bool is_backward) {
  if (is_backward) return taps <= 4 ? 5 : 3;
  return taps <= 4 ? 8 : 4;
}

/// Steps of a vector: 16 bytes, or as many as the next vector may want of this one.
constexpr int row_vector(int taps, int element_bytes) {
  const int steps = 16 / element_bytes;
  return taps - 1 > steps ? 8 : steps;
}

/// The longest rows: steps are counted by 32 bits.
constexpr int64_t kMaxRowSteps = int64_t{1} << 30;

/// How a launch is divided: lanes() lanes have a segment of a row, batch by batch.
struct RowSplit {
  int lane_bits = 0;
  int segments = 0;
  int rounds = 0;  // of a segment, a multiple of Tuning::rounds_ahead

  SELECTIVE_SCAN_HD int lanes() const { return 1 << lane_bits; }
};

// --- the choice ---

/// The width of published models' convolutions.
constexpr int kCommonWidth = 4;
/// Returns the taps of the kernels that run a width; see first_tap().
constexpr int taps_of(int64_t width) {
  return width == kCommonWidth ? kCommonWidth : static_cast<int>(kMaxConvWidth);
}

enum class Kernels : int8_t { kNone, kColumns, kRows, kAnyStrides };

/// What runs a call.
struct ConvPlan {
  Kernels kernels = Kernels::kNone;
  bool is_whole = false;  // see columns_forward() and columns_backward()
  ColumnSplit columns;    // also of kAnyStrides
  RowSplit rows;
  int64_t part_rows = 0;  // of partial sums
  LaunchShape shape;
};

ConvPlan plan_conv(const ConvForwardParams& params, const Device& device);
ConvPlan plan_conv(const ConvBackwardParams& params, const Device& device);

}  // namespace selective_scan::cuda::conv
