// bilinear: abar = (1 + x/2)/(1 − x/2), bbar = Δ/(1 − x/2).
#pragma once

#include "formula.h"

namespace selective_scan {

/// A step h[t] = r·(h[t-1] + input·B) − h[t-1].
template <class T>
struct ReflectedStep {
  T r;
  real_t<T> input;
};

/// Tustin's rule. For A = −A it is the form that some print, (1 − x/2)/(1 + x/2).
struct Tustin : StepForms<Tustin> {
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Hold<T> hold(real_t<T> delta, const Pole<T>& pole) {
    const T half = (constant<T>(0.5) * delta) * pole.A;
    const T r = reciprocal(constant<T>(1) - half);
    if constexpr (is_complex_v<T>) {
      // These stay within bounds as they are, and the other form takes longer on the way back.
      return {(constant<T>(1) + half) * r, r};
    } else {
      // What r is off by counts as little as x: approximate reciprocals of real numbers are off to
      // one side, and the states of a slow memory would drift.
      return {constant<T>(1) + half * (r + r), r};
    }
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Slopes<T> slopes(real_t<T>, T /*A*/, const Hold<T>& hold) {
    const T square = hold.b * hold.b;
    return {square, constant<T>(0.5) * square};
  }

  /// a' and b' share the factor b².
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T gradient_of_x(real_t<T>, T /*A*/, const Hold<T>& hold, T da,
                                           T /*da_conj_a*/, T db) {
    return (da + constant<T>(0.5) * db) * conj(hold.b * hold.b);
  }

  /// With r = 1/(1 − x/2): a' = r², b + x·b' = r², b' = r²/2.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>&) {
    const T half = (constant<T>(0.5) * delta) * pole.A;
    const T r = reciprocal(constant<T>(1) - half);
    const T r2 = r * r;
    return {pole.A * r2, delta * r2, r2, (constant<T>(0.5) * delta * delta) * r2};
  }

  /// With r = 2/(1 − x/2), a = r − 1 and b = r/2: h[t] = r·(h[t-1] + Δ·u/2·B) − h[t-1].
  template <class Math, class T>
  struct Constants {
    T quarter;  // A/4
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A, const Series<real_t<T>>& = {}) {
    return {constant<T>(0.25) * A};
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD ReflectedStep<T> step(real_t<T> delta, real_t<T> delta_u,
                                                 const Constants<Math, T>& constants) {
    return {reciprocal(constant<T>(0.5) - delta * constants.quarter), constant<T>(0.5) * delta_u};
  }

  template <class T>
  struct StepCache {
    T r;
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepCache<T> keep(real_t<T> delta, T /*scaled_A*/,
                                             const Constants<Math, T>& constants) {
    return {step<Math, T>(delta, delta, constants).r};
  }

  template <class T>
  static SELECTIVE_SCAN_HD T advance(const StepCache<T>& kept, real_t<T> input, T h, T B) {
    return multiply_add(kept.r, h + input * B, -h);
  }

  /// dr/dx = r²/4, and r·(h[t-1] + Δ·u/2·B) = h[t] + h[t-1].
  static constexpr double kInputScale = 0.5;
  static constexpr double kXScale = 0.25;
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(real_t<T> /*delta_u*/,
                                                     const StepCache<T>& kept, T before, T after,
                                                     T /*B*/, T g) {
    const T through_r = g * conj(kept.r);
    return {through_r - g, through_r, through_r * conj(before + after)};
  }
};

template <>
struct Formula<Method::kBilinear> : Tustin {};

}  // namespace selective_scan
