// The forward scan of a block of channels.
//
// Mapping: lanes are channels (or segments, see lanes.h). For every chunk of kStateChunk steps the
// block's B and C are staged once as (state, step); then each vector of channels stages its steps
// as (step, lane) and walks the chunk with kStatesInRegisters states at a time in registers, adding
// to the outputs, which stay in the first-level cache as everything else does. Bound by arithmetic:
// about 16 vector operations per vector of state updates (zoh, real; AVX2, AVX-512), 12 of them in
// exp, and with 16 states half as many again for softplus, the gate and the transpositions. Where
// the table's shuffle takes two slots of the multipliers (AMD's Zen 3), those are what is short.
#pragma once

#include <cstdint>

#include "block.h"

namespace selective_scan::cpu {

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

  SELECTIVE_SCAN_HD ForwardScratch(const ForwardParams& params, const Block& block, void* base)
      : arena{static_cast<char*>(base)}, inputs(arena, params, block) {
    states = arena.take<State>(num_vectors<R>(block) * params.dstate);
    for (R** steps : {&delta, &u, &z, &y}) *steps = arena.take<R>(kStateChunk);
  }
};

template <class State>
struct ForwardKernel {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Scratch = ForwardScratch<State>;

  static int64_t scratch_bytes(const ForwardParams& params, const Block& block) {
    return Scratch(params, block, nullptr).arena.bytes;
  }

  static void run(const ForwardParams& params, const Block& block, void* scratch_base) {
    const Scratch scratch(params, block, scratch_base);
    const int64_t vectors = num_vectors<R>(block);
    for (int64_t vector = 0; vector < vectors; ++vector) {
      const Lanes lanes = lanes_of<R>(block, vector);
      State* states = scratch.states + vector * params.dstate;
      scratch.inputs.load(params, lanes, vector);
      if (lanes.are_segments()) {
        load_rows(boundaries_of<State>(params, block, lanes, 0), lanes, params.dstate, states);
      } else {
        load_channel_states(params.initial_state, block, lanes, params.dstate, states);
      }
    }
    for (int64_t offset = 0; offset < steps_of(params, block); offset += kStateChunk) {
      // Any vector will do: they differ in the channels alone.
      const Lanes first = lanes_of<R>(block, 0);
      const Chunk chunk = chunk_at(params, first, offset);
      scratch.inputs.load_B(params, block, first, chunk);
      scratch.inputs.load_C(params, block, first, chunk);
      for (int64_t vector = 0; vector < vectors; ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        scan_chunk(params, block, lanes, chunk_at(params, lanes, offset), scratch, vector);
        if (params.states) save_states(params, block, lanes, offset, scratch, vector);
      }
    }
    // The states at the end of segments are already known.
    if (block.segmentation.present() || !params.last_state.present()) return;
    for (int64_t vector = 0; vector < vectors; ++vector) {
      store_channel_states(params.last_state, block, lanes_of<R>(block, vector), params.dstate,
                           scratch.states + vector * params.dstate);
    }
  }

 private:
  static void scan_chunk(const ForwardParams& params, const Block& block, const Lanes& lanes,
                         const Chunk& steps, const Scratch& scratch, int64_t vector) {
    const int64_t dstate = params.dstate;
    const auto load = [&](const ArrayView& view, R* tile) {
      load_sequence(view, block, lanes, steps, kStateChunk, tile);
    };
    load_step_sizes(params, block, lanes, steps, kStateChunk, scratch.inputs.delta_bias[vector],
                    scratch.delta, scratch.y, scratch.delta);
    load(params.u, scratch.u);
    for (int64_t t = 0; t < steps.steps; ++t) scratch.y[t] = R(T(0));

    const BlockInputs<State>& inputs = scratch.inputs;
    const R largest = largest_step(scratch.delta, steps.steps);
    ForwardSweep<State> sweep;
    sweep.is_usual = inputs.is_usual(params, lanes, largest, vector);
    sweep.dstate = dstate;
    sweep.steps = steps.steps;
    sweep.delta = scratch.delta;
    sweep.u = scratch.u;
    sweep.poles = inputs.poles + vector * dstate;
    sweep.B = inputs.B(params, lanes, vector);
    sweep.C = inputs.C(params, lanes, vector);
    sweep.states = scratch.states + vector * dstate;
    sweep.y = scratch.y;
    Sweeps<State>::all()[params.method].forward(sweep);

    if (!params.out.present()) return;
    store_output<State>(params, block, lanes, steps, scratch.inputs.D[vector], scratch.u, scratch.z,
                        scratch.y);
  }

  /// Saves the states after a chunk, except behind a sequence's last.
  static void save_states(const ForwardParams& params, const Block& block, const Lanes& lanes,
                          int64_t offset, const Scratch& scratch, int64_t vector) {
    const int64_t last_lane = lanes.first_step + (lanes.count - 1) * lanes.segment_steps;
    const bool is_inside = last_lane + offset + kStateChunk < params.seqlen;
    const int64_t count = is_inside ? lanes.count : lanes.are_segments() ? lanes.count - 1 : 0;
    if (count == 0) return;
    const SavedStates<State> saved(params, block, lanes, (lanes.first_step + offset) / kStateChunk);
    store_states(saved.view, saved.offset, count, saved.lane_stride, params.dstate,
                 scratch.states + vector * params.dstate);
  }
};

}  // namespace selective_scan::cpu
