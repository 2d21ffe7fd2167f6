// Which kernels run a call of the causal convolution, how it is divided, and their launch.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "../kit/launch_tools.h"
#include "../launch.h"
#include "columns.cuh"
#include "rows.cuh"
#include "states.cuh"

namespace selective_scan::cuda::conv {

inline int log2_of(int64_t power) {
  int bits = 0;
  while ((int64_t{1} << bits) < power) ++bits;
  return bits;
}

/// Whether vectors of `count` elements of every array lie alike, if they are aligned in the first:
/// the arrays begin at the same place of a vector, and what leads from one to the next, where there
/// is a next, is a whole number of vectors. `is_aligned`: they begin with a vector, too.
inline bool have_vectors(const ConvParams& params, std::initializer_list<const ArrayView*> arrays,
                         int64_t count, int64_t ArrayView::* inner, bool is_aligned) {
  const ArrayView& first = **arrays.begin();
  const int64_t bytes = element_size(first.dtype);
  const auto place_of = [&](const ArrayView& array) {
    return reinterpret_cast<uintptr_t>(array.data) % static_cast<uintptr_t>(count * bytes);
  };
  if (place_of(first) % static_cast<uintptr_t>(bytes) != 0) return false;
  if (is_aligned && place_of(first) != 0) return false;
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

inline bool have_vectors(const ConvForwardParams& params, int64_t count, int64_t ArrayView::* inner,
                         bool is_aligned) {
  return have_vectors(params, {&params.x, &params.out}, count, inner, is_aligned);
}
inline bool have_vectors(const ConvBackwardParams& params, int64_t count,
                         int64_t ArrayView::* inner, bool is_aligned) {
  return have_vectors(params, {&params.x, &params.dout, &params.dx}, count, inner, is_aligned);
}

/// Channels of a thread: of few bytes each, those of the backward pass leave registers for the
/// rest.
inline constexpr int column_channels(int64_t element_bytes, bool is_backward) {
  return element_bytes == 4 ? 4 : is_backward ? 4 : 8;
}

/// Blocks of a multiprocessor that a launch should have at least, for its memory to be busy.
constexpr int64_t kWantedBlocks = 2;

inline int64_t step_bytes(const ArrayView& array) {
  return array.step * element_size(array.dtype);
}
inline void set_strides(const ConvForwardParams& params, ColumnSplit& split) {
  split.result_stride = step_bytes(params.out);
}
inline void set_strides(const ConvBackwardParams& params, ColumnSplit& split) {
  split.dout_stride = step_bytes(params.dout);
  split.result_stride = step_bytes(params.dx);
}

template <class Params>
ColumnSplit split_columns(const Params& params, int channels, int64_t multiprocessors) {
  ColumnSplit split;
  split.x_stride = step_bytes(params.x);
  set_strides(params, split);
  const int64_t vectors = ceil_div(params.dim, channels);
  split.lane_bits = kWarpBits;
  // As few lanes without channels as can be, but rows of 8 vectors at least.
  while (split.lane_bits > 3 && round_up(vectors, int64_t{1} << (split.lane_bits - 1)) <
                                    round_up(vectors, int64_t{1} << split.lane_bits)) {
    --split.lane_bits;
  }
  split.channel_blocks = ceil_div(vectors, int64_t{split.lanes()});
  const int64_t threads = kColumnThreads >> split.lane_bits;  // one behind the other
  const int64_t blocks = params.batch * split.channel_blocks;
  int64_t steps = kMaxColumnSteps;
  while (steps > 2 * kAhead &&
         blocks * ceil_div(params.seqlen, threads * steps) < kWantedBlocks * multiprocessors) {
    steps /= 2;
  }
  split.tiles = ceil_div(params.seqlen, threads * steps);
  // Evenly.
  steps = ceil_div(params.seqlen, std::max<int64_t>(split.tiles, 1) * threads);
  split.steps = static_cast<int>(round_up(std::max<int64_t>(steps, 1), int64_t{kAhead}));
  split.tiles = ceil_div(params.seqlen, split.tile_steps());
  return split;
}

inline RowSplit split_rows(const ConvParams& params, int64_t vector, int64_t multiprocessors) {
  constexpr int64_t kFewestRounds = 2 * kRoundsAhead;
  constexpr int64_t kWantedWarps = 32;  // of a multiprocessor
  RowSplit split;
  const int64_t positions = params.seqlen + vector - 1;  // a row may begin within a vector
  const int64_t vectors = ceil_div(positions, vector);
  split.lane_bits = std::clamp(log2_of(vectors), 2, kWarpBits);
  const int64_t rounds = round_up(ceil_div(vectors, int64_t{split.lanes()}), int64_t{kRoundsAhead});
  const int64_t warps = ceil_div(params.batch * params.dim * split.lanes(), int64_t{kWarpSize});
  const int64_t segments = std::clamp<int64_t>(kWantedWarps * multiprocessors / warps, 1,
                                               std::max<int64_t>(rounds / kFewestRounds, 1));
  split.rounds = static_cast<int>(round_up(ceil_div(rounds, segments), int64_t{kRoundsAhead}));
  split.segments = static_cast<int>(ceil_div(rounds, int64_t{split.rounds}));
  return split;
}

/// Of the kernels that run a width; see first_tap().
constexpr int taps_of(int64_t width) {
  return static_cast<int>(width >= 2 && width <= 4 ? width : kMaxConvWidth);
}

/// What runs a call.
struct ConvPlan {
  enum class Kernels { kNone, kColumns, kRows, kAnyStrides } kernels = Kernels::kNone;
  ColumnSplit columns;
  RowSplit rows;
  int64_t part_rows = 0;  // of partial sums
};

template <class Params>
ConvPlan plan(const Params& params, bool is_backward) {
  ConvPlan plan;
  if (params.seqlen == 0) return plan;
  Device device;
  current_device(device);  // what went wrong the launch reports
  const int64_t bytes = element_size(params.x.dtype);
  const int channels = column_channels(bytes, is_backward);
  const int row_steps = row_vector(taps_of(params.width), static_cast<int>(bytes));
  using Kernels = ConvPlan::Kernels;
  if (!params.is_double && params.dim % channels == 0 &&
      have_vectors(params, channels, &ArrayView::channel, true)) {
    plan.kernels = Kernels::kColumns;
    plan.columns = split_columns(params, channels, device.multiprocessors);
  } else if (!params.is_double && params.seqlen <= kMaxRowSteps &&
             have_vectors(params, row_steps, &ArrayView::step, false)) {
    plan.kernels = Kernels::kRows;
    plan.rows = split_rows(params, row_steps, device.multiprocessors);
  } else {
    plan.kernels = Kernels::kAnyStrides;
    plan.columns = split_columns(params, 1, device.multiprocessors);
  }
  plan.part_rows =
      params.batch * (plan.kernels == Kernels::kRows ? plan.rows.segments : plan.columns.tiles);
  return plan;
}

/// Calls visit with a null pointer of x's element type, which is no double.
template <class Visit>
cudaError_t with_element(const ConvParams& params, const Visit& visit) {
  switch (params.x.dtype) {
    case DType::kBFloat16:
      return visit(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<Half*>(nullptr));
    default:
      return visit(static_cast<float*>(nullptr));
  }
}

/// Calls visit with the number of taps of the kernels for this width, as a constant.
template <class Visit>
cudaError_t with_taps(const ConvParams& params, const Visit& visit) {
  switch (taps_of(params.width)) {
    case 2:
      return visit(std::integral_constant<int, 2>{});
    case 3:
      return visit(std::integral_constant<int, 3>{});
    case 4:
      return visit(std::integral_constant<int, 4>{});
    default:
      return visit(std::integral_constant<int, taps_of(kMaxConvWidth)>{});
  }
}

/// Calls visit with a null pointer of the compute type.
template <class Visit>
cudaError_t with_real(const ConvParams& params, const Visit& visit) {
  return params.is_double ? visit(static_cast<double*>(nullptr))
                          : visit(static_cast<float*>(nullptr));
}

inline LaunchShape column_launch(const ConvParams& params, const ColumnSplit& split) {
  return {params.batch * split.tiles * split.channel_blocks, kColumnThreads};
}
inline LaunchShape row_launch(const ConvParams& params, const RowSplit& split) {
  const int64_t lanes = params.batch * params.dim * split.segments << split.lane_bits;
  return {ceil_div(lanes, int64_t{kRowThreads}), kRowThreads};
}
inline LaunchShape state_launch(const ConvParams& params) {
  return {ceil_div(params.sequences * params.dim, int64_t{kStateThreads}), kStateThreads};
}

}  // namespace selective_scan::cuda::conv
