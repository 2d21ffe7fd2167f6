// The general diagonal scan of a vector of chains.
//
// A chain is one row or, if there are few rows, one time segment of a row. The lanes of a vector
// are adjacent chains: rows along the longest row dimension, or segments of one row. Tiles of
// kSteps steps of each chain are loaded into the first-level cache, converted and transposed on the
// way (tile.h), and walked with one multiply-add per step for all lanes. Bound by memory, or by the
// transpositions if the arrays are in a cache.
#pragma once

#include <cstdint>

#include "../../core/affine_map.h"
#include "../../core/diagonal_params.h"
#include "../../core/diagonal_step.h"
#include "../simd/tile.h"
#include "../simd/vector.h"
#include "../work.h"
#include "kernels.h"

namespace selective_scan::cpu {

/// The chains of a task, and the mapping of lanes to chains.
template <class Params>
struct Chains {
  const Params& params;
  const DiagonalSplit& split;
  int64_t outer;       // index among the combinations of the other row dimensions
  int64_t first_row;   // along the lanes' dimension
  int64_t first_step;  // of the first lane
  int64_t segment;     // of the first lane
  int lanes;

  SELECTIVE_SCAN_HD Chains(const Params& params, const DiagonalSplit& split, int64_t task,
                           int64_t width)
      : params(params), split(split) {
    const int64_t blocks = split.blocks(width);
    const int64_t block = task % blocks;
    int64_t rest = task / blocks;
    if (split.lanes_are_segments) {
      first_row = rest % split.lane_rows;
      outer = rest / split.lane_rows;
      segment = block * width;
      lanes = static_cast<int>(lesser_of(width, split.segments - segment));
    } else {
      segment = rest % split.segments;
      outer = rest / split.segments;
      first_row = block * width;
      lanes = static_cast<int>(lesser_of(width, split.lane_rows - first_row));
    }
    first_step = segment * split.segment_steps;
  }

  /// Returns the number of steps that all lanes have. Only the last lane may have fewer than the
  /// others.
  SELECTIVE_SCAN_HD int64_t common_steps() const {
    const int64_t last =
        first_step + (split.lanes_are_segments ? lanes - 1 : 0) * split.segment_steps;
    return lesser_of(split.segment_steps, params.seqlen - last);
  }
  /// Returns whether the last lane (every lane, if lanes are rows) contains the end of its row.
  SELECTIVE_SCAN_HD bool has_last_segment() const {
    return (split.lanes_are_segments ? segment + lanes : segment + 1) == split.segments;
  }

  SELECTIVE_SCAN_HD int64_t map_index(int lane) const {
    const int64_t row = outer * split.lane_rows + first_row + (split.lanes_are_segments ? 0 : lane);
    return row * split.segments + segment + (split.lanes_are_segments ? lane : 0);
  }

  /// Returns one component of steps [first, first + steps) of `count` lanes as a section.
  SELECTIVE_SCAN_HD Section section(const DiagonalArray& array, int64_t first, int64_t steps,
                                    int count, int64_t component) const {
    const int64_t offset = row_offset(array) + (first_step + first) * array.step + component;
    return {element_at(array, offset),
            array.dtype,
            steps,
            count,
            array.step,
            split.lanes_are_segments ? split.segment_steps * array.step : lane_row_stride(array)};
  }
  /// Returns the offset at which a lane's row begins.
  SELECTIVE_SCAN_HD int64_t lane_offset(const DiagonalArray& array, int lane) const {
    return row_offset(array) + (split.lanes_are_segments ? 0 : lane * lane_row_stride(array));
  }
  SELECTIVE_SCAN_HD int64_t lane_row_stride(const DiagonalArray& array) const {
    return params.row_dims == 0 ? 0 : array.row[split.lane_dim];
  }

 private:
  SELECTIVE_SCAN_HD int64_t row_offset(const DiagonalArray& array) const {
    return split.outer_offset(params, array, outer) + first_row * lane_row_stride(array);
  }
};

template <class Step, class Params>
class DiagonalKernel {
  using V = typename Step::Value;
  using R = real_t<V>;
  using T = typename R::Scalar;
  using ScalarValue = std::conditional_t<is_complex_v<V>, Complex<T>, T>;
  using Map = AffineMap<ScalarValue>;
  using Wide = std::conditional_t<is_complex_v<V>, Complex<double>, double>;
  static constexpr int kWidth = R::kWidth;
  static constexpr int64_t kSteps = 64;
  static constexpr int64_t kPitch = kWidth * kComponents<V>;
  using Tile = T[kSteps * kPitch];

 public:
  /// Stores the map of every chain of a task.
  static void map(const Params& params, const DiagonalSplit& split, int64_t task, void* maps) {
    DiagonalKernel kernel(params, split, task);
    kernel.for_all_steps([&](int64_t first, int64_t steps, int lanes) {
      kernel.load_inputs(first, steps, lanes);
      for (int64_t t = 0; t < steps; ++t) {
        const V a = kernel.get(kernel.a_, t);
        Step::advance(a, kernel.get(kernel.x_, t), kernel.state_);
        kernel.product_ = Step::factor(a) * kernel.product_;
      }
    });
    for (int lane = 0; lane < kernel.chains_.lanes; ++lane) {
      static_cast<Map*>(maps)[kernel.chains_.map_index(lane)] = {lane_of(kernel.product_, lane),
                                                                 lane_of(kernel.state_, lane)};
    }
  }

