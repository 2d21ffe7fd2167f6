// The affine map by which a segment of time takes the state before it to the state after it, and
// the gradient of the latter to that of the former. It is the first pass over segmented sequences
// (segments.h), and ranks that share a sequence exchange it.
//
// Mapping and cost as in the forward scan, without the outputs. A pass over segmented sequences
// walks a segment as the scan does, so its map has the bits that the scan would find (segments.h).
// If maps alone are wanted, chunks are mapped from the other end of the segment: the state that a
// chunk leaves, starting from 0, is weighted by the product of abar after the chunk, and once this
// product is forgotten for all lanes (is_forgotten), earlier chunks make no difference. So poles of
// short memory cost only the steps that they remember.
#pragma once

#include <cstdint>

#include "backward.h"

namespace selective_scan::cpu {

/// apply_map() of affine_map.h, lane by lane.
template <class State>
SELECTIVE_SCAN_HD State apply_maps(State factor, State offset, State entering) {
  const auto is_zero = size_of(entering) == constant<State>(0);
  return select(is_zero, offset, multiply_add(factor, entering, offset));
}

template <class State>
struct MapScratch {
  using R = real_t<State>;
  using T = scalar_t<State>;

  Arena arena;
  BlockInputs<State> inputs;
  BlockMaps<State> maps;
  State* chunk_offsets;  // (state)
  State* chunk_factors;
  BackwardSteps<R> steps;  // those that the pass needs

  SELECTIVE_SCAN_HD MapScratch(const ScanParams& params, const Block& block, void* base)
      : arena{static_cast<char*>(base)},
        inputs(arena, params, block),
        maps(arena, params, block),
        chunk_offsets(arena.take<State>(params.dstate)),
        chunk_factors(arena.take<State>(params.dstate)),
        steps(arena) {}

  void begin(const ScanParams& params, const Block& block) const {
    for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
      inputs.load(params, lanes_of<R>(block, vector), vector);
    }
    maps.begin(params, block);
  }

  /// Sets the factors of lanes without a segment to 0, so that these lanes count as forgotten.
  void forget_idle_lanes(const ScanParams& params, const Block& block) const {
    for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
      T* factors = reinterpret_cast<T*>(maps.factors + vector * params.dstate);
      const int64_t first = lanes_of<R>(block, vector).count;
      for (int64_t row = 0; row < params.dstate * kComponents<State>; ++row) {
        for (int64_t lane = first; lane < R::kWidth; ++lane) factors[row * R::kWidth + lane] = T(0);
      }
    }
  }

  bool remembers(const ScanParams& params, int64_t vector) const {
    for (int64_t n = vector * params.dstate; n < (vector + 1) * params.dstate; ++n) {
      if (!all(is_forgotten(maps.factors[n]))) return true;
    }
    return false;
  }

  StateMap<State> begin_chunk(const ScanParams& params, int64_t count) const {
    for (int64_t n = 0; n < params.dstate; ++n) {
      chunk_offsets[n] = State{};
      chunk_factors[n] = one<State>();
    }
    return {chunk_offsets, chunk_factors, span_of(steps.delta, count), true};
  }

  /// Joins the map of a chunk to the map of all steps between the chunk and the segment's end (on
  /// the way back, its beginning). A lane's result does not depend on how long other lanes
  /// remember.
  void join_chunk(const ScanParams& params, int64_t vector, bool goes_back) const {
    for (int64_t n = 0; n < params.dstate; ++n) {
      State& offset = maps.offsets[vector * params.dstate + n];
      State& factor = maps.factors[vector * params.dstate + n];
      const auto leaves_out = is_forgotten(factor);
      const State weight = goes_back ? conj(factor) : factor;
      offset = select(leaves_out, offset, apply_maps(weight, offset, chunk_offsets[n]));
      const State product = apply_maps(factor, State{}, chunk_factors[n]);
      factor = select(leaves_out || is_forgotten(product), State{}, product);
    }
  }
};

template <class State>
struct SegmentMaps {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Scratch = MapScratch<State>;

  static int64_t scratch_bytes(const ScanParams& params, const Block& block) {
    return Scratch(params, block, nullptr).arena.bytes;
  }

