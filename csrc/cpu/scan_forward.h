// The forward scan of a block of channels.
//
// Mapping: lanes are channels. For every chunk of kStateChunk steps the block's B and C are staged
// once as (state, step); then each vector of channels stages its steps as (step, lane) and walks
// the chunk with kStatesInRegisters states at a time in registers, adding to the outputs, which
// stay in the first-level cache as everything else does. Bound by arithmetic: about 18 vector
// operations per vector of state updates (zoh, real), 14 of them in exp.
#pragma once

#include <cstdint>

#include "scan_block.h"

namespace selective_scan::cpu {

/// The steps of a chunk for one vector of channels.
template <class R>
struct ChunkSteps {
  int64_t steps;
  const R* delta;  // Δ
  const R* u;
};

/// Walks kStates states through a chunk from h on, leaving the last states in h and adding
/// Re(Σ C·h) to y. keep(t, j, h, coefficients) sees every step.
template <Method kMethod, int kStates, class State, class Keep>
SELECTIVE_SCAN_HD void advance(const ChunkSteps<real_t<State>>& chunk, const Pole<State>* poles,
                               const Projection<State>& B, const Projection<State>& C, int64_t n,
                               State* states, real_t<State>* y, const Keep& keep) {
  using R = real_t<State>;
  using F = Formula<kMethod>;
  State h[kStates];
  Pole<State> pole[kStates];
  for (int j = 0; j < kStates; ++j) {
    h[j] = states[n + j];
    pole[j] = poles[n + j];
  }
  for (int64_t t = 0; t < chunk.steps; ++t) {
    const R delta = chunk.delta[t];
    const R u = chunk.u[t];
    const R gain_of_all = F::kBbarDependsOnA ? u : delta * u;
    R sum = y[t];
    for (int j = 0; j < kStates; ++j) {
      const Coefficients<State> value = F::template value<VectorMath>(delta, pole[j]);
      State input = gain_of_all * B.at(n + j, t);
      if constexpr (F::kBbarDependsOnA) input = value.bbar * input;
      h[j] = multiply_add(value.abar, h[j], input);
      sum = add_real_of_product(C.at(n + j, t), h[j], sum);
      keep(t, j, h[j], value);
    }
    y[t] = sum;
  }
  for (int j = 0; j < kStates; ++j) states[n + j] = h[j];
}

template <class State>
struct ForwardScratch {
  using R = real_t<State>;

  Arena arena;
  BlockInputs<State> inputs;
  State* states;  // (vector, state)
  R* delta;       // (step)
  R* u;
  R* z;
  R* y;

  SELECTIVE_SCAN_HD ForwardScratch(const ForwardParams& params, int64_t block_channels, void* base)
      : arena{static_cast<char*>(base)},
        inputs(arena, params, round_up(block_channels, R::kWidth) / R::kWidth),
        states(arena.take<State>(round_up(block_channels, R::kWidth) / R::kWidth * params.dstate)),
        delta(arena.take<R>(kStateChunk)),
        u(arena.take<R>(kStateChunk)),
        z(arena.take<R>(kStateChunk)),
        y(arena.take<R>(kStateChunk)) {}
};

template <class State, Method kMethod>
struct ForwardKernel {
  using R = real_t<State>;
  using T = scalar_t<State>;

  static int64_t scratch_bytes(const ForwardParams& params, int64_t block_channels) {
    return ForwardScratch<State>(params, block_channels, nullptr).arena.bytes;
  }

  static void run(const ForwardParams& params, const Block& block, void* scratch_base) {
    const ForwardScratch<State> scratch(params, block.channels, scratch_base);
    const int64_t dstate = params.dstate;
    for (int64_t first = 0; first < block.channels; first += R::kWidth) {
      const int64_t vector = first / R::kWidth;
      const int64_t channel = block.first_channel + first;
      const int64_t lanes = lanes_of(block, first);
      BlockInputs<State> inputs = scratch.inputs;
      inputs.load(params, vector, channel, lanes);
      load_states(params.initial_state, block.batch, channel, lanes, dstate,
                  scratch.states + vector * dstate);
    }
    for (int64_t first_step = 0; first_step < params.seqlen; first_step += kStateChunk) {
      BlockInputs<State> inputs = scratch.inputs;
      const int64_t left = params.seqlen - first_step;
      const int64_t steps = left < kStateChunk ? left : kStateChunk;
      inputs.load_steps(params, block, first_step, steps);
      for (int64_t first = 0; first < block.channels; first += R::kWidth) {
        const int64_t channel = block.first_channel + first;
        const int64_t lanes = lanes_of(block, first);
        scan_chunk(params, block, scratch, first / R::kWidth, channel, lanes, first_step, steps);
        if (params.states && left > kStateChunk) {
          store_states(saved_states<State>(params, first_step / kStateChunk), block.batch, channel,
                       lanes, dstate, scratch.states + first / R::kWidth * dstate);
        }
      }
    }
    for (int64_t first = 0; first < block.channels; first += R::kWidth) {
      store_states(params.last_state, block.batch, block.first_channel + first,
                   lanes_of(block, first), dstate, scratch.states + first / R::kWidth * dstate);
    }
  }

 private:
  static SELECTIVE_SCAN_HD int64_t lanes_of(const Block& block, int64_t first) {
    const int64_t left = block.channels - first;
    return left < R::kWidth ? left : R::kWidth;
  }

  static void scan_chunk(const ForwardParams& params, const Block& block,
                         const ForwardScratch<State>& scratch, int64_t vector, int64_t channel,
                         int64_t lanes, int64_t first_step, int64_t steps) {
    const int64_t dstate = params.dstate;
    const R delta_bias = scratch.inputs.delta_bias[vector];
    load_sequence(params.delta, block, channel, lanes, first_step, steps, scratch.delta);
    load_sequence(params.u, block, channel, lanes, first_step, steps, scratch.u);
    for (int64_t t = 0; t < steps; ++t) {
      scratch.delta[t] = step_size(scratch.delta[t] + delta_bias, params.delta_softplus);
      scratch.y[t] = R(T(0));
    }

    const ChunkSteps<R> chunk{steps, scratch.delta, scratch.u};
    const Projection<State> B = scratch.inputs.B(params, vector);
    const Projection<State> C = scratch.inputs.C(params, vector);
    const Pole<State>* poles = scratch.inputs.poles + vector * dstate;
    State* states = scratch.states + vector * dstate;
    const auto keep_nothing = [](int64_t, int, const State&, const Coefficients<State>&) {};
    for_each_state_group(dstate, [&]<int kStates>(int64_t n) {
      advance<kMethod, kStates>(chunk, poles, B, C, n, states, scratch.y, keep_nothing);
    });

    if (!params.out.present()) return;
    const R D = scratch.inputs.D[vector];
    for (int64_t t = 0; t < steps; ++t) {
      scratch.y[t] = constant<State>(kOutputScale<State>) * scratch.y[t] + D * scratch.u[t];
    }
    if (params.z.present()) {
      load_sequence(params.z, block, channel, lanes, first_step, steps, scratch.z);
      for (int64_t t = 0; t < steps; ++t) {
        scratch.y[t] = scratch.y[t] * (scratch.z[t] * VectorMath::sigmoid(scratch.z[t]));
      }
    }
    store_sequence(params.out, block, channel, lanes, first_step, steps, scratch.y);
  }
};

}  // namespace selective_scan::cpu
