// The backward scan of a block of channels: chunks from the last to the first.
//
// Mapping as in the forward scan. From the state saved before a chunk, kStatesInRegisters states at
// a time walk it forward, keeping h, abar and bbar of every step (34 KiB at the most, AVX-512
// complex), then walk it backward with the gradient of h in registers. Gradients of u, Δ add up
// over the states in tiles (step, lane). Those of variable B and C are sums over channels: the
// products of a chunk are transposed and added across lanes, then over the block's vectors of
// channels, in one tile (state, step). Gradients summed over the steps are added in registers
// through a chunk, and over the chunks with compensation. Bound by arithmetic.
#pragma once

#include <cstdint>

#include "scan_forward.h"

namespace selective_scan::cpu {

/// A sum of many terms that carries what rounding lost (Knuth's two-sum).
template <class R>
struct CompensatedSum {
  R sum;
  R lost;

  SELECTIVE_SCAN_HD void add(R term) {
    const R total = sum + term;
    const R rounded_term = total - sum;
    lost += (sum - (total - rounded_term)) + (term - rounded_term);
    sum = total;
  }
  /// An infinite sum has no meaningful correction.
  SELECTIVE_SCAN_HD R value() const { return select(lost == lost, sum + lost, sum); }
};

template <class State>
struct CompensatedState {
  CompensatedSum<State> real;
  SELECTIVE_SCAN_HD void add(State term) { real.add(term); }
  SELECTIVE_SCAN_HD State value() const { return real.value(); }
};
template <class R>
struct CompensatedState<Complex<R>> {
  CompensatedSum<R> re;
  CompensatedSum<R> im;
  SELECTIVE_SCAN_HD void add(Complex<R> term) {
    re.add(term.re);
    im.add(term.im);
  }
  SELECTIVE_SCAN_HD Complex<R> value() const { return {re.value(), im.value()}; }
};

/// What a walk through a chunk keeps for the way back: (step, state in registers).
template <class State>
struct KeptSteps {
  State* h;  // one more step: the state before the chunk comes first
  State* abar;
  State* bbar;  // only of methods whose bbar depends on A
};

template <class State>
struct BackwardScratch {
  using R = real_t<State>;
  using T = scalar_t<State>;

  Arena arena;
  BlockInputs<State> inputs;
  State* carry;                 // (vector, state): gradient of h from later steps
  CompensatedState<State>* dA;  // (vector, state)
  CompensatedState<State>* dB;  // if constant
  CompensatedState<State>* dC;
  CompensatedSum<R>* dD;  // (vector)
  CompensatedSum<R>* ddelta_bias;
  T* dB_tile;  // (component, state, kStateChunk), if variable
  T* dC_tile;
  State* states;  // (state)
  KeptSteps<State> kept;
  R* dB_products;  // (component, state in registers, step), for the lanes' sums
  R* dC_products;
  R* biased_delta;  // (step)
  R* delta;
  R* u;
  R* z;
  R* gate;  // sigmoid(z)
  R* dout;
  R* dy;
  R* y;
  R* du;
  R* ddelta;

  SELECTIVE_SCAN_HD BackwardScratch(const BackwardParams& params, int64_t block_channels,
                                    void* base)
      : arena{static_cast<char*>(base)},
        inputs(arena, params, round_up(block_channels, R::kWidth) / R::kWidth) {
    const int64_t vectors = round_up(block_channels, R::kWidth) / R::kWidth;
    const int64_t per_state = vectors * params.dstate;
    const int64_t tile = kComponents<State> * params.dstate * kStateChunk;
    constexpr int64_t kKept = kStatesInRegisters * kStateChunk;
    constexpr int64_t kProducts = kComponents<State> * kKept;
    carry = arena.take<State>(per_state);
    dA = arena.take<CompensatedState<State>>(per_state);
    dB = arena.take<CompensatedState<State>>(params.variable_B ? 0 : per_state);
    dC = arena.take<CompensatedState<State>>(params.variable_C ? 0 : per_state);
    dD = arena.take<CompensatedSum<R>>(vectors);
    ddelta_bias = arena.take<CompensatedSum<R>>(vectors);
    dB_tile = arena.take<T>(params.variable_B ? tile : 0);
    dC_tile = arena.take<T>(params.variable_C ? tile : 0);
    states = arena.take<State>(params.dstate);
    kept.h = arena.take<State>(kKept + kStatesInRegisters);
    kept.abar = arena.take<State>(kKept);
    kept.bbar = arena.take<State>(kKept);
    dB_products = arena.take<R>(kProducts);
    dC_products = arena.take<R>(kProducts);
    for (R** steps : {&biased_delta, &delta, &u, &z, &gate, &dout, &dy, &y, &du, &ddelta}) {
      *steps = arena.take<R>(kStateChunk);
    }
  }
};

template <class State, Method kMethod>
struct BackwardKernel {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using F = Formula<kMethod>;
  using Scratch = BackwardScratch<State>;

