// Updates the states of one task.
//
// Rows of states are staged in the compute type, a few channels at a time. States that have this
// type, are contiguous and fill whole vectors are read and written in place instead, if the call
// has one step or stores only the state after its last step. Rows of A are read in place, too,
// unless they hold log(−A).
#pragma once

#include <cstdint>
#include <cstring>

#include "../selective/block.h"
#include "../simd/tile.h"
#include "../work.h"
#include "advance.h"
#include "kernels.h"

namespace selective_scan::cpu {

template <class State>
class UpdateKernel {
  using R = real_t<State>;
  using T = scalar_t<State>;
  static constexpr int64_t kWidth = R::kWidth;

  struct Scratch {
    Arena arena;
    T* delta;  // (row, step, channel), like x, z, input_delta and y
    T* x;
    T* z;
    T* input_delta;
    T* y;
    T* dt_bias;  // (channel), like D
    T* D;
    T* B;  // (row, step, component, state)
    T* C;
    T* A;  // (channel, component, state), of one tile
    T* h;

    SELECTIVE_SCAN_HD Scratch(const UpdateParams& params, int64_t rows, int64_t channels,
                              void* base)
        : arena{static_cast<char*>(base)} {
      const int64_t row_steps = rows * params.steps;
      const int64_t of_step = round_up(channels, kWidth);
      const int64_t pitch = row_pitch(params);
      for (T** steps : {&delta, &x, &z, &input_delta, &y})
        *steps = arena.take<T>(row_steps * of_step);
      for (T** channel : {&dt_bias, &D}) *channel = arena.take<T>(of_step);
      for (T** steps : {&B, &C}) *steps = arena.take<T>(row_steps * pitch);
      for (T** tile : {&A, &h}) *tile = arena.take<T>(kWidth * pitch);
    }
  };

 public:
  static int64_t scratch_bytes(const UpdateParams& params, int64_t rows, int64_t channels) {
    return Scratch(params, rows, channels, nullptr).arena.bytes;
  }

  static void run(const UpdateParams& params, const UpdateTask& task, void* scratch_base) {
    const Scratch scratch(params, task.rows, task.channels, scratch_base);
    const int64_t pitch = round_up(task.channels, kWidth);
    load_channels(params.dt_bias, params, task, 0, 1, pitch, scratch.dt_bias);
    load_channels(params.D, params, task, 0, 1, pitch, scratch.D);
    for_each_row(params, task,
                 [&](int64_t row, int64_t) { load_inputs(params, task, row, pitch, scratch); });
    for (int64_t first = 0; first < task.channels; first += kWidth) {
      StateTile<State> tile = tile_of(params, task, first, scratch);
      for_each_row(params, task, [&](int64_t row, int64_t source) {
        update_tile(params, task, row, source, first, pitch, scratch, tile);
      });
    }
    for (int64_t row = 0; row < task.rows; ++row) {
      T* const y = scratch.y + row * params.steps * pitch;
      if (params.source(task.first_row + row) == UpdateParams::kNoSlot) {
        memset(y, 0, params.steps * pitch * sizeof(T));
      } else {
        finish_outputs(params, row, pitch, scratch);
      }
      store_rows<R>(channel_section(params.out, params, task, row), y, pitch);
    }
  }

 private:
  static SELECTIVE_SCAN_HD int64_t padded_states(const UpdateParams& params) {
    return round_up(params.dstate, kWidth);
  }
  static SELECTIVE_SCAN_HD int64_t row_pitch(const UpdateParams& params) {
    return kComponents<State> * padded_states(params);
  }

  /// Calls visit(row, source) for the rows that have a state, counted from the task's first row.
  template <class Visit>
  static void for_each_row(const UpdateParams& params, const UpdateTask& task, const Visit& visit) {
    for (int64_t row = 0; row < task.rows; ++row) {
      const int64_t source = params.source(task.first_row + row);
      if (source != UpdateParams::kNoSlot) visit(row, source);
    }
  }

