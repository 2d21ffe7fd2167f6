// The layout of a block's shared memory, as used by both the plan and the kernels.
#pragma once

#include "../../core/params.h"
#include "../kit/geometry.h"

namespace selective_scan::cuda::floor {

constexpr int kMostWarps = 8;

/// The stride between rows in shared memory, which are read by single steps. It spreads a column
/// over the banks.
constexpr int kElementRow = kChunk + 1;

/// Returns the number of slices of the states. A lane has one state of a channel at a time, so more
/// states than a channel has lanes come in slices, one after another.
SELECTIVE_SCAN_HD int num_slices(const ScanParams& params, const Geometry& geometry) {
  return static_cast<int>(ceil_div(params.dstate, geometry.lanes()));
}

/// The arrays of the tile's rows, [channel][step] each. Those from kDy on belong to the backward
/// pass. In either pass, input_delta comes last, if it is present.
enum Row { kDelta, kU, kY, kGate, kDy, kSlope, kDu, kDdelta };

/// The values that a lane keeps of each slice from one chunk to the next: the state, or in the
/// backward pass its gradient; the product of abar, for summaries; B and C if they are constant; in
/// the backward pass, the sums of the gradients that have no steps.
enum Kept { kState, kFactor, kB, kC, kSumA, kSumB, kSumC };

/// The places of arrays in shared memory, where T is the type of the states and R its real type.
/// First come the rows, R [array][channel][step], then arrays of T, whose offsets from the
/// beginning of shared memory are in units of T.
struct SharedLayout {
  int row_array = 0;    // distance between arrays of rows, in R
  Row input_delta{};    // if the call has it
  int projections = 0;  // [B | C][step][state of the slice]
  int kept = 0;         // [what][slice][thread]
  int plane = 0;        // [step][thread], backward pass: states, then terms of dB
  int bytes = 0;

  SharedLayout() = default;
  SharedLayout(const ScanParams& params, const Geometry& geometry, bool is_backward) {
    const int real_bytes = params.is_double ? 8 : 4;
    const int state_bytes = params.is_complex ? 2 * real_bytes : real_bytes;
    input_delta = static_cast<Row>(is_backward ? kDdelta + 1 : kDy);
    const int rows = input_delta + (params.input_delta.present() ? 1 : 0);
    const int what = is_backward ? kSumC + 1 : kSumA;
    row_array = geometry.tile_channels() * kElementRow;
    bytes = round_up(rows * row_array * real_bytes, 16);
    const auto take = [&](int states) {
      const int start = bytes;
      bytes += round_up(states * state_bytes, 16);
      return start / state_bytes;
    };
    projections = take(2 * kChunk * (geometry.lanes() + 1));
    kept = take(what * num_slices(params, geometry) * geometry.threads());
    if (is_backward) plane = take(kChunk * geometry.threads());
  }
};

}  // namespace selective_scan::cuda::floor
