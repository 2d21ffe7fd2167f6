// The basis in which a channel's A is a Hessenberg matrix, A = Q·H·Q^H, and conversions to and from
// it.
#pragma once

#include <cstdint>

#include "../selective/block.h"
#include "../selective/steps.h"
#include "hessenberg.h"
#include "kernels.h"

namespace selective_scan::cpu {

SELECTIVE_SCAN_HD Lanes channels_of(const Block& block) {
  Lanes lanes{block};
  lanes.channel = block.first_channel;
  lanes.count = block.channels;
  lanes.channels = 1;
  lanes.steps = block.steps;
  return lanes;
}

/// result[t][i] = Σ_k matrix(i, k)·in(k, t) for `steps` steps. Computes several steps at once,
/// which gives enough sums to keep the multipliers busy.
template <class State, class Matrix, class In>
void multiply_steps(int64_t order, int64_t steps, const Matrix& matrix, const In& in,
                    State* result) {
  const auto steps_from = [&]<int kSteps>(int64_t t) {
    for (int64_t i = 0; i < order; ++i) {
      State sums[kSteps];
      for (int step = 0; step < kSteps; ++step) sums[step] = State{};
      for (int64_t k = 0; k < order; ++k) {
        const State factor = matrix(i, k);
        for (int step = 0; step < kSteps; ++step) {
          sums[step] = multiply_add(factor, in(k, t + step), sums[step]);
        }
      }
      for (int step = 0; step < kSteps; ++step) result[(t + step) * order + i] = sums[step];
    }
  };
  for_each_group<is_complex_v<State> ? 4 : 8>(steps, steps_from);
}

/// The matrices H and Q of a block's channels.
template <class State>
struct Basis {
  int64_t order;
  const State* H;
  const State* Q;

  SELECTIVE_SCAN_HD Basis(const void* bases, const ScanParams& params, const Block& block)
      : order(params.dstate),
        H(static_cast<const State*>(bases) + 2 * channel_block(params, block) * order * order),
        Q(H + order * order) {}

  /// Returns the index of a block among the blocks of one batch entry.
  static SELECTIVE_SCAN_HD int64_t channel_block(const ScanParams& params, const Block& block) {
    return block.group * blocks_per_group(params) + block.index;
  }
  static SELECTIVE_SCAN_HD int64_t blocks_per_group(const ScanParams& params) {
    return ceil_div(params.dim / params.groups, int64_t{real_t<State>::kWidth});
  }

  // result[t] = Q·in[t], or with the transposed, or adjoint, Q. `in(k, t)` is a State.
  template <class In>
  void by_Q(int64_t steps, const In& in, State* result) const {
    multiply_steps(
        order, steps, [&](int64_t i, int64_t k) { return Q[i * order + k]; }, in, result);
  }
  template <bool kConjugates, class In>
  void by_transposed_Q(int64_t steps, const In& in, State* result) const {
    const auto entry = [&](int64_t i, int64_t k) {
      return kConjugates ? conj(Q[k * order + i]) : Q[k * order + i];
    };
    multiply_steps(order, steps, entry, in, result);
  }
};

/// Scratch memory of the reduction, which runs in double precision whatever the compute type: its
/// errors would add up over all steps. For an A whose states keep their norm, H then has that
/// property to the bit.
template <class State>
struct ReductionScratch {
  using WideState = typename WideOf<State>::type;

  Arena arena;
  WideState* A;
  WideState* Q;
  WideState* reflector;

  SELECTIVE_SCAN_HD ReductionScratch(const ScanParams& params, void* base)
      : arena{static_cast<char*>(base)} {
    A = arena.take<WideState>(params.dstate * params.dstate);
    Q = arena.take<WideState>(params.dstate * params.dstate);
    reflector = arena.take<WideState>(params.dstate);
  }
};

template <class State>
struct Reduction {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Scratch = ReductionScratch<State>;
  using WideState = typename Scratch::WideState;
  static constexpr int kWideLanes = real_t<WideState>::kWidth;

  static int64_t scratch_bytes(const ScanParams& params) {
    return Scratch(params, nullptr).arena.bytes;
  }