  /// Returns the section (step, channel) of x, dt, z or out. In D and dt_bias all rows and steps
  /// are the same.
  static Section channel_section(const ArrayView& view, const UpdateParams& params,
                                 const UpdateTask& task, int64_t row) {
    const int64_t offset = (task.first_row + row) * view.batch + task.head * view.group +
                           task.first_channel * view.channel;
    return {
        element_at(view, offset), view.dtype, params.steps, task.channels, view.step, view.channel};
  }

  static void load_channels(const ArrayView& view, const UpdateParams& params,
                            const UpdateTask& task, int64_t row, int64_t steps, int64_t pitch,
                            T* tile) {
    if (!view.present()) {
      memset(tile, 0, steps * pitch * sizeof(T));
      return;
    }
    Section section = channel_section(view, params, task, row);
    section.rows = steps;
    load_rows<R>(section, tile, pitch);
  }

  /// Load or store rows of states, (row, component, state). Loaded rows are padded with zeros.
  static void load_state_rows(const ArrayView& view, int64_t offset, int64_t rows,
                              int64_t row_stride, const UpdateParams& params, T* tile) {
    load_parts<State>(state_rows(view, offset, rows, row_stride, params), view, tile,
                      row_pitch(params), padded_states(params));
  }
  static void store_state_rows(const ArrayView& view, int64_t offset, int64_t rows,
                               int64_t row_stride, const UpdateParams& params, const T* tile) {
    store_parts<State>(state_rows(view, offset, rows, row_stride, params), view, tile,
                       row_pitch(params), padded_states(params));
  }
  static Section state_rows(const ArrayView& view, int64_t offset, int64_t rows, int64_t row_stride,
                            const UpdateParams& params) {
    return {element_at(view, offset), view.dtype, rows, params.dstate, row_stride, view.state};
  }

  static void load_inputs(const UpdateParams& params, const UpdateTask& task, int64_t row,
                          int64_t pitch, const Scratch& scratch) {
    const int64_t first_step = row * params.steps;
    const auto load_steps = [&](const ArrayView& view, T* tile) {
      if (!view.present()) return;
      load_channels(view, params, task, row, params.steps, pitch, tile + first_step * pitch);
    };
    load_steps(params.x, scratch.x);
    load_steps(params.dt, scratch.delta);
    R* deltas = reinterpret_cast<R*>(scratch.delta + first_step * pitch);
    const R* biases = reinterpret_cast<const R*>(scratch.dt_bias);
    const int64_t vectors = pitch / kWidth;
    for (int64_t step = 0; step < params.steps; ++step) {
      for (int64_t vector = 0; vector < vectors; ++vector) {
        R& delta = deltas[step * vectors + vector];
        delta = delta + biases[vector];
        if (params.dt_softplus) delta = VectorMath::softplus(delta);
        delta = finite_step(delta);
      }
    }
    load_steps(params.z, scratch.z);
    load_steps(params.input_delta, scratch.input_delta);
    const auto load_projection = [&](const ArrayView& view, T* tile) {
      const int64_t offset =
          (task.first_row + row) * view.batch + params.group_of(task.head) * view.group;
      load_state_rows(view, offset, params.steps, view.step, params,
                      tile + first_step * row_pitch(params));
    };
    load_projection(params.B, scratch.B);
    load_projection(params.C, scratch.C);
  }

  /// Replaces log(−A) by the poles, in adjacent rows of channels.
  static void exponentiate(const UpdateParams& params, int64_t channels, T* rows) {
    R* const poles = reinterpret_cast<R*>(rows);
    for (int64_t i = 0; i < channels * row_pitch(params) / kWidth; ++i) {
      poles[i] = -VectorMath::exp(poles[i]);
    }
  }

  /// Returns whether rows of states can be used in place.
  static bool is_plain(const ArrayView& view, const UpdateParams& params) {
    constexpr DType kOwn = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
    return !is_complex_v<State> && view.dtype == kOwn && view.state == 1 &&
           params.dstate % kWidth == 0;
  }

