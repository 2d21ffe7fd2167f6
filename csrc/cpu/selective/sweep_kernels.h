// The sweeps (sweeps.h) for one type of states.
//
// The forward sweep walks a chunk with kStatesInRegisters states at a time in registers and adds to
// the outputs, which stay in the first-level cache like everything else. The backward sweep walks
// forward, keeping h, abar and b of every step (34 KiB at most, AVX-512 complex), then back with
// the gradient of h in registers. The products for the gradients of B and C are transposed and
// summed over the lanes that share B and C. Bound by arithmetic.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../simd/transpose.h"
#include "../simd/vector_math.h"
#include "step_forms.h"
#include "sweeps.h"

namespace selective_scan::cpu {

/// c + Re(a·b)
template <class R>
SELECTIVE_SCAN_HD R add_real_of_product(R a, R b, R c) {
  return c + a * b;
}
template <class R>
SELECTIVE_SCAN_HD R add_real_of_product(Complex<R> a, Complex<R> b, R c) {
  return (c + a.re * b.re) - a.im * b.im;
}

/// Writes the numbers of `states` states from n on, which the lanes share, once per lane: (state,
/// step).
template <class State>
void spread(const Projection<State>& projection, int64_t n, int states, State* target) {
  const scalar_t<State>* source = projection.data + n * kStateChunk;
  for (int64_t i = 0; i < states * kStateChunk; ++i) {
    target[i] = spread_number<State>(source + i, projection.imaginary);
  }
}

/// B or C of a few states, as vectors with a number per lane.
template <class State, int kStates>
class LaneRows {
  using R = real_t<State>;
  using T = scalar_t<State>;

 public:
  SELECTIVE_SCAN_HD LaneRows(const Projection<State>& projection, int64_t n)
      : data_(projection.data + n * projection.state_stride),
        imaginary_(projection.imaginary),
        state_stride_(projection.state_stride),
        step_stride_(projection.step_stride) {
    if (!projection.is_shared) return;
    spread(projection, n, kStates, own_);
    data_ = reinterpret_cast<const T*>(own_);
    imaginary_ = R::kWidth;
    step_stride_ = kComponents<State> * R::kWidth;
    state_stride_ = kStateChunk * step_stride_;
  }

  SELECTIVE_SCAN_HD State at(int j, int64_t t) const {
    return load_number<State>(data_ + j * state_stride_ + t * step_stride_, imaginary_);
  }

 private:
  const T* data_;
  int64_t imaginary_;
  int64_t state_stride_;
  int64_t step_stride_;
  State own_[kStates * kStateChunk];
};

/// B or C of a few states, as numbers that all lanes share.
template <class State, int kStates>
class SharedRows {
 public:
  SELECTIVE_SCAN_HD SharedRows(const Projection<State>& projection, int64_t n)
      : data_(projection.data + n * kStateChunk), imaginary_(projection.imaginary) {}

  SELECTIVE_SCAN_HD State at(int j, int64_t t) const {
    return spread_number<State>(data_ + j * kStateChunk + t, imaginary_);
  }

