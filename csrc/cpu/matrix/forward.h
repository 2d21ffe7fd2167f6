// The forward scan with full state matrices for one vector of channels.
//
// Lanes are channels. Small matrix products take a chunk's B and C into the basis. Each step then
// is an elimination, two substitutions and two products with H (basis.h says why two). Bound by
// arithmetic: 3·N² multiplications and additions per step, and N² each for variable B and C.
#pragma once

#include <cstdint>

#include "basis.h"

namespace selective_scan::cpu {

template <class State>
struct MatrixForwardScratch {
  using R = real_t<State>;

  Arena arena;
  MatrixInputs<State> inputs;
  State* before;  // (state)
  State* after;
  State* middle;
  ForwardSteps<R> steps;

  SELECTIVE_SCAN_HD MatrixForwardScratch(const ScanParams& params, void* base)
      : arena{static_cast<char*>(base)}, inputs(arena, params), steps(arena) {
    for (State** states : {&before, &after, &middle}) *states = arena.take<State>(params.dstate);
  }
};

template <class State>
struct MatrixForward {
  using R = real_t<State>;
  using Scratch = MatrixForwardScratch<State>;

  static int64_t scratch_bytes(const ScanParams& params) {
    return Scratch(params, nullptr).arena.bytes;
  }

  static void run(const MatrixForwardParams& params, const Block& block, const void* bases,
                  void* scratch_base) {
    Scratch scratch(params, scratch_base);
    const MatrixInputs<State>& inputs = scratch.inputs;
    const ForwardSteps<R>& steps = scratch.steps;
    const Basis<State> basis(bases, params, block);
    const Lanes lanes = channels_of(block);
    R D, delta_bias;
    load_channels(params.D, lanes, D);
    load_channels(params.delta_bias, lanes, delta_bias);
    inputs.load_constants(params, lanes, basis);
    inputs.load_states_in_basis(params, params.initial_state, lanes, basis, scratch.before);

    for (int64_t offset = 0; offset < params.seqlen; offset += kStateChunk) {
      const Chunk chunk = chunk_at(params, lanes, offset);
      inputs.load_chunk(params, chunk, basis);
      load_inputs<State>(params, chunk, kStateChunk, delta_bias, steps);
      for (int64_t t = 0; t < chunk.steps; ++t) {
        inputs.step(basis, t, steps, scratch.before, scratch.middle, scratch.after);
        scratch.steps.y[t] = inputs.output(params.dstate, t, scratch.after);
        std::swap(scratch.before, scratch.after);
      }
      if (params.wanted == ForwardWanted::kOutput) {
        store_output<State>(params, chunk, D, scratch.steps);
      }
      if (params.states && offset + kStateChunk < params.seqlen) {
        saved_states<State>(params, lanes, offset / kStateChunk)
            .store(lanes.count, params.dstate, scratch.before);
      }
    }
    if (params.last_state.present()) {
      inputs.store_states_of_basis(params, params.last_state, lanes, basis, scratch.before);
    }
  }
};

}  // namespace selective_scan::cpu