  static int64_t scratch_bytes(const BackwardParams& params, int64_t block_channels) {
    return Scratch(params, block_channels, nullptr).arena.bytes;
  }

  static void run(const BackwardParams& params, const Block& block,
                  const BackwardPartials& partials, void* scratch_base) {
    Scratch scratch(params, block.channels, scratch_base);
    const int64_t dstate = params.dstate;
    for (int64_t first = 0; first < block.channels; first += R::kWidth) {
      const int64_t vector = first / R::kWidth;
      const int64_t channel = block.first_channel + first;
      const int64_t lanes = lanes_of(block, first);
      scratch.inputs.load(params, vector, channel, lanes);
      load_states(params.dlast_state, block.batch, channel, lanes, dstate,
                  scratch.carry + vector * dstate);
      for (int64_t i = vector * dstate; i < (vector + 1) * dstate; ++i) {
        scratch.dA[i] = {};
        if (!params.variable_B) scratch.dB[i] = {};
        if (!params.variable_C) scratch.dC[i] = {};
      }
      scratch.dD[vector] = {};
      scratch.ddelta_bias[vector] = {};
    }

    const int64_t chunks = (params.seqlen + kStateChunk - 1) / kStateChunk;
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t first_step = chunk * kStateChunk;
      const int64_t left = params.seqlen - first_step;
      const int64_t steps = left < kStateChunk ? left : kStateChunk;
      scratch.inputs.load_steps(params, block, first_step, steps);
      const int64_t tile = kComponents<State> * dstate * kStateChunk;
      if (params.variable_B) clear(scratch.dB_tile, tile);
      if (params.variable_C) clear(scratch.dC_tile, tile);
      for (int64_t first = 0; first < block.channels; first += R::kWidth) {
        scan_chunk(params, block, scratch, first, chunk, steps);
      }
      if (params.variable_B) {
        store_projection(params, block, partials, params.dB, partials.dB_blocks, scratch.dB_tile,
                         chunk, steps);
      }
      if (params.variable_C) {
        store_projection(params, block, partials, params.dC, partials.dC_blocks, scratch.dC_tile,
                         chunk, steps);
      }
    }

    for (int64_t first = 0; first < block.channels; first += R::kWidth) {
      store_sums(params, block, partials, scratch, first);
    }
  }

 private:
  static SELECTIVE_SCAN_HD int64_t lanes_of(const Block& block, int64_t first) {
    const int64_t left = block.channels - first;
    return left < R::kWidth ? left : R::kWidth;
  }

  static SELECTIVE_SCAN_HD void clear(T* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values[i] = T(0);
  }

