// What the forward and the backward kernel share: the sections of the arrays that belong to a
// block, and the inputs of a block as the kernels want them.
//
// The lanes of a vector are channels. Every lane scans a system of its own, so sums over the states
// need no shuffling, any dstate fills the vectors, and no lane's number meets another's. The states
// of a vector of channels are an array of State (R, or Complex<R>), one for each of dstate.
#pragma once

#include <cstdint>

#include "../core/discretization.h"
#include "../core/params.h"
#include "tile.h"
#include "vector.h"
#include "vector_math.h"
#include "work.h"

namespace selective_scan::cpu {

template <class R, bool kIsComplex>
using state_t = std::conditional_t<kIsComplex, Complex<R>, R>;

template <class State>
constexpr int kComponents = is_complex_v<State> ? 2 : 1;

/// The states that a kernel carries through a chunk in registers at a time.
constexpr int kStatesInRegisters = 4;

SELECTIVE_SCAN_HD int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// c + a·b, each component two fused multiply-adds where complex.
template <class R>
SELECTIVE_SCAN_HD R multiply_add(R a, R b, R c) {
  return c + a * b;
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> multiply_add(Complex<R> a, Complex<R> b, Complex<R> c) {
  return {(c.re + a.re * b.re) - a.im * b.im, (c.im + a.re * b.im) + a.im * b.re};
}

/// c + Re(a·b)
template <class R>
SELECTIVE_SCAN_HD R add_real_of_product(R a, R b, R c) {
  return c + a * b;
}
template <class R>
SELECTIVE_SCAN_HD R add_real_of_product(Complex<R> a, Complex<R> b, R c) {
  return (c + a.re * b.re) - a.im * b.im;
}

/// y = kOutputScale·Re(Σ C·h)
template <class State>
constexpr double kOutputScale = is_complex_v<State> ? 2 : 1;

SELECTIVE_SCAN_HD void* element_at(const ArrayView& view, int64_t offset) {
  return static_cast<char*>(view.data) + offset * element_size(view.dtype);
}

/// (step, channel) of `lanes` channels; rows are steps.
SELECTIVE_SCAN_HD Section sequence_section(const ArrayView& view, int64_t batch, int64_t channel,
                                           int64_t lanes, int64_t first_step, int64_t steps) {
  return {element_at(view, batch * view.batch + channel * view.channel + first_step * view.step),
          view.dtype,
          steps,
          lanes,
          view.step,
          view.channel};
}

/// (channel): one row.
SELECTIVE_SCAN_HD Section channel_section(const ArrayView& view, int64_t channel, int64_t lanes) {
  return {element_at(view, channel * view.channel), view.dtype, 1, lanes, 0, view.channel};
}

/// (state, channel), the real parts; rows are states.
SELECTIVE_SCAN_HD Section state_section(const ArrayView& view, int64_t batch, int64_t channel,
                                        int64_t lanes, int64_t dstate) {
  return {element_at(view, batch * view.batch + channel * view.channel),
          view.dtype,
          dstate,
          lanes,
          view.state,
          view.channel};
}

/// (state, step) of a variable B or C, the real parts; rows are states.
SELECTIVE_SCAN_HD Section projection_section(const ArrayView& view, int64_t batch, int64_t group,
                                             int64_t dstate, int64_t first_step, int64_t steps) {
  return {element_at(view, batch * view.batch + group * view.group + first_step * view.step),
          view.dtype,
          dstate,
          steps,
          view.state,
          view.step};
}

/// A contiguous (..., channel, state) array of the compute type from `data` on.
template <class State>
SELECTIVE_SCAN_HD ArrayView contiguous_states(void* data, const ScanParams& params) {
  ArrayView view;
  view.data = data;
  view.dtype = sizeof(scalar_t<State>) == 8 ? DType::kFloat64 : DType::kFloat32;
  view.state = kComponents<State>;
  view.channel = params.dstate * view.state;
  view.batch = params.dim * view.channel;
  view.imag = 1;
  return view;
}

/// The states saved after chunk `chunk` of every batch entry.
template <class State>
SELECTIVE_SCAN_HD ArrayView saved_states(const ScanParams& params, int64_t chunk) {
  ArrayView view = contiguous_states<State>(params.states, params);
  view.data = element_at(view, chunk * view.batch);
  view.batch *= num_saved_states(params.seqlen);
  return view;
}

SELECTIVE_SCAN_HD Section imaginary_part(Section section, const ArrayView& view) {
  section.data = static_cast<char*>(section.data) + view.imag * element_size(view.dtype);
  return section;
}

/// Reads (state, channel) into an array of State; zeros where the view is absent.
template <class State>
void load_states(const ArrayView& view, int64_t batch, int64_t channel, int64_t lanes,
                 int64_t dstate, State* states) {
  using R = real_t<State>;
  if (!view.present()) {
    for (int64_t n = 0; n < dstate; ++n) states[n] = State{};
    return;
  }
  const Section section = state_section(view, batch, channel, lanes, dstate);
  scalar_t<State>* tile = reinterpret_cast<scalar_t<State>*>(states);
  constexpr int64_t kPitch = kComponents<State> * R::kWidth;
  load_tile<R>(section, tile, kPitch);
  if constexpr (is_complex_v<State>) {
    load_tile<R>(imaginary_part(section, view), tile + R::kWidth, kPitch);
  }
}

template <class State>
void store_states(const ArrayView& view, int64_t batch, int64_t channel, int64_t lanes,
                  int64_t dstate, const State* states) {
  using R = real_t<State>;
  const Section section = state_section(view, batch, channel, lanes, dstate);
  const scalar_t<State>* tile = reinterpret_cast<const scalar_t<State>*>(states);
  constexpr int64_t kPitch = kComponents<State> * R::kWidth;
  store_tile<R>(section, tile, kPitch);
  if constexpr (is_complex_v<State>) {
    store_tile<R>(imaginary_part(section, view), tile + R::kWidth, kPitch);
  }
}

/// Reads steps of a variable B or C as (component, state, kStateChunk); imaginary parts follow the
/// real parts of all states.
template <class State>
void load_projection(const ArrayView& view, const Block& block, int64_t dstate, int64_t first_step,
                     int64_t steps, scalar_t<State>* tile) {
  using R = real_t<State>;
  const Section section =
      projection_section(view, block.batch, block.group, dstate, first_step, steps);
  load_tile<R>(section, tile, kStateChunk);
  if constexpr (is_complex_v<State>) {
    load_tile<R>(imaginary_part(section, view), tile + dstate * kStateChunk, kStateChunk);
  }
}

/// B or C of a chunk for one vector of channels: either a tile over (state, step) that all
/// channels share, or numbers of each channel that hold for all steps.
template <class State>
struct Projection {
  const scalar_t<State>* tile = nullptr;  // null: constant
  int64_t imaginary = 0;                  // distance of the imaginary parts in the tile
  const State* constant = nullptr;

  SELECTIVE_SCAN_HD bool is_variable() const { return tile != nullptr; }

  /// Of state n at step t.
  SELECTIVE_SCAN_HD State at(int64_t n, int64_t t) const {
    using R = real_t<State>;
    if (!is_variable()) return constant[n];
    const scalar_t<State>* entry = tile + n * kStateChunk + t;
    if constexpr (is_complex_v<State>) {
      return {R(entry[0]), R(entry[imaginary])};
    } else {
      return R(entry[0]);
    }
  }
};

/// The inputs that hold for all steps, for every vector of channels of a block, and tiles of B, C.
template <class State>
struct BlockInputs {
  using R = real_t<State>;
  using T = scalar_t<State>;

  Pole<State>* poles;  // (vector, state)
  State* B_constant;   // (vector, state), if constant
  State* C_constant;
  T* B_tile;  // (component, state, kStateChunk), if variable
  T* C_tile;
  R* D;  // (vector)
  R* delta_bias;
  State* staging;  // (state)

  SELECTIVE_SCAN_HD BlockInputs(Arena& arena, const ScanParams& params, int64_t vectors) {
    const int64_t dstate = params.dstate;
    const int64_t tile = kComponents<State> * dstate * kStateChunk;
    poles = arena.take<Pole<State>>(vectors * dstate);
    B_constant = arena.take<State>(params.variable_B ? 0 : vectors * dstate);
    C_constant = arena.take<State>(params.variable_C ? 0 : vectors * dstate);
    B_tile = arena.take<T>(params.variable_B ? tile : 0);
    C_tile = arena.take<T>(params.variable_C ? tile : 0);
    D = arena.take<R>(vectors);
    delta_bias = arena.take<R>(vectors);
    staging = arena.take<State>(dstate);
  }

  void load(const ScanParams& params, int64_t vector, int64_t channel, int64_t lanes) {
    const int64_t dstate = params.dstate;
    load_states(params.A, 0, channel, lanes, dstate, staging);
    for (int64_t n = 0; n < dstate; ++n) {
      poles[vector * dstate + n] = make_pole<VectorMath>(staging[n]);
    }
    if (!params.variable_B) {
      load_states(params.B, 0, channel, lanes, dstate, B_constant + vector * dstate);
    }
    if (!params.variable_C) {
      load_states(params.C, 0, channel, lanes, dstate, C_constant + vector * dstate);
    }
    load_channels(params.D, channel, lanes, D[vector]);
    load_channels(params.delta_bias, channel, lanes, delta_bias[vector]);
  }

  void load_steps(const ScanParams& params, const Block& block, int64_t first_step, int64_t steps) {
    if (params.variable_B) {
      load_projection<State>(params.B, block, params.dstate, first_step, steps, B_tile);
    }
    if (params.variable_C) {
      load_projection<State>(params.C, block, params.dstate, first_step, steps, C_tile);
    }
  }

  SELECTIVE_SCAN_HD Projection<State> B(const ScanParams& params, int64_t vector) const {
    return projection(params, params.variable_B ? B_tile : nullptr, B_constant, vector);
  }
  SELECTIVE_SCAN_HD Projection<State> C(const ScanParams& params, int64_t vector) const {
    return projection(params, params.variable_C ? C_tile : nullptr, C_constant, vector);
  }

 private:
  static void load_channels(const ArrayView& view, int64_t channel, int64_t lanes, R& values) {
    values = R(T(0));
    if (view.present()) {
      load_tile<R>(channel_section(view, channel, lanes), reinterpret_cast<T*>(&values), R::kWidth);
    }
  }

  static SELECTIVE_SCAN_HD Projection<State> projection(const ScanParams& params, const T* tile,
                                                        const State* constant, int64_t vector) {
    return {tile, params.dstate * kStateChunk, constant + vector * params.dstate};
  }
};

/// Reads steps of an input sequence; zeros where it is absent.
template <class R>
void load_sequence(const ArrayView& view, const Block& block, int64_t channel, int64_t lanes,
                   int64_t first_step, int64_t steps, R* tile) {
  if (!view.present()) {
    for (int64_t t = 0; t < steps; ++t) tile[t] = R(scalar_t<R>(0));
    return;
  }
  load_tile<R>(sequence_section(view, block.batch, channel, lanes, first_step, steps),
               reinterpret_cast<scalar_t<R>*>(tile), R::kWidth);
}

template <class R>
void store_sequence(const ArrayView& view, const Block& block, int64_t channel, int64_t lanes,
                    int64_t first_step, int64_t steps, const R* tile) {
  store_tile<R>(sequence_section(view, block.batch, channel, lanes, first_step, steps),
                reinterpret_cast<const scalar_t<R>*>(tile), R::kWidth);
}

/// delta + delta_bias, and of that the step Δ.
template <class R>
SELECTIVE_SCAN_HD R step_size(R biased_delta, bool delta_softplus) {
  return delta_softplus ? VectorMath::softplus(biased_delta) : biased_delta;
}

/// softplus'(x) = sigmoid(x) = 1 − exp(−softplus(x)), which needs no division.
template <class R>
SELECTIVE_SCAN_HD R softplus_derivative(R biased_delta, R delta) {
  return select(biased_delta > constant<R>(kSoftplusThreshold), constant<R>(1),
                -VectorMath::expm1(-delta));
}

/// Calls advance.operator()<kStates>(first) for groups of states that together are all of dstate.
template <class Advance>
SELECTIVE_SCAN_HD void for_each_state_group(int64_t dstate, const Advance& advance) {
  int64_t n = 0;
  for (; n + kStatesInRegisters <= dstate; n += kStatesInRegisters) {
    advance.template operator()<kStatesInRegisters>(n);
  }
  for (; n < dstate; ++n) advance.template operator()<1>(n);
}

}  // namespace selective_scan::cpu
