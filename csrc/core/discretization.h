// The six discretizations: from a step Δ and a pole A to h[t] = abar·h[t-1] + bbar·B·u.
//
// With x = Δ·A every method is abar = a(x), bbar = Δ·b(x):
//
//   zoh        a = exp(x)               b = 1
//   highorder  a = exp(x)               b = 1 + x/2
//   poly       a = exp(x)               b = 1 + x/2 + x²/6
//   rk4        a = exp(x)               b = 1 + x/2 + x²/6 + x³/24
//   foh        a = exp(x)               b = φ1(x) = (exp(x) − 1)/x
//   bilinear   a = (1 + x/2)/(1 − x/2)  b = 1/(1 − x/2)
//
// The four in the first rows hold the input by φ1's Taylor series cut after 1, 2, 3, 4 terms.
// A seventh method is one more entry in Method and kMethodNames and one more Formula.
#pragma once

#include <cstdint>

#include "complex.h"
#include "config.h"
#include "math.h"

namespace selective_scan {

enum class Method : int8_t { kZoh, kFoh, kBilinear, kPoly, kHighorder, kRk4 };

/// Indexed by Method.
constexpr const char* kMethodNames[] = {"zoh", "foh", "bilinear", "poly", "highorder", "rk4"};
constexpr int kNumMethods = sizeof(kMethodNames) / sizeof(kMethodNames[0]);

/// One entry of A with what depends on it alone, so that no kernel computes that for every step.
template <class T>
struct Pole {
  T A;
  T exponent;  // Math::exponent(A)
  T inverse;   // 1/A; not finite for A = 0
};

template <class Math, class T>
SELECTIVE_SCAN_HD Pole<T> make_pole(T A) {
  return {A, Math::exponent(A), reciprocal(A)};
}

template <class T>
struct Coefficients {
  T abar;
  T bbar;
};

/// Partial derivatives of abar and bbar.
template <class T>
struct Derivatives {
  T abar_delta;
  T abar_A;
  T bbar_delta;
  T bbar_A;
};

/// exp(x) with the input held by the first kTerms terms of φ1: b(x) = Σ_{k<kTerms} x^k/(k+1)!
template <int kTerms>
struct TruncatedHold {
  static constexpr bool kAbarIsExponential = true;
  static constexpr bool kBbarDependsOnA = kTerms > 1;

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Coefficients<T> value(real_t<T> delta, const Pole<T>& pole) {
    const T x = delta * pole.A;
    double factorial = 1;
    for (int k = 2; k <= kTerms; ++k) factorial *= k;
    T b = constant<T>(1 / factorial) * one<T>();
    for (int k = kTerms; k > 1; --k) {
      factorial /= k;
      b = constant<T>(1 / factorial) + x * b;
    }
    return {Math::exp_of(delta * pole.exponent), delta * b};
  }

  /// d(Δ·b)/dΔ = b + x·b' is exp's series of as many terms; d(Δ·b)/dA = Δ²·b'.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>& value) {
    const T x = delta * pole.A;
    double factorial = 1;
    for (int k = 2; k <= kTerms; ++k) factorial *= k;
    T exp_series = constant<T>(kTerms / factorial) * one<T>();
    T slope = T{};  // b'(x) = Σ k·x^(k-1)/(k+1)!
    for (int k = kTerms - 1; k >= 1; --k) {
      slope = constant<T>(k / factorial) + x * slope;
      factorial /= k + 1;
      exp_series = constant<T>(k / factorial) + x * exp_series;
    }
    return {pole.A * value.abar, delta * value.abar, exp_series, (delta * delta) * slope};
  }
};

/// The exact solution for an input held constant over the step.
struct ExactHold {
  static constexpr bool kAbarIsExponential = true;
  static constexpr bool kBbarDependsOnA = true;

  /// Δ·φ1(x) = (exp(x) − 1)/A spares a division for every step. A policy may have an exact_hold of
  /// its own, where exp and expm1 share their work.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Coefficients<T> value(real_t<T> delta, const Pole<T>& pole) {
    if constexpr (requires { Math::exact_hold(delta, pole); }) {
      return Math::exact_hold(delta, pole);
    } else {
      const T x = delta * pole.A;
      const auto is_tiny = norm(x) < constant<T>(kTinyNorm);
      const T limit = delta * (constant<T>(1) + constant<T>(0.5) * x);
      return {Math::exp_of(delta * pole.exponent),
              select(is_tiny, limit, expm1<Math>(x) * pole.inverse)};
    }
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>& value) {
    // bbar = (abar − 1)/A, so its derivative is (Δ·abar − bbar)/A, which cancels for a small x.
    const T x = delta * pole.A;
    const T near = (delta * delta) * phi1_derivative_series(x);
    const T away = (delta * value.abar - value.bbar) * pole.inverse;
    return {pole.A * value.abar, delta * value.abar, value.abar,
            select(norm(x) < constant<T>(1), near, away)};
  }
};

/// Tustin's rule. For A = −A it is the form that some print, (1 − x/2)/(1 + x/2).
struct Tustin {
  static constexpr bool kAbarIsExponential = false;
  static constexpr bool kBbarDependsOnA = true;

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Coefficients<T> value(real_t<T> delta, const Pole<T>& pole) {
    const T half = (constant<T>(0.5) * delta) * pole.A;
    const T r = reciprocal(constant<T>(1) - half);
    return {(constant<T>(1) + half) * r, delta * r};
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
};

/// The formula of a method: value<Math>(Δ, pole) and derivatives<Math>(Δ, pole, value).
template <Method kMethod>
struct Formula;
template <>
struct Formula<Method::kZoh> : TruncatedHold<1> {};
template <>
struct Formula<Method::kHighorder> : TruncatedHold<2> {};
template <>
struct Formula<Method::kPoly> : TruncatedHold<3> {};
template <>
struct Formula<Method::kRk4> : TruncatedHold<4> {};
template <>
struct Formula<Method::kFoh> : ExactHold {};
template <>
struct Formula<Method::kBilinear> : Tustin {};

/// Gradients of the step and the pole, from those of abar and bbar (conjugate Wirtinger derivatives
/// where complex, as PyTorch has them).
template <class T>
struct StepGradient {
  real_t<T> delta;
  T A;
};

template <Method kMethod, class Math, class T>
SELECTIVE_SCAN_HD StepGradient<T> backpropagate(real_t<T> delta, const Pole<T>& pole,
                                                const Coefficients<T>& value, T dabar, T dbbar) {
  using F = Formula<kMethod>;
  const Derivatives<T> d = F::template derivatives<Math>(delta, pole, value);
  StepGradient<T> gradient{real_of_product_conj(dabar, d.abar_delta), dabar * conj(d.abar_A)};
  if constexpr (F::kBbarDependsOnA) {
    gradient.delta = gradient.delta + real_of_product_conj(dbbar, d.bbar_delta);
    gradient.A = gradient.A + dbbar * conj(d.bbar_A);
  } else {
    gradient.delta = gradient.delta + real(dbbar);  // bbar = Δ
  }
  return gradient;
}

}  // namespace selective_scan