  static void scan_chunk(const BackwardParams& params, const Block& block, const Scratch& scratch,
                         int64_t first, int64_t chunk, int64_t steps) {
    const int64_t vector = first / R::kWidth;
    const int64_t channel = block.first_channel + first;
    const int64_t lanes = lanes_of(block, first);
    const int64_t dstate = params.dstate;
    const int64_t first_step = chunk * kStateChunk;
    const R D = scratch.inputs.D[vector];
    const R delta_bias = scratch.inputs.delta_bias[vector];
    const auto load = [&](const ArrayView& view, R* tile) {
      load_sequence(view, block, channel, lanes, first_step, steps, tile);
    };

    load(params.delta, scratch.biased_delta);
    load(params.u, scratch.u);
    load(params.dout, scratch.dout);
    if (params.z.present()) load(params.z, scratch.z);
    for (int64_t t = 0; t < steps; ++t) {
      scratch.biased_delta[t] = scratch.biased_delta[t] + delta_bias;
      scratch.delta[t] = step_size(scratch.biased_delta[t], params.delta_softplus);
      scratch.dy[t] = scratch.dout[t];
      scratch.y[t] = R(T(0));
      scratch.du[t] = R(T(0));
      scratch.ddelta[t] = R(T(0));
    }
    if (params.z.present()) {
      for (int64_t t = 0; t < steps; ++t) {
        scratch.gate[t] = VectorMath::sigmoid(scratch.z[t]);
        scratch.dy[t] = scratch.dout[t] * (scratch.z[t] * scratch.gate[t]);
      }
    }
    if (chunk == 0) {
      load_states(params.initial_state, block.batch, channel, lanes, dstate, scratch.states);
    } else {
      load_states(saved_states<State>(params, chunk - 1), block.batch, channel, lanes, dstate,
                  scratch.states);
    }

    for_each_state_group(dstate, [&]<int kStates>(int64_t n) {
      scan_states<kStates>(params, scratch, vector, n, steps);
    });

    CompensatedSum<R>& dD = scratch.dD[vector];
    CompensatedSum<R>& ddelta_bias = scratch.ddelta_bias[vector];
    R dD_of_chunk(T(0)), ddelta_bias_of_chunk(T(0));
    for (int64_t t = 0; t < steps; ++t) {
      const R u = scratch.u[t];
      const R dy = scratch.dy[t];
      scratch.du[t] = scratch.du[t] + D * dy;
      if (params.delta_softplus) {
        scratch.ddelta[t] =
            scratch.ddelta[t] * softplus_derivative(scratch.biased_delta[t], scratch.delta[t]);
      }
      dD_of_chunk += dy * u;
      ddelta_bias_of_chunk += scratch.ddelta[t];
    }
    dD.add(dD_of_chunk);
    ddelta_bias.add(ddelta_bias_of_chunk);
    if (params.z.present()) {
      for (int64_t t = 0; t < steps; ++t) {
        const R z = scratch.z[t];
        const R y = constant<State>(kOutputScale<State>) * scratch.y[t] + D * scratch.u[t];
        scratch.z[t] = scratch.dout[t] * y * silu_derivative(z, scratch.gate[t]);
      }
      store_sequence(params.dz, block, channel, lanes, first_step, steps, scratch.z);
    }
    store_sequence(params.du, block, channel, lanes, first_step, steps, scratch.du);
    store_sequence(params.ddelta, block, channel, lanes, first_step, steps, scratch.ddelta);
  }

  /// kStates states from n on, forward and back through a chunk.
  template <int kStates>
  static SELECTIVE_SCAN_HD void scan_states(const BackwardParams& params, const Scratch& scratch,
                                            int64_t vector, int64_t n, int64_t steps) {
    const int64_t of_vector = vector * params.dstate;
    const Pole<State>* poles = scratch.inputs.poles + of_vector;
    const Projection<State> B = scratch.inputs.B(params, vector);
    const Projection<State> C = scratch.inputs.C(params, vector);
    const KeptSteps<State> kept = scratch.kept;

    for (int j = 0; j < kStates; ++j) kept.h[j] = scratch.states[n + j];
    const ChunkSteps<R> chunk{steps, scratch.delta, scratch.u};
    advance<kMethod, kStates>(
        chunk, poles, B, C, n, scratch.states, scratch.y,
        [&](int64_t t, int j, const State& h, const Coefficients<State>& value) {
          kept.h[(t + 1) * kStates + j] = h;
          kept.abar[t * kStates + j] = value.abar;
          if constexpr (F::kBbarDependsOnA) kept.bbar[t * kStates + j] = value.bbar;
        });

    State carry[kStates], dA[kStates], dB_sum[kStates], dC_sum[kStates];
    for (int j = 0; j < kStates; ++j) {
      carry[j] = scratch.carry[of_vector + n + j];
      dA[j] = dB_sum[j] = dC_sum[j] = State{};
    }
    for (int64_t t = steps - 1; t >= 0; --t) {
      const R delta = scratch.delta[t];
      const R u = scratch.u[t];
      const R dy = constant<State>(kOutputScale<State>) * scratch.dy[t];
      R du = scratch.du[t];
      R ddelta = scratch.ddelta[t];
      for (int j = 0; j < kStates; ++j) {
        const State g = carry[j] + dy * conj(C.at(n + j, t));  // gradient of h[t]
        const State before = kept.h[t * kStates + j];
        const State dC = dy * conj(kept.h[(t + 1) * kStates + j]);
        Coefficients<State> value;
        value.abar = kept.abar[t * kStates + j];
        const State dinput_over_gain = g * conj(B.at(n + j, t));
        State dB;
        if constexpr (F::kBbarDependsOnA) {
          value.bbar = kept.bbar[t * kStates + j];
          dB = u * (g * conj(value.bbar));
          du += real(dinput_over_gain * conj(value.bbar));
        } else {
          dB = (u * delta) * g;
          du += delta * real(dinput_over_gain);
        }
        const StepGradient<State> gradient = backpropagate<kMethod, VectorMath>(
            delta, poles[n + j], value, g * conj(before), u * dinput_over_gain);
        ddelta += gradient.delta;
        dA[j] += gradient.A;
        carry[j] = g * conj(value.abar);
        if (B.is_variable()) {
          keep_product(scratch.dB_products, j, t, dB);
        } else {
          dB_sum[j] += dB;
        }
        if (C.is_variable()) {
          keep_product(scratch.dC_products, j, t, dC);
        } else {
          dC_sum[j] += dC;
        }
      }
      scratch.du[t] = du;
      scratch.ddelta[t] = ddelta;
    }

    for (int j = 0; j < kStates; ++j) {
      const int64_t i = of_vector + n + j;
      scratch.carry[i] = carry[j];
      scratch.dA[i].add(dA[j]);
      if (!B.is_variable()) scratch.dB[i].add(dB_sum[j]);
      if (!C.is_variable()) scratch.dC[i].add(dC_sum[j]);
    }
    if (B.is_variable()) {
      add_lanes<kStates>(params, scratch.dB_products, n, steps, scratch.dB_tile);
    }
    if (C.is_variable()) {
      add_lanes<kStates>(params, scratch.dC_products, n, steps, scratch.dC_tile);
    }
  }

