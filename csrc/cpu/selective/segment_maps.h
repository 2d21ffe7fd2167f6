// The first pass over segmented sequences (segments.h): the affine map by which a segment takes the
// state before it to the state behind it, and the gradient of the latter to that of the former.
//
// Mapping and cost as in the forward scan, without the outputs.
#pragma once

#include <cstdint>

#include "backward.h"

namespace selective_scan::cpu {

template <class State>
struct MapScratch {
  using R = real_t<State>;

  Arena arena;
  BlockInputs<State> inputs;
  BlockMaps<State> maps;
  R* delta;  // (step)
  R* u;
  R* z;
  R* gate;
  R* dout;
  R* dy;

  SELECTIVE_SCAN_HD MapScratch(const ScanParams& params, const Block& block, void* base)
      : arena{static_cast<char*>(base)}, inputs(arena, params, block), maps(arena, params, block) {
    for (R** steps : {&delta, &u, &z, &gate, &dout, &dy}) *steps = arena.take<R>(kStateChunk);
  }

  void begin(const ScanParams& params, const Block& block) const {
    for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
      inputs.load(params, lanes_of<R>(block, vector), vector);
    }
    maps.begin(params, block);
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

  static void forward(const ForwardParams& params, const Block& block, void* scratch_base) {
    const Scratch scratch(params, block, scratch_base);
    scratch.begin(params, block);
    for (int64_t offset = 0; offset < block.steps; offset += kStateChunk) {
      const Lanes first = lanes_of<R>(block, 0);
      scratch.inputs.load_B(params, block, first, chunk_at(params, first, offset), kStateChunk);
      for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        advance_offsets(params, block, lanes, chunk_at(params, lanes, offset), scratch, vector);
      }
    }
    scratch.maps.store(params, block, false);
  }

  static void backward(const BackwardParams& params, const Block& block, void* scratch_base) {
    const Scratch scratch(params, block, scratch_base);
    scratch.begin(params, block);
    for_each_chunk_backwards(block, [&](int64_t offset) {
      const Lanes first = lanes_of<R>(block, 0);
      scratch.inputs.load_C(params, block, first, chunk_at(params, first, offset), -kStateChunk);
      for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        return_offsets(params, block, lanes, chunk_at(params, lanes, offset), scratch, vector);
      }
    });
    scratch.maps.store(params, block, true);
  }

 private:
  static void advance_offsets(const ForwardParams& params, const Block& block, const Lanes& lanes,
                              const Chunk& chunk, const Scratch& scratch, int64_t vector) {
    load_step_sizes(params, block, lanes, chunk, kStateChunk, scratch.inputs.delta_bias[vector],
                    scratch.delta, scratch.u, scratch.delta);
    load_sequence(params.u, block, lanes, chunk, kStateChunk, scratch.u);
    const MapSweep<State> sweep =
        sweep_of(params, chunk, scratch, vector, scratch.u, scratch.inputs.B(params, lanes, vector),
                 is_last_chunk(lanes, chunk));
    Sweeps<State>::all()[params.method].forward_map(sweep);
  }

  static void return_offsets(const BackwardParams& params, const Block& block, const Lanes& lanes,
                             const Chunk& chunk, const Scratch& scratch, int64_t vector) {
    load_step_sizes(params, block, lanes, chunk, -kStateChunk, scratch.inputs.delta_bias[vector],
                    scratch.delta, scratch.dy, scratch.delta);
    load_output_gradient(params, block, lanes, chunk, scratch.dout, scratch.z, scratch.gate,
                         scratch.dy);
    const MapSweep<State> sweep =
        sweep_of(params, chunk, scratch, vector, scratch.dy,
                 scratch.inputs.C(params, lanes, vector), is_first_chunk(lanes, chunk));
    Sweeps<State>::all()[params.method].backward_map(sweep);
  }

  static MapSweep<State> sweep_of(const ScanParams& params, const Chunk& chunk,
                                  const Scratch& scratch, int64_t vector, const R* input,
                                  const Projection<State>& projection, bool is_end) {
    const int64_t of_vector = vector * params.dstate;
    return {params.dstate,
            chunk.steps,
            scratch.delta,
            input,
            scratch.inputs.poles + of_vector,
            projection,
            scratch.maps.next(params, vector, scratch.delta, chunk.steps, is_end)};
  }
};

}  // namespace selective_scan::cpu