  /// The offsets of `maps` are the states that segments begin with; `maps` is unused without
  /// segments.
  static void scan(const Params& params, const DiagonalSplit& split, int64_t task,
                   const void* maps) {
    DiagonalKernel kernel(params, split, task);
    kernel.start(static_cast<const Map*>(maps));
    kernel.for_all_steps([&](int64_t first, int64_t steps, int lanes) {
      kernel.load_inputs(first, steps, lanes);
      if constexpr (Step::kBackward) kernel.load_states(first, steps, lanes);
      V sum{};
      for (int64_t t = 0; t < steps; ++t) {
        const V result =
            Step::advance(kernel.get(kernel.a_, t), kernel.get(kernel.x_, t), kernel.state_);
        kernel.put(kernel.x_, t, result);
        if constexpr (Step::kBackward) {
          const V da = result * conj(kernel.get(kernel.h_, t));
          kernel.put(kernel.h_, t, da);
          sum += da;
        }
      }
      if constexpr (Step::kBackward) {
        kernel.store(params.db, first, steps, lanes, kernel.x_);
        if (params.sum_da) {
          for (int lane = 0; lane < lanes; ++lane) {
            kernel.sums_[lane] += widened(lane_of(sum, lane));
          }
        } else {
          kernel.store(params.da, first, steps, lanes, kernel.h_);
        }
      } else {
        kernel.store(params.h, first, steps, lanes, kernel.x_);
      }
    });
    if constexpr (Step::kBackward) kernel.finish();
  }

 private:
  DiagonalKernel(const Params& params, const DiagonalSplit& split, int64_t task)
      : params_(params), chains_(params, split, task, kWidth) {}

  /// Calls visit for the tiles of all lanes, then for the remaining tiles of all but the last lane,
  /// which may be shorter.
  template <class Visit>
  void for_all_steps(const Visit& visit) {
    const int64_t common = chains_.common_steps();
    for (int64_t first = 0; first < common; first += kSteps) {
      visit(first, lesser_of(kSteps, common - first), chains_.lanes);
    }
    const bool is_shorter = chains_.split.lanes_are_segments && chains_.lanes > 1;
    const int64_t end = is_shorter ? chains_.split.segment_steps : common;
    if (common == end) return;
    const int last = chains_.lanes - 1;
    const ScalarValue state = lane_of(state_, last);
    const ScalarValue product = lane_of(product_, last);
    for (int64_t first = common; first < end; first += kSteps) {
      visit(first, lesser_of(kSteps, end - first), last);
    }
    set_lane(state_, last, state);
    set_lane(product_, last, product);
  }

  // --- moving tiles

  static SELECTIVE_SCAN_HD V get(const Tile& tile, int64_t t) {
    return load_number<V>(tile + t * kPitch, kWidth);
  }
  static SELECTIVE_SCAN_HD void put(Tile& tile, int64_t t, V value) {
    store_number(value, tile + t * kPitch, kWidth);
  }

  /// If steps are adjacent in memory, both components form one array of twice as many values; for a
  /// negative stride the imaginary parts come first.
  static bool is_interleaved(const DiagonalArray& array) {
    return is_complex_v<V> && array.imag == 1 && (array.step == 2 || array.step == -2);
  }
  Section interleaved(const DiagonalArray& array, int64_t first, int64_t steps, int lanes) const {
    const bool is_reversed = array.step < 0;
    Section both = chains_.section(array, first, 2 * steps, lanes, is_reversed ? 1 : 0);
    both.row_stride = is_reversed ? -1 : 1;
    both.rows_ahead = 2 * kSteps;
    return both;
  }
  static void swap_components(const Tile& from, int64_t steps, Tile& to) {
    if constexpr (is_complex_v<V>) {
      for (int64_t t = 0; t < steps; ++t) {
        const V value = get(from, t);
        put(to, t, {value.im, value.re});
      }
    }
  }

  void load(const DiagonalArray& array, int64_t first, int64_t steps, int lanes, Tile& tile) const {
    if (is_interleaved(array)) {
      load_tile<R>(interleaved(array, first, steps, lanes), tile, kWidth);
      if (array.step < 0) swap_components(tile, steps, tile);
      return;
    }
    const int64_t rows = array.step == 0 ? 1 : steps;  // the same value for all steps
    Section real = chains_.section(array, first, rows, lanes, 0);
    real.rows_ahead = kSteps;
    load_tile<R>(real, tile, kPitch);
    if constexpr (is_complex_v<V>) {
      if (array.imag != 0) {
        load_tile<R>(chains_.section(array, first, rows, lanes, array.imag), tile + kWidth, kPitch);
      } else {
        for (int64_t t = 0; t < rows; ++t) R(T(0)).store(tile + t * kPitch + kWidth);
      }
    }
    for (int64_t t = rows; t < steps; ++t) put(tile, t, get(tile, 0));
  }

