// The backward scan with full state matrices for one vector of channels, over the chunks from the
// last to the first. With g[t] the gradient of h[t],
//
//   λ[t] = (I − Δ/2·H)^-H·g[t]       g[t-1] = conj(C[t-1])·dy[t-1] + (I + Δ/2·H)^H·λ[t]
//   dH   = Σ Δ·λ[t]·m[t]^H           d(B·G) = λ[t]
//   dΔ   = Re((H^H·λ[t])^H·m[t])
//
// with the state m[t] at the middle of the step, (h[t] + h[t-1])/2, which is solved for, because
// the sum cancels if Δ·H is large. The gain G is Δ·u, or E·u if the input has its own steps E.
//
// The steps of a chunk are recomputed from the state saved before it, and kept. On the way back
// each step is factored again, since the factors of all steps would not fit in any cache. Small
// matrix products over the chunk take dB and dC out of the basis.
#pragma once

#include <cstdint>

#include "../selective/backward.h"
#include "../simd/transpose.h"
#include "basis.h"

namespace selective_scan::cpu {

template <class State>
struct MatrixBackwardScratch {
  using R = real_t<State>;
  using T = scalar_t<State>;

  Arena arena;
  BackwardSteps<R> steps;
  MatrixInputs<State> inputs;
  State* carry;               // (state): the part of g that comes from later steps
  State* gradient;            // (state): g
  CompensatedSum<State>* dB;  // (state), if constant
  CompensatedSum<State>* dC;
  State* states;   // (step, state), one step more: h, beginning with the state before the chunk
  State* middles;  // (step, state): m
  State* lambdas;
  State* turned;  // λ or h, taken out of the basis
  T* tile;        // of dB or dC, laid out like a ProjectionTile

  SELECTIVE_SCAN_HD MatrixBackwardScratch(const ScanParams& params, void* base)
      : arena{static_cast<char*>(base)}, steps(arena), inputs(arena, params) {
    const int64_t order = params.dstate;
    carry = arena.take<State>(order);
    gradient = arena.take<State>(order);
    dB = arena.take<CompensatedSum<State>>(order);
    dC = arena.take<CompensatedSum<State>>(order);
    states = arena.take<State>((kStateChunk + 1) * order);
    for (State** rows : {&middles, &lambdas, &turned})
      *rows = arena.take<State>(kStateChunk * order);
    tile = arena.take<T>(ProjectionTile<State>::values(order, true));
  }
};

template <class State>
struct MatrixBackward {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Scratch = MatrixBackwardScratch<State>;

  /// Returns the bytes of scratch memory that run() and finish() need.
  static int64_t scratch_bytes(const ScanParams& params) {
    Arena arena;
    for (int matrix = 0; matrix < 2; ++matrix) arena.take<State>(params.dstate * params.dstate);
    return greater_of(Scratch(params, nullptr).arena.bytes, arena.bytes);
  }

  static void run(const MatrixBackwardParams& params, const Block& block,
                  const BackwardPartials& partials, const void* bases, void* dH,
                  void* scratch_base) {
    const Scratch scratch(params, scratch_base);
    const MatrixInputs<State>& inputs = scratch.inputs;
    const Basis<State> basis(bases, params, block);
    const Lanes lanes = channels_of(block);
    const int64_t order = params.dstate;
    State* const dH_of_block = gradient_of_H(params, block, block.batch, dH);
    R D, delta_bias;
    load_channels(params.D, lanes, D);
    load_channels(params.delta_bias, lanes, delta_bias);
    inputs.load_constants(params, lanes, basis);
    inputs.load_states_in_basis(params, params.dlast_state, lanes, basis, scratch.carry);
    for (int64_t n = 0; n < order; ++n) scratch.dB[n] = scratch.dC[n] = {};
    for (int64_t i = 0; i < order * order; ++i) dH_of_block[i] = State{};
    CompensatedSum<R> dD{}, ddelta_bias{};

    for_each_chunk_backwards(block, [&](int64_t offset) {
      const Chunk chunk = chunk_at(params, lanes, offset);
      inputs.load_chunk(params, chunk, basis);
      load_backward_steps<State>(params, chunk, delta_bias, scratch.steps);
      go_forward(params, chunk, basis, scratch);
      go_back(params, chunk, basis, scratch);
      add_to_dH(order, chunk.steps, scratch, dH_of_block);
      add_to_projections(params, chunk, basis, partials, scratch);
      const R* const gain_steps =
          params.input_delta.present() ? scratch.steps.input_delta : scratch.steps.delta;
      finish_backward_steps<State, R>(params, chunk, D, gain_steps, scratch.steps, dD, ddelta_bias);
    });

    store_sums(params, lanes, basis, partials, scratch);
    const int64_t first_channel = block.batch * params.dim + lanes.channel;
    const auto store_channels = [&](void* data, R value) {
      T* target = static_cast<T*>(data) + first_channel;
      for (int64_t lane = 0; lane < lanes.count; ++lane) target[lane] = value.lane(lane);
    };
    if (params.D.present()) store_channels(partials.dD, dD.value());
    if (params.delta_bias.present()) store_channels(partials.ddelta_bias, ddelta_bias.value());
    if (params.initial_state.present()) {
      inputs.store_states_of_basis(params, params.dinitial_state, lanes, basis, scratch.carry);
    }
  }