  /// Returns the offset of a tile's states in a slot, or of its poles, which have no slots.
  static SELECTIVE_SCAN_HD int64_t offset_of(const ArrayView& view, int64_t slot,
                                             const UpdateTask& task, int64_t first) {
    return slot * view.batch + task.head * view.group + (task.first_channel + first) * view.channel;
  }
  static SELECTIVE_SCAN_HD StateRows<T> rows_at(const ArrayView& view, int64_t offset) {
    return {static_cast<T*>(element_at(view, offset)), view.channel, 0};
  }
  static SELECTIVE_SCAN_HD StateRows<const T> as_const(const StateRows<T>& rows) {
    return {rows.data, rows.pitch, rows.imaginary};
  }

  /// Returns a tile of the channels from `first` on, with the poles, which all rows share.
  static StateTile<State> tile_of(const UpdateParams& params, const UpdateTask& task, int64_t first,
                                  const Scratch& scratch) {
    StateTile<State> tile;
    tile.channels = lesser_of(kWidth, task.channels - first);
    tile.states = padded_states(params);
    const int64_t offset = offset_of(params.A, 0, task, first);
    if (is_plain(params.A, params) && !params.A_is_log) {
      tile.A = as_const(rows_at(params.A, offset));
    } else {
      load_state_rows(params.A, offset, tile.channels, params.A.channel, params, scratch.A);
      if (params.A_is_log) exponentiate(params, tile.channels, scratch.A);
      tile.A = {scratch.A, row_pitch(params), padded_states(params)};
    }
    return tile;
  }

  static void update_tile(const UpdateParams& params, const UpdateTask& task, int64_t row,
                          int64_t source, int64_t first, int64_t pitch, const Scratch& scratch,
                          StateTile<State>& tile) {
    const auto destination_of = [&](int64_t step) {
      return params.destination(task.first_row + row, step, source);
    };
    const int64_t from = offset_of(params.state, source, task, first);
    tile.after = {scratch.h, row_pitch(params), padded_states(params)};
    // States between the steps that are not wanted pass through the place of the last ones.
    const bool in_place =
        is_plain(params.state, params) && (params.steps == 1 || !params.destination_by_step);
    if (in_place) {
      tile.before = as_const(rows_at(params.state, from));
      const int64_t destination = destination_of(params.steps - 1);
      if (destination != UpdateParams::kNoSlot) {
        tile.after = rows_at(params.state, offset_of(params.state, destination, task, first));
      }
    } else {
      tile.before = as_const(tile.after);
      load_state_rows(params.state, from, tile.channels, params.state.channel, params, scratch.h);
    }
    for (int64_t step = 0; step < params.steps; ++step) {
      const int64_t row_step = row * params.steps + step;
      const int64_t place = row_step * pitch + first;
      tile.delta = scratch.delta + place;
      tile.x = scratch.x + place;
      if (params.input_delta.present()) tile.input_delta = scratch.input_delta + place;
      tile.B = {scratch.B + row_step * row_pitch(params), 0, padded_states(params)};
      tile.C = {scratch.C + row_step * row_pitch(params), 0, padded_states(params)};
      TileSteps<State>::kMethods[params.method](tile, scratch.y + place);
      tile.before = as_const(tile.after);
      const int64_t destination = destination_of(step);
      if (in_place || destination == UpdateParams::kNoSlot) continue;
      store_state_rows(params.state, offset_of(params.state, destination, task, first),
                       tile.channels, params.state.channel, params, scratch.h);
    }
  }

  /// Computes out from y, vector by vector, for all steps of a row.
  static void finish_outputs(const UpdateParams& params, int64_t row, int64_t pitch,
                             const Scratch& scratch) {
    const int64_t first = row * params.steps * pitch;
    const int64_t vectors_per_step = pitch / kWidth;
    R* ys = reinterpret_cast<R*>(scratch.y + first);
    const R* xs = reinterpret_cast<const R*>(scratch.x + first);
    const R* zs = reinterpret_cast<const R*>(scratch.z + first);
    const R* D = reinterpret_cast<const R*>(scratch.D);
    for (int64_t i = 0; i < params.steps * vectors_per_step; ++i) {
      R y = ys[i] + D[i % vectors_per_step] * xs[i];
      if (params.z.present()) y = y * (zs[i] * VectorMath::sigmoid(zs[i]));
      ys[i] = y;
    }
  }
};

}  // namespace selective_scan::cpu
