// bilinear: abar = (1 + x/2)/(1 − x/2), bbar = Δ/(1 − x/2).
#pragma once

#include "formula.h"

namespace selective_scan {

/// A step h[t] = h[t-1] + r·(x·h[t-1] + input·B) with r = 1/(1 − x/2). In this form x scales the
/// error of r. Approximate reciprocals err to one side, so otherwise the states of a slow memory
/// would drift.
template <class T>
struct TustinStep {
  T r;
  T x;
  real_t<T> input;

  SELECTIVE_SCAN_HD T advance(T h, T B) const {
    return multiply_add(r, multiply_add(x, h, input * B), h);
  }
};

/// Tustin's rule. Evaluated at −A it is the form that some publications print, (1 − x/2)/(1 + x/2).
struct Tustin : StepForms<Tustin> {
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Hold<T> hold(real_t<T> delta, const Pole<T>& pole) {
    const TustinStep<T> step = Tustin::step<Math, T>(delta, delta, {pole.A});
    return {one<T>() + step.x * step.r, step.r};
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Slopes<T> slopes(real_t<T>, const Pole<T>&, const Hold<T>& hold) {
    const T square = hold.b * hold.b;
    return {square, constant<T>(0.5) * square};
  }

  /// a' and b' share the factor b².
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T gradient_of_x(real_t<T>, const Pole<T>&, const Hold<T>& hold, T da,
                                           T /*da_conj_a*/, T db) {
    return (da + constant<T>(0.5) * db) * conj(hold.b * hold.b);
  }

  /// With r = 1/(1 − x/2): a' = r², b + x·b' = r², b' = r²/2.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>&) {
    const T r = step<Math, T>(delta, delta, {pole.A}).r;
    const T r2 = r * r;
    return {pole.A * r2, delta * r2, r2, (constant<T>(0.5) * delta * delta) * r2};
  }

  template <class Math, class T>
  struct Constants {
    T A;
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A, const Series<real_t<T>>& = {}) {
    return {A};
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD TustinStep<T> step(real_t<T> delta, real_t<T> delta_u,
                                              const Constants<Math, T>& constants) {
    const T x = delta * constants.A;
    return {reciprocal(constant<T>(1) - constant<T>(0.5) * x), x, delta_u};
  }

  template <class T>
  struct StepCache {
    T r;
    T x;
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepCache<T> keep(real_t<T> delta, T /*scaled_A*/,
                                             const Constants<Math, T>& constants) {
    const TustinStep<T> step = Tustin::step<Math, T>(delta, delta, constants);
    return {step.r, step.x};
  }

  template <class T>
  static SELECTIVE_SCAN_HD T advance(const StepCache<T>& kept, real_t<T> delta_u, T h, T B) {
    return TustinStep<T>{kept.r, kept.x, delta_u}.advance(h, B);
  }

  /// The derivative of h[t] by x is r/2·(h[t-1] + h[t]).
  static constexpr double kXScale = 0.5;
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(real_t<T> /*delta_u*/,
                                                     const StepCache<T>& kept, T before, T after,
                                                     T /*B*/, T g) {
    const T through_r = g * conj(kept.r);
    return {multiply_add(through_r, conj(kept.x), g), through_r, through_r * conj(before + after)};
  }
};

template <>
struct Formula<Method::kBilinear> : Tustin {};

}  // namespace selective_scan
