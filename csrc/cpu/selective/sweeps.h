// A sweep walks the states of one vector of lanes through a chunk of steps. It is all that depends
// on the method, and where the time goes; what surrounds it is the kernels' (forward.h, backward.h,
// segment_maps.h). The two are compiled apart: see sweep_kernels.h.
#pragma once

#include <cstdint>
#include <limits>

#include "../../core/method_table.h"
#include "../../core/params.h"
#include "../simd/vector.h"
#include "compensated_sum.h"

namespace selective_scan::cpu {

/// The states that a sweep carries through a chunk in registers at a time.
constexpr int kStatesInRegisters = 4;

/// y = kOutputScale·Re(Σ C·h)
template <class State>
constexpr double kOutputScale = is_complex_v<State> ? 2 : 1;

/// In fp64 exponents are always clamped: the compiler fuses other operations there without the
/// clamps, and no lane may tell by its neighbours' bits.
template <class State>
constexpr bool kAlwaysClamps = sizeof(scalar_t<State>) == 8;

/// B or C of a chunk for one vector: numbers that all lanes share, from a tile (see
/// ProjectionTile), or vectors with one for each lane.
template <class State>
struct Projection {
  const scalar_t<State>* data = nullptr;
  int64_t imaginary = 0;  // distance of the imaginary parts
  bool is_shared = false;
  int64_t state_stride = 0;
  int64_t step_stride = 0;
};

/// This is where the gradient of B or C goes.
template <class State>
struct ProjectionGradient {
  scalar_t<State>* tile = nullptr;          // if variable, else null
  bool is_shared = false;                   // by the lanes, whose products are then added up
  CompensatedState<State>* sums = nullptr;  // (state), if constant
};

/// The affine map of the steps so far, of a segment (segments.h), of each state: none where null.
template <class State>
struct StateMap {
  State* offsets = nullptr;
  State* factors = nullptr;  // those that follow from ΣΔ are written once, at the segment's end
  real_t<State> span;        // ΣΔ, with the chunk's
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
  StateMap<State> map;  // to be continued by the chunk; on the way back that of the gradients
};

/// What a sweep keeps for the way back: (step, state in registers). The way back leaves its
/// products for dC in the place of h and those for dB in that of the first of each CachedStep, so
/// that all of it stays in the first-level cache.
template <class State>
struct KeptSteps {
  State* h;  // one more step: the state before the chunk comes first
  State* first;
  State* second;  // not of forms without
};

template <class State>
struct BackwardSweep : ForwardSweep<State> {
  using R = real_t<State>;

  const R* dy;  // (step)
  R* dgain;     // (step): added to, and so is ddelta, but for what comes through the gain
  R* ddelta;
  State* carry;  // (state): the gradient of the states after the chunk, then of those before it
  CompensatedState<State>* dA;  // (state)
  ProjectionGradient<State> dB;
  ProjectionGradient<State> dC;
  KeptSteps<State> kept;
};

/// What fp32 keeps of a state after it was multiplied by this is nothing or next to nothing, and
/// likewise fp64. NaN is not.
template <class State>
SELECTIVE_SCAN_HD auto is_forgotten(State factor) {
  return size_of(factor) < real_t<State>(std::numeric_limits<scalar_t<State>>::min());
}

/// The affine map of a chunk, joined to that of the chunks before it, or behind it on the way back.
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
  const State* weights = nullptr;  // (state): states may be left out that all lanes will forget

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
