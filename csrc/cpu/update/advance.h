// One step of the states of a few channels.
//
// The lanes of a vector are consecutive states of one channel, which are adjacent in memory. The
// channel's values for the step, Δ and the input, are broadcast to the lanes, and the sums of as
// many channels as a vector has lanes are reduced together. About 20 vector operations per vector
// of states (zoh, real), 12 of them in exp; for a batch that fits no cache, loading the states
// takes longer.
#pragma once

#include <cstdint>

#include "../../core/method_table.h"
#include "../selective/step_forms.h"
#include "../selective/sweeps.h"
#include "../simd/transpose.h"
#include "../simd/vector_math.h"

namespace selective_scan::cpu {

/// Rows of numbers for each channel, `pitch` apart; imaginary parts lie `imaginary` after the real
/// ones.
template <class Number>
struct StateRows {
  Number* data = nullptr;
  int64_t pitch = 0;
  int64_t imaginary = 0;

  template <class State>
  SELECTIVE_SCAN_HD State load(int64_t channel, int64_t n) const {
    return load_number<State>(data + channel * pitch + n, imaginary);
  }
  template <class State>
  SELECTIVE_SCAN_HD void store(int64_t channel, int64_t n, State value) const {
    store_number(value, data + channel * pitch + n, imaginary);
  }
};

/// At most as many channels as a vector has lanes. Rows are whole vectors, with zeros past dstate.
template <class State>
struct StateTile {
  using T = scalar_t<State>;

  int64_t channels = 0;
  int64_t states = 0;  // a multiple of the lanes
  const T* delta = nullptr;
  const T* x = nullptr;
  const T* input_delta = nullptr;  // null if the input's step is Δ
  StateRows<const T> A;
  StateRows<const T> B;  // one row for all channels
  StateRows<const T> C;
  StateRows<const T> before;
  StateRows<T> after;  // may be `before`
};

template <class State>
struct TileSteps {
  using R = real_t<State>;
  using T = scalar_t<State>;
  /// Advances a tile by one step, and writes y of every lane.
  using Advance = void (*)(const StateTile<State>& tile, T* y);

  template <Method kMethod>
  static void advance(const StateTile<State>& tile, T* y) {
    return tile.input_delta == nullptr
               ? advance_by<StepForm<kMethod, State>>(tile, tile.delta, y)
               : advance_by<StepForm<kMethod, State, true>>(tile, tile.input_delta, y);
  }

  static constexpr MethodTable<Advance> kMethods =
      make_method_table<Advance>([]<Method kMethod>() -> Advance { return &advance<kMethod>; });

 private:
  template <class Form>
  static void advance_by(const StateTile<State>& tile, const T* input_steps, T* y) {
    R sums[R::kWidth];
    for (R& sum : sums) sum = R(T(0));
    for (int64_t channel = 0; channel < tile.channels; ++channel) {
      const R delta(tile.delta[channel]);
      const R x(tile.x[channel]);
      const R gain = Form::kGainHasStep ? R(input_steps[channel]) * x : x;
      State sum{};
      for (int64_t n = 0; n < tile.states; n += R::kWidth) {
        const State A = tile.A.template load<State>(channel, n);
        const auto kept =
            Form::template prepare<VectorMath>(delta, Form::pole(make_pole<VectorMath>(A)));
        const State input = Form::input(gain, tile.B.template load<State>(0, n), kept);
        const State h =
            multiply_add(kept.first, tile.before.template load<State>(channel, n), input);
        tile.after.store(channel, n, h);
        sum = multiply_add(tile.C.template load<State>(0, n), h, sum);
      }
      sums[channel] = real(sum);
    }
    (constant<State>(kOutputScale<State>) * sum_of_each(sums)).store(y);
  }
};

}  // namespace selective_scan::cpu
