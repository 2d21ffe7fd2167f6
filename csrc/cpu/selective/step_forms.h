// How a scan takes a step and goes back through it: by the factors of h[t] = abar·h[t-1] + bbar·B·u
// or, for foh, by what the state grows by (ExactIncrements). The latter has no division and no
// select, but not all poles can go by it.
//
// A form has, for all states together, the gain of the input and return_gain, which passes on the
// gains' gradient; for each state prepare and advance, from h[t-1] to h[t], and step_back, from g,
// the gradient of h[t]; two numbers Kept from the one for the other; and a PoleGradient, of A
// through a chunk.
#pragma once

#include "../../core/discretization.h"
#include "../simd/vector_math.h"

namespace selective_scan::cpu {

template <class State>
struct KeptStep {
  State first;
  State second;
};

/// Where the gradients at a step go; the last three are sums.
template <class State>
struct StepGradients {
  State before;  // of h[t-1]
  State B;
  real_t<State> gain;
  real_t<State> delta;
};

template <Method kMethod, class State>
struct ByFactors {
  using R = real_t<State>;
  using F = Formula<kMethod>;
  using Kept = KeptStep<State>;  // abar; and b where bbar = Δ·b, else bbar

  static constexpr bool kKeepsSecond = F::kBbarDependsOnA;
  /// Whether b is at hand, so that the factor Δ, which all states share, goes into the gain.
  static constexpr bool kHasHold =
      requires(R delta, Pole<State> pole) { F::template hold<VectorMath>(delta, pole); };

  static SELECTIVE_SCAN_HD R gain(R delta, R u) { return kHasHold ? delta * u : u; }
  static SELECTIVE_SCAN_HD void return_gain(R delta, R u, R dgain, R& du, R& ddelta) {
    if constexpr (kHasHold) {
      du += delta * dgain;
      ddelta += u * dgain;
    } else {
      du += dgain;
    }
  }

  template <class Math>
  static SELECTIVE_SCAN_HD Kept prepare(R delta, const Pole<State>& pole) {
    if constexpr (kHasHold) {
      const Hold<State> hold = F::template hold<Math>(delta, pole);
      return {hold.a, hold.b};
    } else {
      const Coefficients<State> value = F::template value<Math>(delta, pole);
      return {value.abar, value.bbar};
    }
  }
  static SELECTIVE_SCAN_HD State advance(R gain, const Pole<State>&, State B, State h, Kept& kept) {
    State input = gain * B;
    if constexpr (F::kBbarDependsOnA) input = kept.second * input;
    return multiply_add(kept.first, h, input);
  }

  struct PoleGradient {
    State sum;
    SELECTIVE_SCAN_HD State value(const Pole<State>&) const { return sum; }
  };

  static SELECTIVE_SCAN_HD void step_back(R delta, R gain, const Pole<State>& pole, State B,
                                          State before, const Kept& kept, State g,
                                          StepGradients<State>& gradients, PoleGradient& dA) {
    const State a = kept.first;
    const State b = kept.second;
    const State g_conj_B = g * conj(B);
    gradients.before = g * conj(a);
    State db{};
    if constexpr (F::kBbarDependsOnA) {
      gradients.B = gain * (g * conj(b));
      gradients.gain += real(g_conj_B * conj(b));
      db = gain * g_conj_B;
    } else {
      gradients.B = gain * g;
      gradients.gain += real(g_conj_B);
    }
    const State da_conj_a = gradients.before * conj(before);
    if constexpr (kHasHold) {
      const State dx = F::template gradient_of_x<VectorMath>(delta, pole.A, Hold<State>{a, b},
                                                             g * conj(before), da_conj_a, db);
      gradients.delta += real_of_product_conj(dx, pole.A);
      dA.sum += delta * dx;
    } else {
      static_assert(F::kAbarIsExponential);  // a' = a
      const Derivatives<State> d =
          F::template derivatives<VectorMath>(delta, pole, Coefficients<State>{a, b});
      gradients.delta +=
          real_of_product_conj(da_conj_a, pole.A) + real_of_product_conj(db, d.bbar_delta);
      dA.sum += delta * da_conj_a + db * conj(d.bbar_A);
    }
  }
};

template <class State>
struct ByIncrements {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using Kept = KeptStep<State>;  // exp(x) - 1; h[t-1] + B·u/A

  static constexpr bool kKeepsSecond = true;

  /// Below this |A|, 1/A leaves too little of the range to the states.
  static constexpr T kLeastPole = T(1e-15);
  /// Where all |x| of a chunk are smaller, the two terms of the gradient of A cancel too far.
  static constexpr T kLeastX = T(1.0 / 128);

  /// What |A|² must exceed, forward and backward.
  static SELECTIVE_SCAN_HD R least_norm() { return R(kLeastPole * kLeastPole); }
  static SELECTIVE_SCAN_HD R least_norm(R largest_step) {
    const R least_pole = R(kLeastX) / largest_step;
    return select(largest_step == R(T(0)), least_norm(),
                  greater(least_pole * least_pole, least_norm()));
  }
  static SELECTIVE_SCAN_HD bool serves(const Pole<State>* poles, int count, R least_norm) {
    R smallest = norm(poles[0].A);
    for (int i = 1; i < count; ++i) smallest = lesser(norm(poles[i].A), smallest);
    return all(smallest > least_norm);
  }

  static SELECTIVE_SCAN_HD R gain(R /*delta*/, R u) { return u; }
  static SELECTIVE_SCAN_HD void return_gain(R /*delta*/, R /*u*/, R dgain, R& du, R& /*ddelta*/) {
    du += dgain;
  }

  template <class Math>
  static SELECTIVE_SCAN_HD Kept prepare(R delta, const Pole<State>& pole) {
    return {Math::growth_of(delta * pole.exponent), {}};
  }
  static SELECTIVE_SCAN_HD State advance(R gain, const Pole<State>& pole, State B, State h,
                                         Kept& kept) {
    ExactIncrements::Kept<State> increment;
    h = ExactIncrements::advance_state(kept.first, gain, pole.inverse, h, B, increment);
    kept.second = increment.w;
    return h;
  }

  struct PoleGradient {
    State sum;
    State dB_conj_B;
    SELECTIVE_SCAN_HD State value(const Pole<State>& pole) const {
      return sum - dB_conj_B * conj(pole.inverse);
    }
  };

  static SELECTIVE_SCAN_HD void step_back(R delta, R gain, const Pole<State>& pole, State B,
                                          State /*before*/, const Kept& kept, State g,
                                          StepGradients<State>& gradients, PoleGradient& dA) {
    const StepBack<State> back = ExactIncrements::step_back(
        ExactIncrements::Kept<State>{kept.first, kept.second, pole.inverse}, g);
    gradients.before = back.state;
    gradients.B = gain * back.input;
    gradients.gain += real_of_product_conj(back.input, B);
    gradients.delta += real_of_product_conj(back.x, pole.A);
    dA.sum += delta * back.x;
    dA.dB_conj_B += gradients.B * conj(B);
  }
};

/// Calls run(form) with the form that the method's step takes for these poles.
template <Method kMethod, class State, class Run>
SELECTIVE_SCAN_HD void with_form(const Pole<State>* poles, int count, real_t<State> least_norm,
                                 const Run& run) {
  if constexpr (Formula<kMethod>::kHasIncrements) {
    if (ByIncrements<State>::serves(poles, count, least_norm)) {
      run(ByIncrements<State>{});
      return;
    }
  }
  run(ByFactors<kMethod, State>{});
}

}  // namespace selective_scan::cpu
