// The update of the states of one task.
//
// Rows of states are staged as numbers of the compute type, a few channels at a time. Where a call
// has one step, and states are of that type, side by side, and fill whole vectors, nothing is
// staged: they are read and written where they are. So are the rows of A.
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
    T* delta;  // (step, channel), and so are x and y
    T* x;
    T* z;
    T* input_delta;
    T* y;
    T* dt_bias;  // (channel), and so is D
    T* D;
    T* B;  // (step, component, state)
    T* C;
    T* A;  // of a tile: (channel, component, state)
    T* h;

    SELECTIVE_SCAN_HD Scratch(const UpdateParams& params, int64_t channels, void* base)
        : arena{static_cast<char*>(base)} {
      const int64_t row = round_up(channels, kWidth);
      const int64_t pitch = row_pitch(params);
      for (T** steps : {&delta, &x, &z, &input_delta, &y})
        *steps = arena.take<T>(params.steps * row);
      for (T** channel : {&dt_bias, &D}) *channel = arena.take<T>(row);
      for (T** steps : {&B, &C}) *steps = arena.take<T>(params.steps * pitch);
      for (T** tile : {&A, &h}) *tile = arena.take<T>(kWidth * pitch);
    }
  };

 public:
  static int64_t scratch_bytes(const UpdateParams& params, int64_t channels) {
    return Scratch(params, channels, nullptr).arena.bytes;
  }

  static void run(const UpdateParams& params, const UpdateTask& task, void* scratch_base) {
    const Scratch scratch(params, task.channels, scratch_base);
    const int64_t pitch = round_up(task.channels, kWidth);
    const int64_t source = params.source(task.row);
    if (source == UpdateParams::kNoSlot) {
      memset(scratch.y, 0, params.steps * pitch * sizeof(T));
    } else {
      load_inputs(params, task, pitch, scratch);
      for (int64_t first = 0; first < task.channels; first += kWidth) {
        update_tile(params, task, source, first, pitch, scratch);
      }
      finish_outputs(params, params.steps * pitch / kWidth, pitch / kWidth, scratch);
    }
    store_tile<R>(channel_section(params.out, params, task), scratch.y, pitch);
  }

 private:
  static SELECTIVE_SCAN_HD int64_t padded_states(const UpdateParams& params) {
    return round_up(params.dstate, kWidth);
  }
  static SELECTIVE_SCAN_HD int64_t row_pitch(const UpdateParams& params) {
    return kComponents<State> * padded_states(params);
  }

  /// (step, channel) of x, dt, z, out; of D and dt_bias all steps are the same.
  static Section channel_section(const ArrayView& view, const UpdateParams& params,
                                 const UpdateTask& task) {
    const int64_t offset =
        task.row * view.batch + task.head * view.group + task.first_channel * view.channel;
    return {
        element_at(view, offset), view.dtype, params.steps, task.channels, view.step, view.channel};
  }

  static void load_channels(const ArrayView& view, const UpdateParams& params,
                            const UpdateTask& task, int64_t steps, int64_t pitch, T* tile) {
    if (!view.present()) {
      memset(tile, 0, steps * pitch * sizeof(T));
      return;
    }
    Section section = channel_section(view, params, task);
    section.rows = steps;
    load_tile<R>(section, tile, pitch);
  }

  /// Rows of states, (row, component, state), and the zeros behind each.
  static void load_state_rows(const ArrayView& view, int64_t offset, int64_t rows,
                              int64_t row_stride, const UpdateParams& params, T* tile) {
    const Section section = state_rows(view, offset, rows, row_stride, params);
    load_tile<R>(section, tile, row_pitch(params));
    if constexpr (is_complex_v<State>) {
      load_tile<R>(imaginary_part(section, view), tile + padded_states(params), row_pitch(params));
    }
  }
  static void store_state_rows(const ArrayView& view, int64_t offset, int64_t rows,
                               int64_t row_stride, const UpdateParams& params, const T* tile) {
    const Section section = state_rows(view, offset, rows, row_stride, params);
    store_tile<R>(section, tile, row_pitch(params));
    if constexpr (is_complex_v<State>) {
      store_tile<R>(imaginary_part(section, view), tile + padded_states(params), row_pitch(params));
    }
  }
  static Section state_rows(const ArrayView& view, int64_t offset, int64_t rows, int64_t row_stride,
                            const UpdateParams& params) {
    return {element_at(view, offset), view.dtype, rows, params.dstate, row_stride, view.state};
  }

  static void load_inputs(const UpdateParams& params, const UpdateTask& task, int64_t pitch,
                          const Scratch& scratch) {
    load_channels(params.x, params, task, params.steps, pitch, scratch.x);
    load_channels(params.dt, params, task, params.steps, pitch, scratch.delta);
    load_channels(params.dt_bias, params, task, 1, pitch, scratch.dt_bias);
    R* deltas = reinterpret_cast<R*>(scratch.delta);
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
    load_channels(params.D, params, task, 1, pitch, scratch.D);
    const auto load_steps = [&](const ArrayView& view, T* tile) {
      load_channels(view, params, task, view.present() ? params.steps : 0, pitch, tile);
    };
    load_steps(params.z, scratch.z);
    load_steps(params.input_delta, scratch.input_delta);
    const auto load_projection = [&](const ArrayView& view, T* tile) {
      const int64_t offset = task.row * view.batch + params.group_of(task.head) * view.group;
      load_state_rows(view, offset, params.steps, view.step, params, tile);
    };
    load_projection(params.B, scratch.B);
    load_projection(params.C, scratch.C);
  }

  /// Poles from log(−A), a channel's rows one behind the other.
  static void exponentiate(const UpdateParams& params, int64_t channels, T* rows) {
    R* const poles = reinterpret_cast<R*>(rows);
    for (int64_t i = 0; i < channels * row_pitch(params) / kWidth; ++i) {
      poles[i] = -VectorMath::exp(poles[i]);
    }
  }

  /// Whether rows of states can be used where they are.
  static bool is_plain(const ArrayView& view, const UpdateParams& params) {
    constexpr DType kOwn = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
    return !is_complex_v<State> && view.dtype == kOwn && view.state == 1 &&
           params.dstate % kWidth == 0;
  }

  static void update_tile(const UpdateParams& params, const UpdateTask& task, int64_t source,
                          int64_t first, int64_t pitch, const Scratch& scratch) {
    StateTile<State> tile;
    const int64_t left = task.channels - first;
    tile.channels = left < kWidth ? left : kWidth;
    tile.states = padded_states(params);
    const auto offset_of = [&](const ArrayView& view, int64_t slot) {
      return slot * view.batch + task.head * view.group +
             (task.first_channel + first) * view.channel;
    };
    const StateRows<T> staged{scratch.h, row_pitch(params), padded_states(params)};
    const auto rows_at = [&](const ArrayView& view, int64_t slot) {
      return StateRows<T>{static_cast<T*>(element_at(view, offset_of(view, slot))), view.channel,
                          0};
    };
    const auto as_const = [](const StateRows<T>& rows) {
      return StateRows<const T>{rows.data, rows.pitch, rows.imaginary};
    };

    if (is_plain(params.A, params) && !params.A_is_log) {
      tile.A = as_const(rows_at(params.A, 0));
    } else {
      load_state_rows(params.A, offset_of(params.A, 0), tile.channels, params.A.channel, params,
                      scratch.A);
      if (params.A_is_log) exponentiate(params, tile.channels, scratch.A);
      tile.A = {scratch.A, row_pitch(params), padded_states(params)};
    }
    const bool in_place = params.steps == 1 && is_plain(params.state, params);
    tile.before = as_const(in_place ? rows_at(params.state, source) : staged);
    tile.after = staged;
    if (!in_place) {
      load_state_rows(params.state, offset_of(params.state, source), tile.channels,
                      params.state.channel, params, scratch.h);
    }
    for (int64_t step = 0; step < params.steps; ++step) {
      const int64_t destination = params.destination(task.row, step, source);
      const bool has_destination = destination != UpdateParams::kNoSlot;
      if (in_place && has_destination) tile.after = rows_at(params.state, destination);
      tile.delta = scratch.delta + step * pitch + first;
      tile.x = scratch.x + step * pitch + first;
      if (params.input_delta.present()) {
        tile.input_delta = scratch.input_delta + step * pitch + first;
      }
      tile.B = {scratch.B + step * row_pitch(params), 0, padded_states(params)};
      tile.C = {scratch.C + step * row_pitch(params), 0, padded_states(params)};
      TileSteps<State>::kMethods[params.method](tile, scratch.y + step * pitch + first);
      if (in_place || !has_destination) continue;
      store_state_rows(params.state, offset_of(params.state, destination), tile.channels,
                       params.state.channel, params, scratch.h);
    }
  }

  /// Makes out of y, vector by vector of all steps.
  static void finish_outputs(const UpdateParams& params, int64_t vectors, int64_t vectors_per_step,
                             const Scratch& scratch) {
    R* ys = reinterpret_cast<R*>(scratch.y);
    const R* xs = reinterpret_cast<const R*>(scratch.x);
    const R* zs = reinterpret_cast<const R*>(scratch.z);
    const R* D = reinterpret_cast<const R*>(scratch.D);
    for (int64_t i = 0; i < vectors; ++i) {
      R y = ys[i] + D[i % vectors_per_step] * xs[i];
      if (params.z.present()) y = y * (zs[i] * VectorMath::sigmoid(zs[i]));
      ys[i] = y;
    }
  }
};

}  // namespace selective_scan::cpu
