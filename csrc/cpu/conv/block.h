// A block of channels, and the operations on it that both passes share.
//
// The lanes of vectors are channels. Tiles of a few steps of a block are loaded into the
// first-level cache and converted and, if time is contiguous in memory, transposed, so that every
// array may have its own layout. A block is wide if channels are adjacent in memory, and one vector
// if steps are.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "../../core/conv_runs.h"
#include "../simd/tile.h"
#include "../simd/vector.h"
#include "../work.h"
#include "kernels.h"

namespace selective_scan::cpu {

template <class R>
class ConvBlock {
 public:
  using T = typename R::Scalar;
  static constexpr int64_t kMaxLanes = 128;
  static constexpr int64_t kTileElements = 4096;
  static constexpr int64_t kMaxHistory = kMaxConvWidth - 1;
  /// Rows of `pitch` lanes, including those of the steps before the tile's first step.
  using Tile = T[kTileElements + kMaxHistory * kMaxLanes];
  /// Holds a row for every tap, or for every step of a state.
  using Taps = T[kMaxConvWidth * kMaxLanes];

  SELECTIVE_SCAN_HD ConvBlock(const ConvParams& params, const ConvSplit& split, int64_t block)
      : history(params.width - 1),
        first_channel(block * split.block_channels),
        lanes(lesser_of(split.block_channels, params.dim - first_channel)),
        pitch(round_up(lanes, R::kWidth)),
        params_(params) {}

  SELECTIVE_SCAN_HD Section section(const ArrayView& array, int64_t batch, int64_t step,
                                    int64_t steps) const {
    const int64_t offset = batch * array.batch + first_channel * array.channel + step * array.step;
    return {element_at(array, offset), array.dtype, steps, lanes, array.step, array.channel, steps};
  }
  void load(const ArrayView& array, int64_t batch, int64_t step, int64_t steps, T* tile) const {
    if (steps > 0) load_rows<R>(section(array, batch, step, steps), tile, pitch);
  }
  void store(const ArrayView& array, int64_t batch, int64_t step, int64_t steps,
             const T* tile) const {
    if (steps > 0) store_rows<R>(section(array, batch, step, steps), tile, pitch);
  }
  SELECTIVE_SCAN_HD void zero(T* tile, int64_t steps) const {
    for (int64_t i = 0; i < steps * pitch; i += R::kWidth) R(T(0)).store(tile + i);
  }
  /// Moves `steps` rows, from row `from` on, to the front of the tile.
  SELECTIVE_SCAN_HD void move_to_front(T* tile, int64_t from, int64_t steps) const {
    for (int64_t i = 0; i < steps * pitch; i += R::kWidth) {
      R::load(tile + from * pitch + i).store(tile + i);
    }
  }

  void load_taps(T* taps, T* bias) const {
    load(params_.weight, 0, 0, params_.width, taps);
    if (params_.bias.present()) {
      load(params_.bias, 0, 0, 1, bias);
    } else {
      zero(bias, 1);
    }
  }

  /// Loads x at the width - 1 steps before `step`. Steps before the run's first one take its
  /// initial states, or 0.
  void load_history(const Run& run, int64_t batch, int64_t step, T* tile) const {
    const int64_t from_x = lesser_of(history, step - run.begin);
    const int64_t missing = history - from_x;
    if (run.states != Run::kNone && params_.initial_states.present()) {
      load(params_.initial_states, run.states, history - missing, missing, tile);
    } else {
      zero(tile, missing);
    }
    load(params_.x, batch, step - from_x, from_x, tile + missing * pitch);
  }

  /// Calls visit(run, first, stop) for each run, or part of a run, in a task's segment.
  template <class Visit>
  SELECTIVE_SCAN_HD void for_each_run(const ConvSplit& split, const ConvTask& task,
                                      const Visit& visit) const {
    const int64_t end = lesser_of(params_.seqlen, (task.segment + 1) * split.segment_steps);
    const int64_t limit = lesser_of(params_.seqlen, end + history);
    for (int64_t step = task.segment * split.segment_steps; step < end;) {
      const Run run = run_at(params_, task.batch, step, limit);
      const int64_t stop = lesser_of(run.end, end);
      visit(run, step, stop);
      step = stop;
    }
  }

  const int64_t history;
  const int64_t first_channel;
  const int64_t lanes;
  const int64_t pitch;

 private:
  const ConvParams& params_;
};

/// Returns a table of make<kWidth, kSilu>() for every width from 1 on, without and with activation.
template <class Function, class Make>
constexpr auto conv_instances(const Make& make) {
  std::array<std::array<Function, 2>, kMaxConvWidth> instances{};
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    ((instances[kIndices] = {make.template operator()<kIndices + 1, false>(),
                             make.template operator()<kIndices + 1, true>()}),
     ...);
  }(std::make_integer_sequence<int, kMaxConvWidth>());
  return instances;
}

}  // namespace selective_scan::cpu
