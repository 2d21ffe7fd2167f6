#include "conv.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <type_traits>

#include "../kit/config.h"

namespace selective_scan::cuda::conv {
namespace {

/// The arrays with steps.
std::array<const ArrayView*, 2> arrays_of(const ConvForwardParams& params) {
  return {&params.x, &params.out};
}
std::array<const ArrayView*, 3> arrays_of(const ConvBackwardParams& params) {
  return {&params.x, &params.dout, &params.dx};
}

/// Returns whether vectors of `count` elements are aligned in every array if they are in x: the
/// arrays begin at the same position within a vector, and their strides (of dimensions larger than
/// 1) differ by whole vectors. With `is_aligned`, the arrays also begin with a vector, and each
/// stride is a whole number of vectors.
template <class Params>
bool have_vectors(const Params& params, int64_t count, int64_t ArrayView::* inner,
                  bool is_aligned) {
  const ArrayView& first = params.x;
  const int64_t bytes = element_size(first.dtype);
  const auto place_of = [&](const ArrayView& array) {
    return reinterpret_cast<uintptr_t>(array.data) % static_cast<uintptr_t>(count * bytes);
  };
  if (place_of(first) % static_cast<uintptr_t>(bytes) != 0) return false;
  if (is_aligned && place_of(first) != 0) return false;
  const auto arrays = arrays_of(params);
  return std::all_of(arrays.begin(), arrays.end(), [&](const ArrayView* array) {
    const auto leads_alike = [&](int64_t ArrayView::* stride, int64_t size) {
      const int64_t gap = is_aligned ? array->*stride : array->*stride - first.*stride;
      return stride == inner || size == 1 || gap % count == 0;
    };
    const int64_t inner_size = inner == &ArrayView::step ? params.seqlen : params.dim;
    return !array->present() ||
           (array->dtype == first.dtype && place_of(*array) == place_of(first) &&
            (array->*inner == 1 || inner_size == 1) &&
            leads_alike(&ArrayView::batch, params.batch) &&
            leads_alike(&ArrayView::channel, params.dim) &&
            leads_alike(&ArrayView::step, params.seqlen));
  });
}

int64_t step_bytes(const ArrayView& array) {
  return array.step * element_size(array.dtype);
}

/// Splits columns for a device on which `resident` blocks run at a time.
template <class Params>
ColumnSplit split_columns(const Params& params, int channels, int64_t resident) {
  ColumnSplit split;
  split.x_stride = step_bytes(params.x);
  split.result_stride = step_bytes(*arrays_of(params).back());
  if constexpr (std::is_same_v<Params, ConvBackwardParams>) {
    split.dout_stride = step_bytes(params.dout);
  }
  const int64_t vectors = ceil_div(params.dim, channels);
  split.lane_bits = kWarpBits;
  // Leaves as few lanes as possible without channels, but uses at least 8 lanes.
  while (split.lane_bits > 3 && round_up(vectors, int64_t{1} << (split.lane_bits - 1)) <
                                    round_up(vectors, int64_t{1} << split.lane_bits)) {
    --split.lane_bits;
  }
  split.channel_blocks = ceil_div(vectors, int64_t{split.lanes()});
  // A thread's work besides its steps: steps that it reads again, its taps and its sums.
  constexpr int64_t kOverhead = 12;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int steps = kMaxColumnSteps; steps > 0; steps -= kBatchSteps) {
    ColumnSplit tried = split;
    tried.steps = steps;
    tried.tiles = ceil_div(params.seqlen, tried.tile_steps());
    const int64_t waves = ceil_div(params.batch * tried.tiles * split.channel_blocks, resident);
    const int64_t cost = waves * (steps + kOverhead);
    if (cost >= least) continue;
    least = cost;
    split.steps = tried.steps;
    split.tiles = tried.tiles;
  }
  return split;
}

RowSplit split_rows(const ConvParams& params, int64_t vector, bool is_aligned,
                    int64_t multiprocessors, bool is_backward) {
  const int64_t ahead = tuning(is_backward).rounds_ahead;
  const int64_t fewest = 2 * ahead, most = tuning(is_backward).most_rounds;
  constexpr int64_t kWantedWarps = 32;  // per multiprocessor
  RowSplit split;
  // A row may begin within a vector.
  const int64_t positions = is_aligned ? params.seqlen : params.seqlen + vector - 1;
  const int64_t vectors = ceil_div(positions, vector);
  const auto wanted_lanes = std::bit_ceil(static_cast<uint64_t>(vectors));
  split.lane_bits = std::clamp(std::countr_zero(wanted_lanes), 2, kWarpBits);
  const int64_t rounds = round_up(ceil_div(vectors, int64_t{split.lanes()}), ahead);
  const int64_t warps = ceil_div(params.batch * params.dim * split.lanes(), int64_t{kWarpSize});
  const int64_t wanted = std::clamp<int64_t>(kWantedWarps * multiprocessors / warps, 1,
                                             std::max<int64_t>(rounds / fewest, 1));
  const int64_t segments = std::max(wanted, ceil_div(rounds, most));
  split.rounds = static_cast<int>(round_up(ceil_div(rounds, segments), ahead));
  split.segments = static_cast<int>(ceil_div(rounds, int64_t{split.rounds}));
  return split;
}

template <class Params>
ConvPlan make_plan(const Params& params, const Device& device, bool is_backward) {
  ConvPlan plan;
  if (params.seqlen == 0) return plan;
  plan.is_whole = !params.seq_idx.present() && !params.cu_seqlens.present();
  if constexpr (std::is_same_v<Params, ConvBackwardParams>) {
    plan.is_whole = plan.is_whole && !params.dfinal_states.present();
  }
  const auto split = [&](int channels, int words, int taps) {
    const int64_t resident =
        device.multiprocessors * column_blocks(words, taps, is_backward, plan.is_whole);
    plan.columns = split_columns(params, channels, resident);
    plan.part_rows = params.batch * plan.columns.tiles;
    plan.shape = {plan.part_rows * plan.columns.channel_blocks, kColumnThreads};
  };
  const int64_t bytes = element_size(params.x.dtype);
  const int taps = taps_of(params.width);
  const int channels = column_channels(bytes, taps, is_backward);
  const int row_steps = row_vector(taps, static_cast<int>(bytes));
  if (!params.is_double && params.dim % channels == 0 &&
      have_vectors(params, channels, &ArrayView::channel, true)) {
    plan.kernels = Kernels::kColumns;
    split(channels, channels, taps);
  } else if (!params.is_double && params.seqlen <= kMaxRowSteps &&
             have_vectors(params, row_steps, &ArrayView::step, false)) {
    plan.kernels = Kernels::kRows;
    const bool is_aligned = have_vectors(params, row_steps, &ArrayView::step, true);
    plan.rows = split_rows(params, row_steps, is_aligned, device.multiprocessors, is_backward);
    plan.part_rows = params.batch * plan.rows.segments;
    const int64_t lanes = plan.part_rows * params.dim << plan.rows.lane_bits;
    plan.shape = {ceil_div(lanes, int64_t{kRowThreads}), kRowThreads};
  } else {
    plan.kernels = Kernels::kAnyStrides;
    const int real = params.is_double ? sizeof(double) : sizeof(float);
    split(1, real / 4, kMaxConvWidth);
  }
  return plan;
}

}  // namespace

ConvPlan plan_conv(const ConvForwardParams& params, const Device& device) {
  return make_plan(params, device, false);
}
ConvPlan plan_conv(const ConvBackwardParams& params, const Device& device) {
  return make_plan(params, device, true);
}

}  // namespace selective_scan::cuda::conv
