// A sweep walks the states of one vector of lanes through a chunk of steps. Sweeps alone depend on
// the method, and take most of the time. The kernels around them (forward.h, backward.h,
// segment_maps.h) are compiled separately from the sweeps: see sweep_kernels.h.
#pragma once

#include <cstdint>
#include <limits>

#include "../../core/method_table.h"
#include "../../core/params.h"
#include "../simd/vector.h"
#include "compensated_sum.h"

namespace selective_scan::cpu {

/// The number of states that a sweep carries through a chunk in registers at a time.
constexpr int kStatesInRegisters = 4;

/// y = kOutputScale·Re(Σ C·h)
template <class State>
constexpr double kOutputScale = is_complex_v<State> ? 2 : 1;

/// In fp64 exponents are always clamped: without the clamps the compiler would fuse other
/// operations, and a lane's bits must not depend on its neighbors.
template <class State>
constexpr bool kAlwaysClamps = sizeof(scalar_t<State>) == 8;

/// B or C of a chunk for one vector: numbers that all lanes share, from a ProjectionTile, or
/// vectors with one number per lane.
template <class State>
struct Projection {
  const scalar_t<State>* data = nullptr;
  int64_t imaginary = 0;  // distance from the real to the imaginary parts
  bool is_shared = false;
  int64_t state_stride = 0;
  int64_t step_stride = 0;
};

/// The destination of the gradient of B or C.
template <class State>
struct ProjectionGradient {
  scalar_t<State>* tile = nullptr;        // if variable, else null
  bool is_shared = false;                 // by the lanes, whose products are then summed
  CompensatedSum<State>* sums = nullptr;  // (state), if constant
};

/// The affine map of a segment's steps so far (segments.h), for each state; null if none is wanted.
template <class State>
struct StateMap {
  State* offsets = nullptr;
  State* factors = nullptr;  // factors that follow from ΣΔ are written once, at the segment's end
  real_t<State> span;        // ΣΔ, including the chunk's
  bool is_end = false;       // the chunk is the segment's last
};

template <class State>
struct ForwardSweep {
  using R = real_t<State>;

  bool is_bounded;  // see BlockInputs
  int64_t dstate;
  int64_t steps;
  const R* delta;  // (step): Δ
  const R* gain;   // (step): see step_forms.h
  const Pole<State>* poles;
  Projection<State> B;
  Projection<State> C;
  State* states;        // before the chunk, then after it
  R* y;                 // (step): Re(Σ C·h) is added
  StateMap<State> map;  // continued by the chunk; in the backward pass, the map of the gradients
};

/// The values that a sweep keeps for the way back: (step, state in registers). On the way back
/// products for dC replace h, and products for dB replace the first member of each CachedStep, so
/// that everything stays in the first-level cache.
template <class State>
struct KeptSteps {
  State* h;  // one step more, beginning with the state before the chunk
  State* first;
  State* second;  // unused by forms that keep no second value
};

template <class State>
struct BackwardSweep : ForwardSweep<State> {
  using R = real_t<State>;

  const R* dy;  // (step)
  R* dgain;     // (step): added to, like ddelta, which excludes the part through the gain
  R* ddelta;
  State* carry;  // (state): the gradient of the states after the chunk, then of those before it
  CompensatedSum<State>* dA;  // (state)
  ProjectionGradient<State> dB;
  ProjectionGradient<State> dC;
  KeptSteps<State> kept;
};

/// Returns whether a state multiplied by `factor` leaves nothing, or next to nothing, in its own
/// type (fp32 or fp64). False for NaN.
template <class State>
SELECTIVE_SCAN_HD auto is_forgotten(State factor) {
  return size_of(factor) < real_t<State>(std::numeric_limits<scalar_t<State>>::min());
}

/// A sweep that joins the affine map of a chunk to that of the chunks before it, or after it on the
/// way back.
template <class State>
struct MapSweep {
  using R = real_t<State>;

  bool is_bounded;  // see BlockInputs
  int64_t dstate;
  int64_t steps;
  const R* delta;
  const R* input;  // (step): the gain, or dy on the way back
  const Pole<State>* poles;
  Projection<State> projection;  // B, or C on the way back
  StateMap<State> map;
  const State* weights = nullptr;  // (state), optional: states that all lanes forget may be left
                                   // out

  template <int kStates>
  SELECTIVE_SCAN_HD bool leaves_out(int64_t n) const {
    if (!weights) return false;
    for (int j = 0; j < kStates; ++j) {
      if (!all(is_forgotten(weights[n + j]))) return false;
    }
    return true;
  }
};

/// The sweeps of one method.
template <class State>
struct Sweeps {
  void (*forward)(const ForwardSweep<State>&);
  void (*backward)(const BackwardSweep<State>&);
  void (*forward_map)(const MapSweep<State>&);
  void (*backward_map)(const MapSweep<State>&);
  bool gain_has_step;

  static const Sweeps& of(const ScanParams& params);
};

}  // namespace selective_scan::cpu