  /// dA = Q·(Σ dH over the batch)·Q^H
  static void finish(const MatrixBackwardParams& params, const Block& block, const void* bases,
                     const void* dH, void* scratch_base) {
    const int64_t order = params.dstate;
    const Basis<State> basis(bases, params, block);
    Arena arena{static_cast<char*>(scratch_base)};
    State* const sum = arena.take<State>(order * order);
    State* const product = arena.take<State>(order * order);  // (column, row)
    for (int64_t i = 0; i < order * order; ++i) {
      sum[i] = State{};
      for (int64_t batch = 0; batch < params.batch; ++batch) {
        sum[i] += gradient_of_H(params, block, batch, const_cast<void*>(dH))[i];
      }
    }
    basis.by_Q(order, [&](int64_t k, int64_t column) { return sum[k * order + column]; }, product);
    // (Q·Σ)·Q^H is, row by row, conj(Q)·row.
    multiply_steps(
        order, order, [&](int64_t i, int64_t k) { return conj(basis.Q[i * order + k]); },
        [&](int64_t k, int64_t row) { return product[k * order + row]; }, sum);
    ArrayView row = params.dA;
    row.state = params.dA_column;
    for (int64_t i = 0; i < order; ++i) {
      store_states(row, block.first_channel * row.channel + i * params.dA.state, block.channels,
                   row.channel, order, sum + i * order);
    }
  }

 private:
  static SELECTIVE_SCAN_HD State* gradient_of_H(const ScanParams& params, const Block& block,
                                                int64_t batch, void* dH) {
    const int64_t blocks = params.groups * Basis<State>::blocks_per_group(params);
    const int64_t index = batch * blocks + Basis<State>::channel_block(params, block);
    return static_cast<State*>(dH) + index * params.dstate * params.dstate;
  }

  static void go_forward(const MatrixBackwardParams& params, const Chunk& chunk,
                         const Basis<State>& basis, const Scratch& scratch) {
    const int64_t order = params.dstate;
    const MatrixInputs<State>& inputs = scratch.inputs;
    if (chunk.first_step == 0) {
      inputs.load_states_in_basis(params, params.initial_state, chunk.lanes, basis, scratch.states);
    } else {
      saved_states<State>(params, chunk.lanes, chunk.first_step / kStateChunk - 1)
          .load(chunk.lanes.count, order, scratch.states);
    }
    for (int64_t t = 0; t < chunk.steps; ++t) {
      State* before = scratch.states + t * order;
      inputs.step(basis, t, scratch.steps, before, scratch.middles + t * order, before + order);
      if (params.z.present()) scratch.steps.y[t] = inputs.output(order, t, before + order);
    }
  }

  static void go_back(const MatrixBackwardParams& params, const Chunk& chunk,
                      const Basis<State>& basis, const Scratch& scratch) {
    const int64_t order = params.dstate;
    const MatrixInputs<State>& inputs = scratch.inputs;
    for (int64_t t = chunk.steps - 1; t >= 0; --t) {
      const R delta = scratch.steps.delta[t];
      const R dy = output_gradient(scratch, t);
      const State* C = inputs.C.at(t);
      State* lambda = scratch.lambdas + t * order;
      for (int64_t n = 0; n < order; ++n) {
        scratch.gradient[n] = scratch.carry[n] + dy * conj(C[n]);
      }
      const State* product =
          inputs.step_back(basis, delta, scratch.gradient, lambda, scratch.carry);

      const State* middle = scratch.middles + t * order;
      const State* B = inputs.B.at(t);
      R ddelta = constant<R>(0), dgain = constant<R>(0);
      for (int64_t n = 0; n < order; ++n) {
        ddelta += real_of_product_conj(middle[n], product[n]);
        dgain += real_of_product_conj(B[n], lambda[n]);
      }
      scratch.steps.ddelta[t] = ddelta;
      scratch.steps.du[t] = dgain;
    }
  }

  /// Returns the gradient of Σ C·h before its real part is taken.
  static SELECTIVE_SCAN_HD R output_gradient(const Scratch& scratch, int64_t t) {
    return constant<R>(kOutputScale<State>) * scratch.steps.dy[t];
  }