  static void run(const MatrixForwardParams& params, const Block& block, void* bases,
                  void* scratch_base) {
    const Scratch scratch(params, scratch_base);
    const int64_t order = params.dstate;
    const Basis<State> basis(bases, params, block);
    ArrayView row = params.A;
    row.state = params.A_column;
    for (int first = 0; first < R::kWidth; first += kWideLanes) {
      const int64_t lanes = greater_of(0, lesser_of(kWideLanes, block.channels - first));
      for (int64_t i = 0; i < order * order; ++i) scratch.A[i] = WideState{};
      for (int64_t i = 0; lanes > 0 && i < order; ++i) {
        const int64_t offset = (block.first_channel + first) * row.channel + i * params.A.state;
        load_states(row, offset, lanes, row.channel, order, scratch.A + i * order);
      }
      reduce_to_hessenberg(order, scratch.A, scratch.Q, scratch.reflector);
      narrow(order * order, scratch.A, first, const_cast<State*>(basis.H));
      narrow(order * order, scratch.Q, first, const_cast<State*>(basis.Q));
    }
  }

 private:
  /// Copies `source`, rounded, to the lanes of `target` from `first` on.
  static void narrow(int64_t count, const WideState* source, int first, State* target) {
    const double* from = reinterpret_cast<const double*>(source);
    T* to = reinterpret_cast<T*>(target) + first;
    for (int64_t i = 0; i < count * kComponents<State>; ++i) {
      for (int lane = 0; lane < kWideLanes; ++lane) {
        to[i * R::kWidth + lane] = static_cast<T>(from[i * kWideLanes + lane]);
      }
    }
  }
};

/// B in the basis, Q^H·B, or C, Q^T·C: a chunk at a time if variable, once for all steps if
/// constant.
template <class State, bool kIsB>
class ProjectionInBasis {
  using T = scalar_t<State>;
  using Tile = ProjectionTile<State>;

 public:
  SELECTIVE_SCAN_HD ProjectionInBasis(Arena& arena, const ScanParams& params, bool is_variable)
      : order_(params.dstate), is_variable_(is_variable) {
    tile_ = arena.take<T>(is_variable ? Tile::values(order_, true) : 0);
    steps_ = arena.take<State>(order_ * (is_variable ? kStateChunk : 1));
  }

  void load_constant(const ArrayView& view, const Lanes& lanes, const Basis<State>& basis,
                     State* staging) const {
    if (is_variable_) return;
    channel_states(view, lanes, 0).load(lanes.count, order_, staging);
    const auto in = [&](int64_t k, int64_t) { return staging[k]; };
    basis.template by_transposed_Q<kIsB>(1, in, steps_);
  }
  void load_chunk(const ArrayView& view, const Chunk& chunk, const Basis<State>& basis) const {
    if (!is_variable_) return;
    Tile::load(view, chunk, order_, kStateChunk, tile_);
    const int64_t imaginary = order_ * kStateChunk;
    const auto in = [&](int64_t k, int64_t t) {
      return spread_number<State>(tile_ + k * kStateChunk + t, imaginary);
    };
    basis.template by_transposed_Q<kIsB>(chunk.steps, in, steps_);
  }

  /// Returns the states of step t.
  SELECTIVE_SCAN_HD const State* at(int64_t t) const {
    return steps_ + (is_variable_ ? t * order_ : 0);
  }

 private:
  int64_t order_;
  bool is_variable_;
  T* tile_;
  State* steps_;  // (step, state)
};

/// The inputs of a block, and the steps on them, that both passes share.
template <class State>
struct MatrixInputs {
  using R = real_t<State>;

  ProjectionInBasis<State, true> B;
  ProjectionInBasis<State, false> C;
  HessenbergFactors<State> factors;
  State* staging;     // (state)
  State* input;       // (state): of a step
  State* product;     // (state): H or H^H times the middle of a step
  State* residual;    // (state)
  State* correction;  // (state)

  SELECTIVE_SCAN_HD MatrixInputs(Arena& arena, const ScanParams& params)
      : B(arena, params, params.variable_B),
        C(arena, params, params.variable_C),
        factors(arena, params.dstate),
        staging(arena.take<State>(params.dstate)),
        input(arena.take<State>(params.dstate)),
        product(arena.take<State>(params.dstate)),
        residual(arena.take<State>(params.dstate)),
        correction(arena.take<State>(params.dstate)) {}

