// The steps of a chunk, as both passes use them: the sequences that belong to a vector of lanes,
// and the inputs computed from them.
#pragma once

#include <cstdint>

#include "../../core/discretization.h"
#include "../../core/params.h"
#include "../simd/tile.h"
#include "../simd/vector_math.h"
#include "../work.h"
#include "lanes.h"
#include "sweeps.h"

namespace selective_scan::cpu {

/// Returns a chunk of a sequence. The chunk that the caller visits next, or soon, starts
/// `steps_ahead` steps from this one.
SELECTIVE_SCAN_HD Section sequence_section(const ArrayView& view, const Chunk& chunk,
                                           int64_t steps_ahead) {
  const Lanes& lanes = chunk.lanes;
  const int64_t offset = lanes.block.batch * view.batch + lanes.channel * view.channel;
  Section section = step_section(view, offset, lanes.stride(view), chunk);
  section.rows_ahead = steps_ahead;
  return section;
}

/// Loads a chunk of an input sequence; zeros if it is absent.
template <class R>
void load_sequence(const ArrayView& view, const Chunk& chunk, int64_t steps_ahead, R* tile) {
  if (!view.present()) {
    for (int64_t t = 0; t < chunk.steps; ++t) tile[t] = R(scalar_t<R>(0));
    return;
  }
  load_steps<R>(sequence_section(view, chunk, steps_ahead), chunk,
                reinterpret_cast<scalar_t<R>*>(tile));
}

template <class R>
void store_sequence(const ArrayView& view, const Chunk& chunk, int64_t steps_ahead, const R* tile) {
  store_steps<R>(sequence_section(view, chunk, steps_ahead), chunk,
                 reinterpret_cast<const scalar_t<R>*>(tile));
}

/// The arrays, one number per step, that a chunk's inputs are computed in.
template <class R>
struct InputSteps {
  R* biased_delta;  // may be `delta`
  R* decay;         // computed from biased_delta if softplus is applied
  R* delta;
  R* u;
  R* input_delta;
  R* gains;  // memory for the gains, see step_forms.h
};

/// The steps of a chunk for one vector of lanes, in a forward pass. Some arrays share memory, since
/// the pass does not go back through its inputs.
template <class R>
struct ForwardSteps : InputSteps<R> {
  R* z;
  R* y;

  SELECTIVE_SCAN_HD explicit ForwardSteps(Arena& arena) {
    for (R** steps : {&this->delta, &this->u, &this->gains, &z, &y}) {
      *steps = arena.take<R>(kStateChunk);
    }
    this->biased_delta = this->delta;
    this->decay = y;
    this->input_delta = this->gains;
  }
};

/// Loads delta and computes the steps Δ (see finite_step), 0 where a segment has none. Calls
/// use(t, Δ) for every step.
template <class R, class Use>
void load_step_sizes(const ScanParams& params, const Chunk& chunk, int64_t steps_ahead,
                     R delta_bias, const InputSteps<R>& steps, const Use& use) {
  R* const delta = steps.delta;
  R* const biased_delta = steps.biased_delta;
  load_sequence(params.delta, chunk, steps_ahead, biased_delta);
  if (params.delta_softplus) {
    // Two loops: an exponential followed by a dependent logarithm is so long a chain that too few
    // steps would be in flight at a time.
    for (int64_t t = 0; t < chunk.steps; ++t) {
      const R biased = biased_delta[t] + delta_bias;
      biased_delta[t] = biased;
      steps.decay[t] = VectorMath::decay(biased);
    }
    for (int64_t t = 0; t < chunk.steps; ++t) {
      delta[t] = finite_step(VectorMath::softplus(biased_delta[t], steps.decay[t]));
      use(t, delta[t]);
    }
  } else {
    for (int64_t t = 0; t < chunk.steps; ++t) {
      delta[t] = finite_step(biased_delta[t] + delta_bias);
      use(t, delta[t]);
    }
  }
  clear_steps_beyond(chunk, delta);
}

/// Loads u and the steps, and returns the gains.
template <class State, class R>
const R* load_inputs(const ScanParams& params, const Chunk& chunk, int64_t steps_ahead,
                     R delta_bias, const InputSteps<R>& steps) {
  const auto load = [&](const auto& use) {
    load_step_sizes(params, chunk, steps_ahead, delta_bias, steps, use);
  };
  const auto nothing = [](int64_t, R) {};
  load_sequence(params.u, chunk, steps_ahead, steps.u);
  if (params.input_delta.present()) {
    load(nothing);
    load_sequence(params.input_delta, chunk, steps_ahead, steps.input_delta);
    for (int64_t t = 0; t < chunk.steps; ++t) steps.gains[t] = steps.input_delta[t] * steps.u[t];
    return steps.gains;
  }
  if (!Sweeps<State>::of(params).gain_has_step) {
    load(nothing);
    return steps.u;
  }
  load([&](int64_t t, R delta) { steps.gains[t] = delta * steps.u[t]; });
  return steps.gains;
}

/// Computes out from Re(Σ C·h) in y, and stores it.
template <class State, class R>
void store_output(const ForwardParams& params, const Chunk& chunk, R D,
                  const ForwardSteps<R>& steps) {
  const bool is_gated = params.z.present();
  R* const z = steps.z;
  R* const y = steps.y;
  if (is_gated) load_sequence(params.z, chunk, kStateChunk, z);
  for (int64_t t = 0; t < chunk.steps; ++t) {
    const R sum = constant<State>(kOutputScale<State>) * y[t] + D * steps.u[t];
    y[t] = is_gated ? sum * (z[t] * VectorMath::sigmoid(z[t])) : sum;
  }
  store_sequence(params.out, chunk, kStateChunk, y);
}

}  // namespace selective_scan::cpu