  void store(const DiagonalArray& array, int64_t first, int64_t steps, int lanes,
             const Tile& tile) const {
    if (is_interleaved(array)) {
      const Section both = interleaved(array, first, steps, lanes);
      if (array.step > 0) return store_tile<R>(both, tile, kWidth);
      alignas(64) Tile swapped;
      swap_components(tile, steps, swapped);
      return store_tile<R>(both, swapped, kWidth);
    }
    store_tile<R>(chains_.section(array, first, steps, lanes, 0), tile, kPitch);
    if (is_complex_v<V> && array.imag != 0) {
      store_tile<R>(chains_.section(array, first, steps, lanes, array.imag), tile + kWidth, kPitch);
    }
  }

  void load_inputs(int64_t first, int64_t steps, int lanes) {
    load(params_.a, first, steps, lanes, a_);
    if constexpr (Step::kBackward) {
      load(params_.dh, first, steps, lanes, x_);
    } else {
      load(params_.b, first, steps, lanes, x_);
    }
  }

  /// Loads the states before the steps. The state before a row's first step, which is visited last,
  /// is the row's initial state.
  void load_states(int64_t first, int64_t steps, int lanes) {
    const bool ends = chains_.has_last_segment() && lanes == chains_.lanes &&
                      first + steps == chains_.common_steps();
    const int64_t read = ends ? steps - 1 : steps;
    if (read > 0) load(params_.h_previous, first, read, lanes, h_);
    if (!ends) return;
    V before = initial_states();
    if (chains_.split.lanes_are_segments && lanes > 1) {
      const ScalarValue of_last = lane_of(before, lanes - 1);
      Tile row;
      load(params_.h_previous, first + steps - 1, 1, lanes - 1, row);
      before = get(row, 0);
      set_lane(before, lanes - 1, of_last);
    }
    put(h_, steps - 1, before);
  }

  /// Returns the value of each lane's row. It is meaningful in the lanes whose chain is the first,
  /// or last, segment of its row.
  V load_rows(const DiagonalArray& array) const {
    V values{};
    for (int lane = 0; lane < chains_.lanes; ++lane) {
      set_lane(values, lane, load_value<ScalarValue>(array, chains_.lane_offset(array, lane)));
    }
    return values;
  }

  V initial_states() const {
    return params_.initial_state.present() ? load_rows(params_.initial_state) : V{};
  }

  void start(const Map* maps) {
    if (chains_.split.segments > 1) {
      for (int lane = 0; lane < chains_.lanes; ++lane) {
        set_lane(state_, lane, maps[chains_.map_index(lane)].offset);
      }
    } else if (!Step::kBackward) {
      state_ = initial_states();
    }
  }

  // --- the end of the backward pass

  static SELECTIVE_SCAN_HD Wide widened(ScalarValue value) {
    if constexpr (is_complex_v<V>) {
      return {value.re, value.im};
    } else {
      return value;
    }
  }

  void store_value(const DiagonalArray& array, int64_t offset, Wide value) const {
    const auto put_component = [&](double component, int64_t place) {
      store_element(array.data, array.dtype, offset + place, static_cast<T>(component));
    };
    put_component(real(value), 0);
    if constexpr (is_complex_v<V>) {
      if (array.imag != 0) put_component(value.im, array.imag);
    }
  }

  void finish() const {
    const bool are_segments = chains_.split.lanes_are_segments;
    for (int lane = 0; lane < chains_.lanes; ++lane) {
      const int64_t segment = chains_.segment + (are_segments ? lane : 0);
      if (params_.sum_da) {
        const DiagonalArray& da = params_.da;
        store_value(da, chains_.lane_offset(da, lane) + segment * da.step, sums_[lane]);
      }
      const DiagonalArray& dinitial = params_.dinitial_state;
      if (dinitial.present() && segment == chains_.split.segments - 1) {
        store_value(dinitial, chains_.lane_offset(dinitial, lane), widened(lane_of(state_, lane)));
      }
    }
  }

  // --- lanes

  static SELECTIVE_SCAN_HD ScalarValue lane_of(V value, int lane) {
    if constexpr (is_complex_v<V>) {
      return {value.re.lane(lane), value.im.lane(lane)};
    } else {
      return value.lane(lane);
    }
  }
  static SELECTIVE_SCAN_HD void set_lane(V& value, int lane, ScalarValue number) {
    if constexpr (is_complex_v<V>) {
      value.re.set_lane(lane, number.re);
      value.im.set_lane(lane, number.im);
    } else {
      value.set_lane(lane, number);
    }
  }

  const Params& params_;
  Chains<Params> chains_;
  V state_{};
  V product_ = one<V>();
  Wide sums_[kWidth] = {};
  alignas(64) Tile a_;
  alignas(64) Tile x_;  // b or dh, then h or g
  alignas(64) Tile h_;  // backward: the states before the steps, then da
};

}  // namespace selective_scan::cpu
