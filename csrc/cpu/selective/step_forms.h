// The forms in which a scan takes a step, h[t] = abar·h[t-1] + bbar·B·u, and goes back through it.
//
// All states share the gain of the input: u or, if the form has kGainHasStep, the step of the input
// times u. For each state a form has prepare(), which computes a StepCache; input(), such that
// h[t] = kept.first·h[t-1] + input; and step_back(), which starts from g, the gradient of h[t]. A
// form makes all its choices per lane. Inputs are rounded on their own, so that the same steps have
// the same bits in every sweep.
#pragma once

#include <type_traits>

#include "../../core/discretization.h"
#include "../simd/vector_math.h"

namespace selective_scan::cpu {

template <class State>
struct CachedStep {
  State first;
  State second;
};

/// The gradients at a step. step_back() sets the first two and adds to the last two.
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
  using StepCache = CachedStep<State>;  // abar, and b: bbar = Δ·b

  static constexpr bool kKeepsSecond = F::kBbarDependsOnA;

  static SELECTIVE_SCAN_HD const Pole<State>& pole(const Pole<State>& pole) { return pole; }

  /// bbar's factor Δ, which all states share, goes into the gain.
  static constexpr bool kGainHasStep = true;

  template <class Math>
  static SELECTIVE_SCAN_HD StepCache prepare(R delta, const Pole<State>& pole) {
    const Hold<State> hold = F::template hold<Math>(delta, pole);
    return {hold.a, hold.b};
  }
  static SELECTIVE_SCAN_HD State input(R gain, State B, const StepCache& kept) {
    const State scaled = gain * B;
    if constexpr (F::kBbarDependsOnA) return kept_apart(kept.second * scaled);
    return kept_apart(scaled);
  }

  static SELECTIVE_SCAN_HD void step_back(R delta, R gain, const Pole<State>& pole, State B,
                                          State before, const StepCache& kept, State g,
                                          StepGradients<State>& gradients, State& dA) {
    const State a = kept.first;
    const State g_conj_B = g * conj(B);
    gradients.before = g * conj(a);
    const State da_conj_a = gradients.before * conj(before);
    State dx = da_conj_a;  // exp' = exp
    if constexpr (!F::kBbarDependsOnA) {
      gradients.B = gain * g;
      gradients.gain += real(g_conj_B);
    } else {
      const State b = kept.second;
      gradients.B = gain * (g * conj(b));
      gradients.gain += real(g_conj_B * conj(b));
      dx = F::template gradient_of_x<VectorMath>(delta, pole, Hold<State>{a, b}, g * conj(before),
                                                 da_conj_a, gain * g_conj_B);
    }
    gradients.delta += real_of_product_conj(dx, pole.A);
    dA += delta * dx;
  }
};

/// Methods that hold the input exactly have bbar = (abar - 1)/A, so the derivative of h[t] by Δ is
/// abar·(A·h[t-1] + B·u).
template <Method kMethod, class State>
struct ByExactHold {
  using R = real_t<State>;
  using T = scalar_t<State>;
  using StepCache = CachedStep<State>;  // abar, bbar

  static constexpr bool kKeepsSecond = true;

  /// Replaces a pole of 0 by one so small that its exponential is 1 and bbar is Δ to the last
  /// digit.
  static SELECTIVE_SCAN_HD Pole<State> pole(const Pole<State>& pole) {
    constexpr T kLeast = sizeof(T) == 4 ? T(0x1p-40) : T(0x1p-100);
    const auto least = make_pole<VectorMath>(R(-kLeast) * one<State>());
    const auto is_tiny = norm(pole.A) < R(kLeast * kLeast);
    return {pole.A, select(is_tiny, least.exponent, pole.exponent),
            select(is_tiny, least.inverse, pole.inverse)};
  }

  static constexpr bool kGainHasStep = false;

  template <class Math>
  static SELECTIVE_SCAN_HD StepCache prepare(R delta, const Pole<State>& pole) {
    const Coefficients<State> value = Formula<kMethod>::template value<Math>(delta, pole);
    return {value.abar, value.bbar};
  }
  static SELECTIVE_SCAN_HD State input(R gain, State B, const StepCache& kept) {
    return kept_apart(kept.second * (gain * B));
  }

  static SELECTIVE_SCAN_HD void step_back(R delta, R gain, const Pole<State>& pole, State B,
                                          State before, const StepCache& kept, State g,
                                          StepGradients<State>& gradients, State& dA) {
    const State input = g * conj(kept.second);
    const State driven = kept_apart(gain * B);
    gradients.before = g * conj(kept.first);
    gradients.B = gain * input;
    gradients.gain += real_of_product_conj(input, B);
    gradients.delta += real_of_product_conj(gradients.before, multiply_add(pole.A, before, driven));
    const State bbar_by_A =
        Formula<kMethod>::bbar_by_A(delta, pole, Coefficients<State>{kept.first, kept.second});
    dA += delta * (gradients.before * conj(before)) + g * conj(bbar_by_A * driven);
  }
};

/// The form of a method: ByFactors if the input has its own step.
template <Method kMethod, class State, bool kHasInputDelta = false>
using StepForm = std::conditional_t<Formula<kMethod>::kHasIncrements && !kHasInputDelta,
                                    ByExactHold<kMethod, State>, ByFactors<kMethod, State>>;

}  // namespace selective_scan::cpu