  template <class Params>
  static void map_as_scanned(const Params& params, const Block& block, void* scratch_base) {
    constexpr int64_t kStepsAhead = kGoesBack<Params> ? -kStateChunk : kStateChunk;
    const Scratch scratch(params, block, scratch_base);
    scratch.begin(params, block);
    visit_chunks<kGoesBack<Params>>(block, [&](int64_t offset) {
      load_projection(params, block, offset, kStepsAhead, scratch);
      for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        const Chunk chunk = chunk_at(params, lanes, offset);
        const R* input = load_steps_of(params, chunk, kStepsAhead, scratch, vector);
        const bool is_edge = kGoesBack<Params> ? chunk.is_first() : chunk.is_last();
        sweep(params, chunk, scratch, vector, input,
              scratch.maps.next(params, vector, scratch.steps.delta, chunk.steps, is_edge),
              nullptr);
      }
    });
    scratch.maps.store(params, block, kGoesBack<Params>);
  }

  template <class Params>
  static void map_alone(const Params& params, const Block& block, void* scratch_base) {
    constexpr int64_t kStepsAhead = kGoesBack<Params> ? kStateChunk : -kStateChunk;
    const Scratch scratch(params, block, scratch_base);
    scratch.begin(params, block);
    scratch.forget_idle_lanes(params, block);
    bool any_remembers = true;
    visit_chunks<!kGoesBack<Params>>(block, [&](int64_t offset) {
      if (!any_remembers) return;
      any_remembers = false;
      load_projection(params, block, offset, kStepsAhead, scratch);
      for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
        if (!scratch.remembers(params, vector)) continue;
        any_remembers = true;
        const Lanes lanes = lanes_of<R>(block, vector);
        const Chunk chunk = chunk_at(params, lanes, offset);
        const R* input = load_steps_of(params, chunk, kStepsAhead, scratch, vector);
        sweep(params, chunk, scratch, vector, input, scratch.begin_chunk(params, chunk.steps),
              scratch.maps.factors + vector * params.dstate);
        scratch.join_chunk(params, vector, kGoesBack<Params>);
      }
    });
    scratch.maps.store(params, block, kGoesBack<Params>);
  }

 private:
  template <class Params>
  static constexpr bool kGoesBack = std::is_same_v<Params, BackwardParams>;

  template <bool kFromTheEnd, class Visit>
  static void visit_chunks(const Block& block, const Visit& visit) {
    if constexpr (kFromTheEnd) {
      for_each_chunk_backwards(block, visit);
    } else {
      for (int64_t offset = 0; offset < block.steps; offset += kStateChunk) visit(offset);
    }
  }

  template <class Params>
  static const BlockProjection<State>& projection_of(const Scratch& scratch) {
    return kGoesBack<Params> ? scratch.inputs.C : scratch.inputs.B;
  }
  template <class Params>
  static void load_projection(const Params& params, const Block& block, int64_t offset,
                              int64_t steps_ahead, const Scratch& scratch) {
    const Lanes first = lanes_of<R>(block, 0);
    projection_of<Params>(scratch).load_chunk(kGoesBack<Params> ? params.C : params.B,
                                              chunk_at(params, first, offset), steps_ahead);
  }

  /// Loads a chunk and returns the input of its sweep.
  static const R* load_steps_of(const ForwardParams& params, const Chunk& chunk,
                                int64_t steps_ahead, const Scratch& scratch, int64_t vector) {
    return load_inputs<State>(params, chunk, steps_ahead, scratch.inputs.delta_bias[vector],
                              scratch.steps);
  }
  static const R* load_steps_of(const BackwardParams& params, const Chunk& chunk,
                                int64_t steps_ahead, const Scratch& scratch, int64_t vector) {
    load_step_sizes(params, chunk, steps_ahead, scratch.inputs.delta_bias[vector], scratch.steps,
                    [](int64_t, R) {});
    load_output_gradient(params, chunk, steps_ahead, scratch.steps);
    return scratch.steps.dy;
  }

  template <class Params>
  static void sweep(const Params& params, const Chunk& chunk, const Scratch& scratch,
                    int64_t vector, const R* input, const StateMap<State>& map,
                    const State* weights) {
    const BlockInputs<State>& inputs = scratch.inputs;
    const Sweeps<State>& sweeps = Sweeps<State>::of(params);
    const auto run = kGoesBack<Params> ? sweeps.backward_map : sweeps.forward_map;
    run({inputs.is_bounded(scratch.steps.delta, chunk.steps, vector), params.dstate, chunk.steps,
         scratch.steps.delta, input, inputs.poles + vector * params.dstate,
         projection_of<Params>(scratch).of(chunk.lanes, vector), map, weights});
  }
};

}  // namespace selective_scan::cpu
