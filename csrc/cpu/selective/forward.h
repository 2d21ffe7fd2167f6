// The forward scan of a block of channels.
//
// Mapping: lanes are channels (or segments, see lanes.h). For every chunk of kStateChunk steps the
// block's B and C are staged once as (state, step). Each vector of channels then stages its steps
// as (step, lane), walks the chunk with kStatesInRegisters states at a time in registers, and adds
// to the outputs. All of this stays in the first-level cache. Bound by arithmetic: about 16 vector
// operations per vector of state updates (zoh, real; AVX2, AVX-512), 12 of them in exp, and with 16
// states half as many again for softplus, the gate and the transpositions. If the table's shuffle
// takes two of the multipliers' slots (AMD's Zen 3), these slots are the bottleneck.
#pragma once

#include <cstdint>

#include "block.h"
#include "steps.h"

namespace selective_scan::cpu {

template <class State>
struct ForwardScratch {
  using R = real_t<State>;

  Arena arena;
  BlockInputs<State> inputs;
  BlockMaps<State> maps;  // if sequences are segmented
  State* states;          // (vector, state)
  ForwardSteps<R> steps;

  SELECTIVE_SCAN_HD ForwardScratch(const ForwardParams& params, const Block& block, void* base)
      : arena{static_cast<char*>(base)}, inputs(arena, params, block), steps(arena) {
    if (block.segmentation.present()) maps = BlockMaps<State>(arena, params, block);
    states = arena.take<State>(num_vectors<R>(block) * params.dstate);
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
      if (lanes.are_segments() || !block.is_first()) {
        boundaries_of<State>(params, lanes, 0).load(lanes.count, params.dstate, states);
      } else {
        channel_states(params.initial_state, lanes).load(lanes.count, params.dstate, states);
      }
      if (params.states && !lanes.are_segments() && !block.is_first()) {
        save_states(params, lanes, lanes.count, block.first_step, states);
      }
    }
    if (block.finds_map) scratch.maps.begin(params, block);
    for (int64_t offset = 0; offset < block.steps; offset += kStateChunk) {
      // Any vector serves here: vectors differ only in their channels.
      const Lanes first = lanes_of<R>(block, 0);
      const Chunk chunk = chunk_at(params, first, offset);
      scratch.inputs.B.load_chunk(params.B, chunk, kStateChunk);
      scratch.inputs.C.load_chunk(params.C, chunk, kStateChunk);
      for (int64_t vector = 0; vector < vectors; ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        scan_chunk(params, chunk_at(params, lanes, offset), scratch, vector);
        if (params.states) {
          save_states(params, lanes, inner_lanes(params, lanes, offset + kStateChunk),
                      lanes.first_step + offset + kStateChunk,
                      scratch.states + vector * params.dstate);
        }
      }
    }
    if (block.finds_map) scratch.maps.store(params, block, false);
    // If lanes are segments, the states after them are already known.
    const bool is_end = block.is_last() && !block.segmentation.lanes_are_segments();
    if (!is_end || !params.last_state.present()) return;
    for (int64_t vector = 0; vector < vectors; ++vector) {
      const Lanes lanes = lanes_of<R>(block, vector);
      channel_states(params.last_state, lanes)
          .store(lanes.count, params.dstate, scratch.states + vector * params.dstate);
    }
  }

 private:
  static void scan_chunk(const ForwardParams& params, const Chunk& chunk, const Scratch& scratch,
                         int64_t vector) {
    const ForwardSteps<R>& steps = scratch.steps;
    const R* gains =
        load_inputs<State>(params, chunk, kStateChunk, scratch.inputs.delta_bias[vector], steps);
    for (int64_t t = 0; t < chunk.steps; ++t) steps.y[t] = R(T(0));

    ForwardSweep<State> sweep;
    scratch.inputs.begin_sweep(params, chunk, vector, steps.delta, gains, sweep);
    sweep.states = scratch.states + vector * params.dstate;
    sweep.y = steps.y;
    if (chunk.lanes.block.finds_map) {
      sweep.map = scratch.maps.next(params, vector, steps.delta, chunk.steps, chunk.is_last());
    }
    Sweeps<State>::of(params).forward(sweep);

    if (params.wanted != ForwardWanted::kOutput) return;
    store_output<State>(params, chunk, scratch.inputs.D[vector], steps);
  }

  /// Returns the number of lanes whose state `offset` steps after their first step is to be saved.
  /// The last state of the sequence is not saved. If lanes are channels, neither is the last state
  /// of a segment, since the next segment starts with it and saves it.
  static SELECTIVE_SCAN_HD int64_t inner_lanes(const ScanParams& params, const Lanes& lanes,
                                               int64_t offset) {
    if (!lanes.are_segments()) return offset < lanes.steps ? lanes.count : 0;
    const int64_t last_lane = lanes.first_step + (lanes.count - 1) * lanes.segment_steps;
    return last_lane + offset < params.seqlen ? lanes.count : lanes.count - 1;
  }

  /// Saves the states before step `step` of the first lane.
  static void save_states(const ForwardParams& params, const Lanes& lanes, int64_t count,
                          int64_t step, const State* states) {
    if (count == 0) return;
    saved_states<State>(params, lanes, step / kStateChunk - 1).store(count, params.dstate, states);
  }
};

}  // namespace selective_scan::cpu