 private:
  const scalar_t<State>* data_;
  int64_t imaginary_;
};

/// Adds the products of a chunk, (step, one of kStates states), to the gradient of B or C: to the
/// sums of a constant one or the tile of a variable one. If the lanes share the tile's numbers,
/// their products are summed first.
template <int kStates, class State>
void add_products(const ForwardSweep<State>& sweep, const ProjectionGradient<State>& gradient,
                  int64_t n, State* products) {
  using R = real_t<State>;
  if (gradient.sums) {
    State sums[kStates] = {};
    for (int64_t t = sweep.steps - 1; t >= 0; --t) {
      for (int j = 0; j < kStates; ++j) sums[j] += products[t * kStates + j];
    }
    for (int j = 0; j < kStates; ++j) gradient.sums[n + j].add(sums[j]);
    return;
  }
  for (int64_t i = sweep.steps * kStates; i < round_up(sweep.steps, R::kWidth) * kStates; ++i) {
    products[i] = State{};
  }
  constexpr int kStride = kStates * kComponents<State>;
  for (int row = 0; row < kStride; ++row) {
    const int j = row / kComponents<State>;
    const int component = row % kComponents<State>;
    const R* of_row = reinterpret_cast<const R*>(products) + row;
    const int64_t first = (component * sweep.dstate + n + j) * kStateChunk;
    if (!gradient.is_shared) {
      R* target = reinterpret_cast<R*>(gradient.tile) + first;
      for (int64_t t = 0; t < sweep.steps; ++t) target[t] = target[t] + of_row[t * kStride];
      continue;
    }
    scalar_t<State>* target = gradient.tile + first;
    for (int64_t t = 0; t < sweep.steps; t += R::kWidth) {
      R rows[R::kWidth];
      for (int i = 0; i < R::kWidth; ++i) rows[i] = of_row[(t + i) * kStride];
      (R::load(target + t) + sum_of_each(rows)).store(target + t);
    }
  }
}

/// Walks kStates states through a chunk, replaces `states` by the last ones, and adds Re(Σ C·h) to
/// y if kHasOutput. If kHasMap, the offsets of the states' map are walked alike, and without
/// lambdas, which would keep them in memory. Calls keep(t, j, h, kept) at every step.
template <class Form, class Math, int kStates, bool kHasOutput, bool kHasMap, class State,
          class Rows, class Keep>
SELECTIVE_SCAN_HD void advance(int64_t steps, const real_t<State>* deltas,
                               const real_t<State>* gains, const Pole<State> (&poles)[kStates],
                               const Rows& B, const Rows& C, State* states, State* offsets,
                               real_t<State>* y, const Keep& keep) {
  using R = real_t<State>;
  State h[kStates], offset[kStates];
  for (int j = 0; j < kStates; ++j) {
    h[j] = states[j];
    if constexpr (kHasMap) offset[j] = offsets[j];
  }
  for (int64_t t = 0; t < steps; ++t) {
    const R delta = deltas[t];
    const R gain = gains[t];
    R sum;
    if constexpr (kHasOutput) sum = y[t];
    for (int j = 0; j < kStates; ++j) {
      const auto kept = Form::template prepare<Math>(delta, poles[j]);
      const State input = Form::input(gain, B.at(j, t), kept);
      h[j] = multiply_add(kept.first, h[j], input);
      if constexpr (kHasMap) offset[j] = multiply_add(kept.first, offset[j], input);
      if constexpr (kHasOutput) sum = add_real_of_product(C.at(j, t), h[j], sum);
      keep(t, j, h[j], kept);
    }
    if constexpr (kHasOutput) y[t] = sum;
  }
  for (int j = 0; j < kStates; ++j) {
    states[j] = h[j];
    if constexpr (kHasMap) offsets[j] = offset[j];
  }
}

/// The sweeps of one method, for inputs with their own step or with the step Δ.
template <class State, Method kMethod, bool kHasInputDelta>
class MethodSweeps {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Form = StepForm<kMethod, State, kHasInputDelta>;
  template <bool kIsShared, int kStates>
  using Rows = std::conditional_t<kIsShared, SharedRows<State, kStates>, LaneRows<State, kStates>>;

 public:
  static void forward(const ForwardSweep<State>& sweep) {
    if (sweep.map.factors) {
      forward_with<true>(sweep);
    } else {
      forward_with<false>(sweep);
    }
  }

  static void backward(const BackwardSweep<State>& sweep) {
    for_each_group(sweep, shares(sweep), [&]<class Math, bool kIsShared, int kStates>(int64_t n) {
      Pole<State> poles[kStates];
      load_poles(sweep.poles + n, poles);
      const Rows<kIsShared, kStates> B(sweep.B, n), C(sweep.C, n);
      const KeptSteps<State> kept = sweep.kept;
      for (int j = 0; j < kStates; ++j) kept.h[j] = sweep.states[n + j];
      advance<Form, Math, kStates, true, false>(
          sweep.steps, sweep.delta, sweep.gain, poles, B, C, sweep.states + n,
          static_cast<State*>(nullptr), sweep.y,
          [&](int64_t t, int j, const State& h, const CachedStep<State>& step) {
            kept.h[(t + 1) * kStates + j] = h;
            kept.first[t * kStates + j] = step.first;
            if constexpr (Form::kKeepsSecond) kept.second[t * kStates + j] = step.second;
          });
      if (sweep.map.factors) {
        continue_map(sweep, sweep.dy, poles, C, n,
                     [&](int64_t t, int j) { return kept.first[t * kStates + j]; });
      }
      go_back(sweep, poles, B, C, n);
      add_products<kStates>(sweep, sweep.dB, n, kept.first);
      add_products<kStates>(sweep, sweep.dC, n, kept.h + kStates);
    });
  }

  static void forward_map(const MapSweep<State>& sweep) {
    for_each_mapped(sweep, [&]<class Math, bool kIsShared, int kStates>(int64_t n) {
      Pole<State> poles[kStates];
      load_poles(sweep.poles + n, poles);
      const Rows<kIsShared, kStates> B(sweep.projection, n);
      MapFactors<kStates> factors(sweep.map, n);
      advance<Form, Math, kStates, false, false>(
          sweep.steps, sweep.delta, sweep.input, poles, B, B, sweep.map.offsets + n,
          static_cast<State*>(nullptr), static_cast<R*>(nullptr),
          [&](int64_t, int j, const State&, const CachedStep<State>& kept) {
            factors.add_step(j, kept.first);
          });
      factors.finish(poles);
    });
  }