  void load_constants(const ScanParams& params, const Lanes& lanes,
                      const Basis<State>& basis) const {
    B.load_constant(params.B, lanes, basis, staging);
    C.load_constant(params.C, lanes, basis, staging);
  }
  void load_chunk(const ScanParams& params, const Chunk& chunk, const Basis<State>& basis) const {
    B.load_chunk(params.B, chunk, basis);
    C.load_chunk(params.C, chunk, basis);
  }

  /// Loads states of the block's channels and converts them to the basis, unless there are no
  /// steps.
  void load_states_in_basis(const ScanParams& params, const ArrayView& view, const Lanes& lanes,
                            const Basis<State>& basis, State* states) const {
    channel_states(view, lanes).load(lanes.count, params.dstate, staging);
    const auto in = [&](int64_t k, int64_t) { return staging[k]; };
    if (params.seqlen > 0) {
      basis.template by_transposed_Q<true>(1, in, states);
    } else {
      for (int64_t n = 0; n < params.dstate; ++n) states[n] = staging[n];
    }
  }
  void store_states_of_basis(const ScanParams& params, const ArrayView& view, const Lanes& lanes,
                             const Basis<State>& basis, const State* states) const {
    if (params.seqlen > 0) {
      basis.by_Q(1, [&](int64_t k, int64_t) { return states[k]; }, staging);
      states = staging;
    }
    channel_states(view, lanes).store(lanes.count, params.dstate, states);
  }

  /// Takes a step from `before`: after = before + Δ·H·middle + G·B with the gain G of the step.
  SELECTIVE_SCAN_HD void step(const Basis<State>& basis, int64_t t, const InputSteps<R>& steps,
                              const State* before, State* middle, State* after) const {
    const int64_t order = basis.order;
    const State* projection = B.at(t);
    for (int64_t n = 0; n < order; ++n) input[n] = steps.gains[t] * projection[n];
    take_step(
        basis, steps.delta[t], before, middle, after,
        [&](const State* x, State* result) { multiply_hessenberg(order, basis.H, x, result); },
        [&](State* x) { factors.solve(x); });
  }

  /// Goes back through a step from the gradient g of the state after it. Computes
  /// lambda = (I − Δ/2·H)^-H·g and, in `before`, the gradient of the state before the step,
  /// g + Δ·H^H·lambda. Returns H^H·lambda.
  SELECTIVE_SCAN_HD const State* step_back(const Basis<State>& basis, R delta, const State* g,
                                           State* lambda, State* before) const {
    const int64_t order = basis.order;
    for (int64_t n = 0; n < order; ++n) input[n] = State{};
    take_step(
        basis, delta, g, lambda, before,
        [&](const State* x, State* result) {
          multiply_hessenberg_adjoint(order, basis.H, x, result);
        },
        [&](State* x) { factors.solve_adjoint(x); });
    return product;
  }

  /// Re(Σ C·h)
  SELECTIVE_SCAN_HD R output(int64_t order, int64_t t, const State* states) const {
    const State* projection = C.at(t);
    R sum = constant<R>(0);
    for (int64_t n = 0; n < order; ++n) sum += real_of_product_conj(projection[n], conj(states[n]));
    return sum;
  }

 private:
  /// Solves (I − Δ/2·H)·middle = start + input/2, so that after = start + rise with
  /// rise = Δ·H·middle + input. The elimination makes the same error in every step with the same Δ,
  /// so errors would add up. The residual r = start − middle + rise/2 gives the correction c of
  /// `middle`; that of the rise, Δ·H·c, is 2·(c − r).
  template <class Product, class Solve>
  SELECTIVE_SCAN_HD void take_step(const Basis<State>& basis, R delta, const State* start,
                                   State* middle, State* after, const Product& multiply,
                                   const Solve& solve) const {
    const int64_t order = basis.order;
    const R half = constant<R>(0.5);
    factors.factor(basis.H, half * delta);
    for (int64_t n = 0; n < order; ++n) middle[n] = start[n] + half * input[n];
    solve(middle);
    multiply(middle, product);
    for (int64_t n = 0; n < order; ++n) {
      const State rise = delta * product[n] + input[n];
      after[n] = start[n] + rise;
      residual[n] = start[n] - middle[n] + half * rise;
      correction[n] = residual[n];
    }
    solve(correction);
    for (int64_t n = 0; n < order; ++n) {
      middle[n] = middle[n] + correction[n];
      after[n] = after[n] + constant<R>(2) * (correction[n] - residual[n]);
    }
  }
};

}  // namespace selective_scan::cpu
