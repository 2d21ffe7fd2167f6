// Elementary functions for real and complex arguments, over a policy `Math` that supplies them for
// the real type: StandardMath here, vector code in cpu/, special-function instructions in cuda/.
//
// A policy has static functions of a real type R:
//   exp(R), expm1(R), log1p(R)    and    sincos(R x, R& sine, R& cosine)
// and for exp(Δ·A) with A fixed, the hot spot of every kernel, a pair
//   exponent(T A)      A in the unit that suits exp_of, computed once       (T real or complex)
//   exp_of(T y)        exp(Δ·A) from y = Δ·exponent(A)
#pragma once

#include <cmath>

#include "complex.h"
#include "config.h"

namespace selective_scan {

/// Above this, softplus is the identity (as in PyTorch).
constexpr double kSoftplusThreshold = 20;

template <class Math, class R>
SELECTIVE_SCAN_HD Complex<R> complex_exp(Complex<R> x) {
  const R modulus = Math::exp(x.re);
  R sine, cosine;
  Math::sincos(x.im, sine, cosine);
  return {modulus * cosine, modulus * sine};
}

struct StandardMath {
  template <class R>
  static SELECTIVE_SCAN_HD R exp(R x) {
    return std::exp(x);
  }
  template <class R>
  static SELECTIVE_SCAN_HD Complex<R> exp(Complex<R> x) {
    return complex_exp<StandardMath>(x);
  }
  template <class R>
  static SELECTIVE_SCAN_HD R expm1(R x) {
    return std::expm1(x);
  }
  template <class R>
  static SELECTIVE_SCAN_HD R log1p(R x) {
    return std::log1p(x);
  }
  template <class R>
  static SELECTIVE_SCAN_HD void sincos(R x, R& sine, R& cosine) {
    sine = std::sin(x);
    cosine = std::cos(x);
  }
  template <class T>
  static SELECTIVE_SCAN_HD T exponent(T A) {
    return A;
  }
  template <class T>
  static SELECTIVE_SCAN_HD T exp_of(T y) {
    return exp(y);
  }
};

/// exp(x) − 1 without cancellation near 0.
template <class Math, class R>
SELECTIVE_SCAN_HD R expm1(R x) {
  return Math::expm1(x);
}

/// cos(y) − 1 = −2 sin²(y/2) keeps the real part accurate where exp(x) is near 1.
template <class Math, class R>
SELECTIVE_SCAN_HD Complex<R> expm1(Complex<R> x) {
  const R growth = Math::expm1(x.re);
  R sine, cosine;  // of half the angle
  Math::sincos(constant<R>(0.5) * x.im, sine, cosine);
  const R versine = constant<R>(2) * sine * sine;
  return {growth * (constant<R>(1) - versine) - versine,
          (growth + constant<R>(1)) * (constant<R>(2) * sine * cosine)};
}

template <class R>
SELECTIVE_SCAN_HD R reciprocal(R x) {
  return constant<R>(1) / x;
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> reciprocal(Complex<R> x) {
  const R scale = constant<R>(1) / norm(x);
  return {x.re * scale, constant<R>(0) - x.im * scale};
}

/// Below this |x|², φ1(x) = 1 + x/2 and φ1'(x) = 1/2 + x/3 to full precision.
constexpr double kTinyNorm = 1e-18;

/// φ1(x) = (exp(x) − 1)/x, φ1(0) = 1.
template <class Math, class T>
SELECTIVE_SCAN_HD T phi1(T x) {
  const auto is_tiny = norm(x) < constant<T>(kTinyNorm);
  return select(is_tiny, constant<T>(1) + constant<T>(0.5) * x, expm1<Math>(x) * reciprocal(x));
}

/// Both series of phi1_derivative, in h²: sinh(h)/h = Σ h^2k/(2k+1)!  and its derivative divided by
/// h, Σ (2k+2)/(2k+3)! h^2k.
template <class T>
SELECTIVE_SCAN_HD void sinhc_series(T h_squared, T& value, T& slope_over_h) {
  constexpr int kTerms = sizeof(scalar_t<T>) == 4 ? 7 : 11;
  // From the last term to the first: t_k = 1/(2k+1)!, the slope's coefficient is (2k+2)·t_(k+1).
  double factorial = 1;
  for (int k = 1; k <= 2 * kTerms + 1; ++k) factorial *= k;
  T sum = T{};
  T slope = T{};
  double next = 1 / factorial;  // t_(k+1)
  for (int k = kTerms - 1; k >= 0; --k) {
    const double term = next * (2 * k + 2) * (2 * k + 3);
    slope = constant<T>((2 * k + 2) * next) + h_squared * slope;
    sum = constant<T>(term) + h_squared * sum;
    next = term;
  }
  value = sum;
  slope_over_h = slope;
}

/// φ1'(x) = (exp(x)(x − 1) + 1)/x². Within |x| < 2 that cancels; there φ1(x) = exp(h) sinh(h)/h
/// with h = x/2 gives φ1'(x) = exp(h)/2 · (s(h) + s'(h)), s(h) = sinh(h)/h.
template <class Math, class T>
SELECTIVE_SCAN_HD T phi1_derivative(T x) {
  const T h = constant<T>(0.5) * x;
  T s, slope_over_h;
  sinhc_series(h * h, s, slope_over_h);
  const T inside = Math::exp(h) * (constant<T>(0.5) * (s + h * slope_over_h));
  const T inverse = reciprocal(x);
  const T outside = (constant<T>(1) + Math::exp(x) * (x - one<T>())) * inverse * inverse;
  return select(norm(x) < constant<T>(4), inside, outside);
}

/// log(1 + exp(x)), x itself above the threshold.
template <class Math, class R>
SELECTIVE_SCAN_HD R softplus(R x) {
  return select(x > constant<R>(kSoftplusThreshold), x, Math::log1p(Math::exp(x)));
}

template <class Math, class R>
SELECTIVE_SCAN_HD R sigmoid(R x) {
  return constant<R>(1) / (constant<R>(1) + Math::exp(constant<R>(0) - x));
}

template <class Math, class R>
SELECTIVE_SCAN_HD R softplus_derivative(R x) {
  return select(x > constant<R>(kSoftplusThreshold), constant<R>(1), sigmoid<Math>(x));
}

template <class Math, class R>
SELECTIVE_SCAN_HD R silu(R x) {
  return x * sigmoid<Math>(x);
}

/// silu'(x), given s = sigmoid(x).
template <class R>
SELECTIVE_SCAN_HD R silu_derivative(R x, R s) {
  return s * (constant<R>(1) + x * (constant<R>(1) - s));
}

}  // namespace selective_scan
