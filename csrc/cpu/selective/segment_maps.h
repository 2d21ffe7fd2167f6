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
  State* offsets;  // (vector, state)
  State* factors;
  R* step_sums;  // (vector)
  R* delta;      // (step)
  R* u;
  R* z;
  R* gate;
  R* dout;
  R* dy;

  SELECTIVE_SCAN_HD MapScratch(const ScanParams& params, const Block& block, void* base)
      : arena{static_cast<char*>(base)}, inputs(arena, params, block) {
    const int64_t vectors = num_vectors<R>(block);
    offsets = arena.take<State>(vectors * params.dstate);
    factors = arena.take<State>(vectors * params.dstate);
    step_sums = arena.take<R>(vectors);
    for (R** steps : {&delta, &u, &z, &gate, &dout, &dy}) *steps = arena.take<R>(kStateChunk);
  }

  void begin(const ScanParams& params, const Block& block) const {
    for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
      inputs.load(params, lanes_of<R>(block, vector), vector);
      step_sums[vector] = R(scalar_t<State>(0));
    }
    for (int64_t i = 0; i < num_vectors<R>(block) * params.dstate; ++i) {
      offsets[i] = State{};
      factors[i] = one<State>();
    }
  }

  /// Offsets go to the boundary before the segment, or `shift` later.
  void store(const ScanParams& params, const Block& block, int64_t shift) const {
    for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
      const Lanes lanes = lanes_of<R>(block, vector);
      const int64_t first = vector * params.dstate;
      store_rows(factors_of<State>(params, block, lanes), lanes, params.dstate, factors + first);
      store_rows(boundaries_of<State>(params, block, lanes, shift), lanes, params.dstate,
                 offsets + first);
    }
  }
};

template <class State, Method kMethod>
struct SegmentMaps {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using F = Formula<kMethod>;
  using Scratch = MapScratch<State>;

  static int64_t scratch_bytes(const ScanParams& params, const Block& block) {
    return Scratch(params, block, nullptr).arena.bytes;
  }

  static void forward(const ForwardParams& params, const Block& block, void* scratch_base) {
    const Scratch scratch(params, block, scratch_base);
    scratch.begin(params, block);
    for (int64_t offset = 0; offset < steps_of(params, block); offset += kStateChunk) {
      const Lanes first = lanes_of<R>(block, 0);
      scratch.inputs.load_B(params, block, first, chunk_at(params, first, offset));
      for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        advance_offsets(params, block, lanes, chunk_at(params, lanes, offset), scratch, vector);
      }
    }
    scratch.store(params, block, 1);
  }

  static void backward(const BackwardParams& params, const Block& block, void* scratch_base) {
    const Scratch scratch(params, block, scratch_base);
    scratch.begin(params, block);
    for_each_chunk_backwards(params, block, [&](int64_t offset) {
      const Lanes first = lanes_of<R>(block, 0);
      scratch.inputs.load_C(params, block, first, chunk_at(params, first, offset));
      for (int64_t vector = 0; vector < num_vectors<R>(block); ++vector) {
        const Lanes lanes = lanes_of<R>(block, vector);
        return_offsets(params, block, lanes, chunk_at(params, lanes, offset), scratch, vector);
      }
    });
    for (int64_t i = 0; i < num_vectors<R>(block) * params.dstate; ++i) {
      scratch.factors[i] = conj(scratch.factors[i]);
    }
    scratch.store(params, block, 0);
  }

 private:
  /// The product of abar over a chunk: of exponentials it is one, of the sum of steps.
  static SELECTIVE_SCAN_HD void add_steps(const ScanParams& params, const Chunk& chunk,
                                          const Scratch& scratch, int64_t vector) {
    if constexpr (F::kAbarIsExponential) {
      R sum = scratch.step_sums[vector];
      for (int64_t t = 0; t < chunk.steps; ++t) sum += scratch.delta[t];
      scratch.step_sums[vector] = sum;
      for (int64_t i = vector * params.dstate; i < (vector + 1) * params.dstate; ++i) {
        scratch.factors[i] = VectorMath::exp_of(sum * scratch.inputs.poles[i].exponent);
      }
    }
  }

  static void advance_offsets(const ForwardParams& params, const Block& block, const Lanes& lanes,
                              const Chunk& chunk, const Scratch& scratch, int64_t vector) {
    load_step_sizes(params, block, lanes, chunk, kStateChunk, scratch.inputs.delta_bias[vector],
                    scratch.delta, scratch.u, scratch.delta);
    load_sequence(params.u, block, lanes, chunk, kStateChunk, scratch.u);
    add_steps(params, chunk, scratch, vector);

    const ChunkSteps<R> steps{chunk.steps, scratch.delta, scratch.u};
    const Projection<State> B = scratch.inputs.B(params, lanes, vector);
    const Pole<State>* poles = scratch.inputs.poles + vector * params.dstate;
    State* offsets = scratch.offsets + vector * params.dstate;
    State* factors = scratch.factors + vector * params.dstate;
    const R least_norm = ByIncrements<State>::least_norm();
    for_each_state_group(params.dstate, [&]<int kStates>(int64_t n) {
      State factor[kStates];
      for (int j = 0; j < kStates; ++j) factor[j] = factors[n + j];
      with_form<kMethod>(poles + n, kStates, least_norm, [&]<class Form>(Form) {
        advance<Form, VectorMath, kStates, false>(
            steps, poles, B, B, n, offsets, static_cast<R*>(nullptr),
            [&](int64_t, int j, const State&, const KeptStep<State>& kept) {
              if constexpr (!F::kAbarIsExponential) factor[j] = kept.first * factor[j];
            });
      });
      for (int j = 0; j < kStates; ++j) factors[n + j] = factor[j];
    });
  }

  static void return_offsets(const BackwardParams& params, const Block& block, const Lanes& lanes,
                             const Chunk& chunk, const Scratch& scratch, int64_t vector) {
    load_step_sizes(params, block, lanes, chunk, -kStateChunk, scratch.inputs.delta_bias[vector],
                    scratch.delta, scratch.dy, scratch.delta);
    load_output_gradient(params, block, lanes, chunk, scratch.dout, scratch.z, scratch.gate,
                         scratch.dy);
    add_steps(params, chunk, scratch, vector);

    const Projection<State> C = scratch.inputs.C(params, lanes, vector);
    const Pole<State>* poles = scratch.inputs.poles + vector * params.dstate;
    State* offsets = scratch.offsets + vector * params.dstate;
    State* factors = scratch.factors + vector * params.dstate;
    for_each_state_group(params.dstate, [&]<int kStates>(int64_t n) {
      State carry[kStates], factor[kStates];
      for (int j = 0; j < kStates; ++j) {
        carry[j] = offsets[n + j];
        factor[j] = factors[n + j];
      }
      for (int64_t t = chunk.steps - 1; t >= 0; --t) {
        const R delta = scratch.delta[t];
        const R dy = constant<State>(kOutputScale<State>) * scratch.dy[t];
        for (int j = 0; j < kStates; ++j) {
          const State abar = F::template value<VectorMath>(delta, poles[n + j]).abar;
          carry[j] = (carry[j] + dy * conj(C.at(n + j, t))) * conj(abar);
          if constexpr (!F::kAbarIsExponential) factor[j] = abar * factor[j];
        }
      }
      for (int j = 0; j < kStates; ++j) {
        offsets[n + j] = carry[j];
        factors[n + j] = factor[j];
      }
    });
  }
};

}  // namespace selective_scan::cpu