  /// dH += Σ Δ·λ·m^H, a tile of rows and columns at a time in registers. Overwrites m.
  static void add_to_dH(int64_t order, int64_t steps, const Scratch& scratch, State* dH) {
    State* const middles = scratch.middles;
    for (int64_t t = 0; t < steps; ++t) {
      for (int64_t i = t * order; i < (t + 1) * order; ++i) {
        middles[i] = scratch.steps.delta[t] * conj(middles[i]);
      }
    }
    constexpr int kTile = is_complex_v<State> ? 2 : 4;
    const auto tile_at = [&]<int kRows, int kColumns>(int64_t i, int64_t j) {
      State sums[kRows][kColumns];
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kColumns; ++c) sums[r][c] = State{};
      }
      for (int64_t t = 0; t < steps; ++t) {
        const State* lambda = scratch.lambdas + t * order + i;
        const State* middle = middles + t * order + j;
        for (int r = 0; r < kRows; ++r) {
          for (int c = 0; c < kColumns; ++c) {
            sums[r][c] = multiply_add(lambda[r], middle[c], sums[r][c]);
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kColumns; ++c) dH[(i + r) * order + j + c] += sums[r][c];
      }
    };
    for_each_group<kTile>(order, [&]<int kRows>(int64_t i) {
      for_each_group<kTile>(order, [&]<int kColumns>(int64_t j) {
        tile_at.template operator()<kRows, kColumns>(i, j);
      });
    });
  }

  static void add_to_projections(const MatrixBackwardParams& params, const Chunk& chunk,
                                 const Basis<State>& basis, const BackwardPartials& partials,
                                 const Scratch& scratch) {
    const int64_t order = params.dstate;
    const State* h = scratch.states + order;
    const auto input = [&](int64_t t) { return scratch.steps.gains[t]; };
    const auto output = [&](int64_t t) { return output_gradient(scratch, t); };
    const auto same = [](State value) { return value; };
    const auto conjugate = [](State value) { return conj(value); };
    if (params.variable_B) {
      store_tile_of(order, chunk.steps, basis, scratch.lambdas, input, same, scratch);
      store_projection_gradient<State>(params, chunk, partials, params.dB, partials.dB_blocks,
                                       scratch.tile);
    } else {
      add_steps(order, chunk.steps, scratch.lambdas, input, same, scratch.dB);
    }
    if (params.variable_C) {
      store_tile_of(order, chunk.steps, basis, h, output, conjugate, scratch);
      store_projection_gradient<State>(params, chunk, partials, params.dC, partials.dC_blocks,
                                       scratch.tile);
    } else {
      add_steps(order, chunk.steps, h, output, same, scratch.dC);
    }
  }

  /// sums[n] += Σ factor(t)·form(values[t][n])
  template <class Factor, class Form>
  static void add_steps(int64_t order, int64_t steps, const State* values, const Factor& factor,
                        const Form& form, CompensatedSum<State>* sums) {
    for (int64_t n = 0; n < order; ++n) {
      State sum{};
      for (int64_t t = 0; t < steps; ++t) sum += factor(t) * form(values[t * order + n]);
      sums[n].add(sum);
    }
  }

  /// tile[n][t] = Σ factor(t)·form((Q·values[t])[n]) over the lanes
  template <class Factor, class Form>
  static void store_tile_of(int64_t order, int64_t steps, const Basis<State>& basis,
                            const State* values, const Factor& factor, const Form& form,
                            const Scratch& scratch) {
    basis.by_Q(steps, [&](int64_t k, int64_t t) { return values[t * order + k]; }, scratch.turned);
    constexpr int kWidth = R::kWidth;
    for (int64_t n = 0; n < order; ++n) {
      for (int64_t first = 0; first < steps; first += kWidth) {
        R rows[kComponents<State>][kWidth];
        for (int i = 0; i < kWidth; ++i) {
          const int64_t t = first + i;
          const State term = t < steps ? factor(t) * form(scratch.turned[t * order + n]) : State{};
          if constexpr (is_complex_v<State>) {
            rows[0][i] = term.re;
            rows[1][i] = term.im;
          } else {
            rows[0][i] = term;
          }
        }
        for (int component = 0; component < kComponents<State>; ++component) {
          sum_of_each(rows[component])
              .store(scratch.tile + (component * order + n) * kStateChunk + first);
        }
      }
    }
  }

  /// Stores the gradients of constant B and C.
  static void store_sums(const MatrixBackwardParams& params, const Lanes& lanes,
                         const Basis<State>& basis, const BackwardPartials& partials,
                         const Scratch& scratch) {
    const int64_t order = params.dstate;
    const auto store = [&](void* data, const CompensatedSum<State>* sums, bool conjugates) {
      basis.by_Q(1, [&](int64_t k, int64_t) { return sums[k].value(); }, scratch.turned);
      for (int64_t n = 0; conjugates && n < order; ++n) scratch.turned[n] = conj(scratch.turned[n]);
      channel_states(contiguous_states<State>(data, params), lanes)
          .store(lanes.count, order, scratch.turned);
    };
    if (!params.variable_B) store(partials.dB, scratch.dB, false);
    if (!params.variable_C) store(partials.dC, scratch.dC, true);
  }
};

}  // namespace selective_scan::cpu
