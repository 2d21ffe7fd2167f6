// How the causal convolution is divided among threads, and which kernels run it.
#pragma once

#include <cstdint>

#include "../../core/conv_params.h"
#include "../kit/launch_shape.h"
#include "device.h"

namespace selective_scan::cuda::conv {

/// The tuning of a pass. docs/kernels/convolution.md has the measurements.
struct Tuning {
  int channels[2];   // of a thread in conv/columns.cuh, for 2-byte and for 4-byte elements
  int rounds_ahead;  // rounds that a lane in conv/rows.cuh loads in advance
  // The most rounds of a row's segment. More and shorter warps waste less of the last wave, but
  // each warp's taps and sums are extra work.
  int most_rounds;
};
constexpr Tuning tuning(bool is_backward) {
  return is_backward ? Tuning{{2, 4}, 1, 8} : Tuning{{4, 2}, 2, 4};
}

// --- conv/columns.cuh: adjacent channels are contiguous ---

constexpr int kColumnThreads = 128;
/// The steps of a batch. A thread has one batch in flight while it works on another.
constexpr int kBatchSteps = 4;
/// The most steps of a thread; a multiple of a batch.
constexpr int kMaxColumnSteps = 128;
/// The channels of a thread. They are few, so that registers suffice for many threads.
constexpr int column_channels(int64_t element_bytes, int taps, bool is_backward) {
  if (is_backward && taps > 4) return 2;  // as many registers of sums as 4 channels of 4 taps

  // nvcc 12 does not accept an element of a temporary's array as a constant.
  const Tuning chosen = tuning(is_backward);
  return chosen.channels[element_bytes > 2];
}

/// The blocks of a multiprocessor, chosen so that a thread has registers for its values of each
/// tap, and for those of the run, unless the run is the whole batch entry. `words` is the number of
/// registers for a vector's sums.
constexpr int column_blocks(int words, int taps, bool is_backward, bool is_whole) {
  const int spared = is_whole ? 0 : 2;
  if (is_backward && words > 2) return is_whole ? 3 : 2;
  if (is_backward) return (taps <= 4 ? 6 : 4) - spared;
  if (taps <= 4) return (words <= 2 ? 8 : 6) - spared;
  return words <= 2 ? 6 : 4;
}

/// The division of a launch: blocks are (batch, tile of steps, lanes() vectors of channels).
struct ColumnSplit {
  int lane_bits = 0;  // log2 of the threads along channels
  int steps = 0;      // per thread
  int64_t tiles = 0;
  int64_t channel_blocks = 0;
  // Strides of steps in bytes.
  int64_t x_stride = 0;
  int64_t dout_stride = 0;
  int64_t result_stride = 0;  // of out or dx

  SELECTIVE_SCAN_HD int lanes() const { return 1 << lane_bits; }
  SELECTIVE_SCAN_HD int64_t tile_steps() const {
    return int64_t{steps} * (kColumnThreads >> lane_bits);
  }
};

// --- conv/rows.cuh: adjacent steps are contiguous ---

constexpr int kRowThreads = 128;
/// The blocks of a multiprocessor.
constexpr int row_blocks(int taps, bool is_backward) {
  if (is_backward) return taps <= 4 ? 5 : 3;
  return taps <= 4 ? 8 : 4;
}

/// The steps of a vector: 16 bytes, or more if the next vector's taps reach back further.
constexpr int row_vector(int taps, int element_bytes) {
  const int steps = 16 / element_bytes;
  return taps - 1 > steps ? 8 : steps;
}

/// The longest rows: step counts have 32 bits.
constexpr int64_t kMaxRowSteps = int64_t{1} << 30;

/// The division of a launch: lanes() lanes work on a segment of a row, batch by batch.
struct RowSplit {
  int lane_bits = 0;
  int segments = 0;
  int rounds = 0;  // per segment; a multiple of Tuning::rounds_ahead

  SELECTIVE_SCAN_HD int lanes() const { return 1 << lane_bits; }
};

// --- the choice ---

/// The width of the convolutions in published models.
constexpr int kCommonWidth = 4;
/// Returns the number of taps of the kernels for a width; see first_tap().
constexpr int taps_of(int64_t width) {
  return width == kCommonWidth ? kCommonWidth : static_cast<int>(kMaxConvWidth);
}

enum class Kernels : int8_t { kNone, kColumns, kRows, kAnyStrides };

/// The kernels that run a call, and how they divide it.
struct ConvPlan {
  Kernels kernels = Kernels::kNone;
  bool is_whole = false;  // see columns_forward() and columns_backward()
  ColumnSplit columns;    // also used by kAnyStrides
  RowSplit rows;
  int64_t part_rows = 0;  // of partial sums
  LaunchShape shape;
};

ConvPlan plan_conv(const ConvForwardParams& params, const Device& device);
ConvPlan plan_conv(const ConvBackwardParams& params, const Device& device);

}  // namespace selective_scan::cuda::conv
