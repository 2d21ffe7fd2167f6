// What lies where in a block's shared memory; the plan and the kernels both ask here.
#pragma once

#include "../../core/params.h"
#include "../kit/geometry.h"

namespace selective_scan::cuda::floor {

constexpr int kMostWarps = 8;

/// A lane has one state of a channel at a time. More states than a warp has lanes come in slices,
/// one after another.
SELECTIVE_SCAN_HD int num_slices(const ScanParams& params, const Geometry& geometry) {
  return static_cast<int>(ceil_div(params.dstate, geometry.lanes()));
}

/// Arrays of the tile's rows, [channel][step] each; those from kDy on are the backward pass's. The
/// steps of the input, where it has its own, come last in either pass.
enum Row { kDelta, kU, kY, kGate, kDy, kSlope, kDu, kDdelta };

/// What a lane keeps of each slice from one chunk to the next: the state, or backwards its
/// gradient; of a summary the product of abar; B and C where they are constant; backwards the sums
/// of what has no steps.
enum Kept { kState, kFactor, kB, kC, kSumA, kSumB, kSumC };

/// T is the type of the states, R its real type. First come the rows, R [array][channel][step],
/// then arrays of T, whose distances from the beginning of shared memory are in T.
struct SharedLayout {
  int row_array = 0;    // distance of two arrays of rows, in R
  Row input_delta{};    // where calls have it
  int projections = 0;  // [B | C][step][state of the slice]
  int kept = 0;         // [what][slice][thread]
  int plane = 0;        // [step][thread], backwards: states, then terms of dB
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
