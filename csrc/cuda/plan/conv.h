// How the causal convolution is divided among threads, and which kernels run it.
#pragma once

#include <cstdint>

#include "../../core/conv_params.h"
#include "../kit/launch_shape.h"
#include "device.h"

namespace selective_scan::cuda::conv {

// --- columns.cuh: neighbouring channels are neighbours in memory ---

constexpr int kColumnThreads = 128;
/// log2 of the most threads side by side.
constexpr int column_lane_bits(bool is_backward) {
  return is_backward ? 5 : 5;
}
/// Steps of a batch, of which a thread has one on its way and one at work.
constexpr int batch_steps(int64_t element_bytes, bool is_backward) {
  return is_backward && element_bytes > 2 ? 2 : 4;
}
/// Most steps of a thread, a multiple of a batch.
constexpr int max_column_steps(bool is_backward) {
  return is_backward ? 128 : 128;
}

/// Blocks of a multiprocessor, so that a thread has the registers for what it keeps of each tap,
/// and of the run, unless that is the whole batch entry. `words` are the registers of a vector's
/// sums.
constexpr int column_blocks(int words, int taps, bool is_backward, bool is_whole) {
  const int spared = is_whole ? 0 : 2;
  if (is_backward) return (taps <= 4 ? 6 : words <= 2 ? 4 : 3) - spared;
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

// --- rows.cuh: neighbouring steps are ---

constexpr int kRowThreads = 128;
/// Rounds that a lane has on their way.
constexpr int kRoundsAhead = 2;
/// Most rounds of a segment of a row that has more warps than there is room for: with more and
/// shorter warps a row is read at once, and less of the last wave is empty; but a warp's taps and
/// sums are some work, too.
constexpr int most_rounds(bool is_backward) {
  return is_backward ? 8 : 4;
}
/// Blocks of a multiprocessor.
constexpr int row_blocks(int taps, bool is_backward) {
  if (is_backward) return taps <= 4 ? 5 : 3;
  return taps <= 4 ? 7 : 4;
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
  int rounds = 0;  // of a segment, a multiple of kRoundsAhead

  SELECTIVE_SCAN_HD int lanes() const { return 1 << lane_bits; }
};

// --- the choice ---

/// Of the kernels that run a width; see first_tap().
constexpr int taps_of(int64_t width) {
  return static_cast<int>(width >= 2 && width <= 4 ? width : kMaxConvWidth);
}

/// Channels of a thread of columns.cuh: few, so that many threads have the registers.
constexpr int column_channels(int64_t element_bytes, bool is_backward) {
  return !is_backward && element_bytes == 2 ? 4 : 2;
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