  static void backward_map(const MapSweep<State>& sweep) {
    for_each_mapped(sweep, [&]<class Math, bool kIsShared, int kStates>(int64_t n) {
      Pole<State> poles[kStates];
      load_poles(sweep.poles + n, poles);
      const Rows<kIsShared, kStates> C(sweep.projection, n);
      continue_map(sweep, sweep.input, poles, C, n, [&](int64_t t, int j) {
        return Form::template prepare<Math>(sweep.delta[t], poles[j]).first;
      });
    });
  }

 private:
  /// The factors of a few states' maps through a chunk, by ΣΔ if kBySpan. Complex states are
  /// excluded, since their angles would lose digits in a sum.
  static constexpr bool kBySpan = Formula<kMethod>::kAbarIsExponential && !is_complex_v<State>;
  template <int kStates>
  class MapFactors {
   public:
    SELECTIVE_SCAN_HD MapFactors(const StateMap<State>& map, int64_t n)
        : map_(map), stored_(map.factors + n) {
      for (int j = 0; j < kStates; ++j) factors_[j] = stored_[j];
    }
    SELECTIVE_SCAN_HD void add_step(int j, const State& abar) {
      if constexpr (!kBySpan) factors_[j] = abar * factors_[j];
    }
    SELECTIVE_SCAN_HD void finish(const Pole<State> (&poles)[kStates]) const {
      if (kBySpan && !map_.is_end) return;
      for (int j = 0; j < kStates; ++j) {
        if constexpr (kBySpan) {
          // Rounded on its own; otherwise some loops would fuse it with the next operation.
          stored_[j] = VectorMath::exp_of(kept_apart(map_.span * poles[j].exponent));
        } else {
          stored_[j] = factors_[j];
        }
      }
    }

   private:
    const StateMap<State>& map_;
    State* stored_;
    State factors_[kStates];
  };

  template <bool kHasMap>
  static SELECTIVE_SCAN_HD void forward_with(const ForwardSweep<State>& sweep) {
    for_each_group(sweep, shares(sweep), [&]<class Math, bool kIsShared, int kStates>(int64_t n) {
      Pole<State> poles[kStates];
      load_poles(sweep.poles + n, poles);
      const Rows<kIsShared, kStates> B(sweep.B, n), C(sweep.C, n);
      const auto scan = [&](const auto& keep) {
        advance<Form, Math, kStates, true, kHasMap>(sweep.steps, sweep.delta, sweep.gain, poles, B,
                                                    C, sweep.states + n, sweep.map.offsets + n,
                                                    sweep.y, keep);
      };
      if constexpr (kHasMap && !kBySpan) {
        MapFactors<kStates> factors(sweep.map, n);
        scan([&](int64_t, int j, const State&, const CachedStep<State>& kept) {
          factors.add_step(j, kept.first);
        });
        factors.finish(poles);
      } else {
        scan([](int64_t, int, const State&, const CachedStep<State>&) {});
        if constexpr (kHasMap) MapFactors<kStates>(sweep.map, n).finish(poles);
      }
    });
  }

  /// Continues the map of the states' gradients back through a chunk.
  template <int kStates, class Sweep, class Rows, class Abar>
  static SELECTIVE_SCAN_HD void continue_map(const Sweep& sweep, const R* dys,
                                             const Pole<State> (&poles)[kStates], const Rows& C,
                                             int64_t n, const Abar& abar_at) {
    State* offsets = sweep.map.offsets + n;
    State carry[kStates];
    for (int j = 0; j < kStates; ++j) carry[j] = offsets[j];
    MapFactors<kStates> factors(sweep.map, n);
    for (int64_t t = sweep.steps - 1; t >= 0; --t) {
      const R dy = constant<State>(kOutputScale<State>) * dys[t];
      for (int j = 0; j < kStates; ++j) {
        const State abar = abar_at(t, j);
        carry[j] = (carry[j] + kept_apart(dy * conj(C.at(j, t)))) * conj(abar);
        factors.add_step(j, abar);
      }
    }
    for (int j = 0; j < kStates; ++j) offsets[j] = carry[j];
    factors.finish(poles);
  }

  static SELECTIVE_SCAN_HD bool shares(const ForwardSweep<State>& sweep) {
    return sweep.B.is_shared && sweep.C.is_shared;
  }