  static SELECTIVE_SCAN_HD void keep_product(R* products, int j, int64_t t, State product) {
    R* at = products + j * kComponents<State> * kStateChunk + t;
    if constexpr (is_complex_v<State>) {
      at[0] = product.re;
      at[kStateChunk] = product.im;
    } else {
      at[0] = product;
    }
  }

  /// Adds the products' sums over the lanes to a tile (component, state, step).
  template <int kStates>
  static SELECTIVE_SCAN_HD void add_lanes(const BackwardParams& params, R* products, int64_t n,
                                          int64_t steps, T* tile) {
    for (int row = 0; row < kStates * kComponents<State>; ++row) {
      const int j = row / kComponents<State>;
      const int component = row % kComponents<State>;
      R* of_row = products + row * kStateChunk;
      T* target = tile + (component * params.dstate + n + j) * kStateChunk;
      for (int64_t t = steps; t % R::kWidth != 0; ++t) of_row[t] = R(T(0));
      for (int64_t t = 0; t < steps; t += R::kWidth) {
        (R::load(target + t) + sum_of_each(of_row + t)).store(target + t);
      }
    }
  }

  static void store_projection(const BackwardParams& params, const Block& block,
                               const BackwardPartials& partials, const ArrayView& gradient,
                               void* blocks, const T* tile, int64_t chunk, int64_t steps) {
    const int64_t size = kComponents<State> * params.dstate * kStateChunk;
    if (blocks) {
      const int64_t chunks = (params.seqlen + kStateChunk - 1) / kStateChunk;
      const int64_t index =
          ((block.batch * params.groups + block.group) * partials.blocks_per_group + block.index) *
              chunks +
          chunk;
      memcpy(static_cast<T*>(blocks) + index * size, tile, size * sizeof(T));
      return;
    }
    const Section section = projection_section(gradient, block.batch, block.group, params.dstate,
                                               chunk * kStateChunk, steps);
    store_tile<R>(section, tile, kStateChunk);
    if constexpr (is_complex_v<State>) {
      store_tile<R>(imaginary_part(section, gradient), tile + params.dstate * kStateChunk,
                    kStateChunk);
    }
  }

  static void store_sums(const BackwardParams& params, const Block& block,
                         const BackwardPartials& partials, const Scratch& scratch, int64_t first) {
    const int64_t dstate = params.dstate;
    const int64_t vector = first / R::kWidth;
    const int64_t channel = block.first_channel + first;
    const int64_t lanes = lanes_of(block, first);
    const auto store = [&](void* data, const CompensatedState<State>* sums) {
      for (int64_t n = 0; n < dstate; ++n) scratch.states[n] = sums[vector * dstate + n].value();
      store_states(contiguous_states<State>(data, params), block.batch, channel, lanes, dstate,
                   scratch.states);
    };
    const auto store_channels = [&](void* data, const CompensatedSum<R>& sum) {
      const R value = sum.value();
      T* target = static_cast<T*>(data) + block.batch * params.dim + channel;
      for (int64_t lane = 0; lane < lanes; ++lane) target[lane] = value.lane(lane);
    };
    store(partials.dA, scratch.dA);
    if (!params.variable_B) store(partials.dB, scratch.dB);
    if (!params.variable_C) store(partials.dC, scratch.dC);
    if (params.D.present()) store_channels(partials.dD, scratch.dD[vector]);
    if (params.delta_bias.present()) {
      store_channels(partials.ddelta_bias, scratch.ddelta_bias[vector]);
    }
    if (params.initial_state.present()) {
      store_states(params.dinitial_state, block.batch, channel, lanes, dstate,
                   scratch.carry + vector * dstate);
    }
  }
};

}  // namespace selective_scan::cpu