  template <class Visit>
  static SELECTIVE_SCAN_HD void for_each_mapped(const MapSweep<State>& sweep, const Visit& visit) {
    for_each_group(sweep, sweep.projection.is_shared,
                   [&]<class Math, bool kIsShared, int kStates>(int64_t n) {
                     if (sweep.template leaves_out<kStates>(n)) return;
                     visit.template operator()<Math, kIsShared, kStates>(n);
                   });
  }

  template <class Sweep, class Visit>
  static SELECTIVE_SCAN_HD void for_each_group(const Sweep& sweep, bool is_shared,
                                               const Visit& visit) {
    constexpr bool kIsBounded = !kAlwaysClamps<State>;
    const auto visit_all = [&]<class Math, bool kIsShared>() {
      cpu::for_each_group<kStatesInRegisters>(sweep.dstate, [&]<int kStates>(int64_t n) {
        visit.template operator()<Math, kIsShared, kStates>(n);
      });
    };
    // Lanes that share nothing are rare, and do without a sweep of their own for bounded steps,
    // which has the same bits.
    if (sweep.is_bounded && is_shared) {
      visit_all.template operator()<VectorMathOf<kIsBounded>, true>();
    } else {
      visit_all.template operator()<VectorMath, false>();
    }
  }

  template <int kStates>
  static SELECTIVE_SCAN_HD void load_poles(const Pole<State>* source,
                                           Pole<State> (&poles)[kStates]) {
    for (int j = 0; j < kStates; ++j) poles[j] = Form::pole(source[j]);
  }

  /// Goes back through the chunk, from the gradients of the states after it to those before it.
  template <int kStates, class Rows>
  static SELECTIVE_SCAN_HD void go_back(const BackwardSweep<State>& sweep,
                                        const Pole<State> (&poles)[kStates], const Rows& B,
                                        const Rows& C, int64_t n) {
    const KeptSteps<State> kept = sweep.kept;
    State carry[kStates], dA[kStates];
    for (int j = 0; j < kStates; ++j) {
      carry[j] = sweep.carry[n + j];
      dA[j] = {};
    }
    for (int64_t t = sweep.steps - 1; t >= 0; --t) {
      const R delta = sweep.delta[t];
      const R dy = constant<State>(kOutputScale<State>) * sweep.dy[t];
      const R gain = sweep.gain[t];
      StepGradients<State> gradients{{}, {}, sweep.dgain[t], sweep.ddelta[t]};
      for (int j = 0; j < kStates; ++j) {
        const int64_t i = t * kStates + j;
        const State g = carry[j] + dy * conj(C.at(j, t));  // gradient of h[t]
        const State dC = dy * conj(kept.h[i + kStates]);
        Form::step_back(delta, gain, poles[j], B.at(j, t), kept.h[i], kept_step(kept, i), g,
                        gradients, dA[j]);
        carry[j] = gradients.before;
        kept.first[i] = gradients.B;
        kept.h[i + kStates] = dC;
      }
      sweep.dgain[t] = gradients.gain;
      sweep.ddelta[t] = gradients.delta;
    }
    for (int j = 0; j < kStates; ++j) {
      sweep.carry[n + j] = carry[j];
      sweep.dA[n + j].add(dA[j]);
    }
  }

  static SELECTIVE_SCAN_HD CachedStep<State> kept_step(const KeptSteps<State>& kept, int64_t i) {
    CachedStep<State> step{kept.first[i], {}};
    if constexpr (Form::kKeepsSecond) step.second = kept.second[i];
    return step;
  }
};

template <class State>
const Sweeps<State>& Sweeps<State>::of(const ScanParams& params) {
  static constexpr auto make = []<Method kMethod, bool kHasInputDelta>() -> Sweeps {
    // The other methods have the same sweeps with and without the input's own step.
    constexpr bool kIsOther = Formula<kMethod>::kHasIncrements && kHasInputDelta;
    using Own = MethodSweeps<State, kMethod, kIsOther>;
    // The gradients' maps depend on abar alone, which foh rounds differently.
    constexpr bool kIsLikeZoh =
        Formula<kMethod>::kAbarIsExponential && !Formula<kMethod>::kHasIncrements;
    constexpr Method kLike = kIsLikeZoh ? Method::kZoh : kMethod;
    return {&Own::forward, &Own::backward, &Own::forward_map,
            &MethodSweeps<State, kLike, kIsOther>::backward_map,
            StepForm<kMethod, State, kIsOther>::kGainHasStep};
  };
  static constexpr MethodTable<Sweeps> kSweeps[] = {
      make_method_table<Sweeps>(
          []<Method kMethod>() { return make.template operator()<kMethod, false>(); }),
      make_method_table<Sweeps>(
          []<Method kMethod>() { return make.template operator()<kMethod, true>(); })};
  return kSweeps[params.input_delta.present()][params.method];
}

}  // namespace selective_scan::cpu
