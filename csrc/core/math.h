// Elementary functions of real and complex arguments, on top of a policy `Math` that supplies them
// for the real type: StandardMath here, vector code in cpu/, special-function instructions in
// cuda/.
//
// A policy has static functions of a real type R:
//   exp(R)    and    sincos(R x, R& sine, R& cosine)
//   expm1(R), log1p(R)    unless it has its own softplus and exact_hold (discretization/exact.h)
// and, for exp(Δ·A) with A fixed, the hot spot of every kernel, the pair
//   exponent(T A)      A in the unit that exp_of takes, computed once       (T real or complex)
//   exp_of(T y)        exp(Δ·A) from y = Δ·exponent(A)
#pragma once

#include <cmath>

#include "complex.h"
#include "config.h"

namespace selective_scan {

/// Above this threshold softplus is the identity (as in PyTorch).
constexpr double kSoftplusThreshold = 20;

constexpr double kLog2e = 1.4426950408889634074;

template <class Math, class R>
SELECTIVE_SCAN_HD Complex<R> complex_exp(Complex<R> x) {
  const R modulus = Math::exp(x.re);
  R sine, cosine;
  Math::sincos(x.im, sine, cosine);
  return {modulus * cosine, modulus * sine};
}

/// Returns a + b, rounded, and its rounding error: a + b = sum + lost exactly (Knuth).
template <class T>
SELECTIVE_SCAN_HD T two_sum(T a, T b, T& lost) {
  const T sum = a + b;
  const T b_part = sum - a;
  lost = (a - (sum - b_part)) + (b - b_part);
  return sum;
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

/// The real part exp(re)·cos(im) − 1 is expm1(re)·cos(im) − (1 − cos(im)), and for cos > 0 this
/// uses 1 − cos = sin²/(1 + cos).
template <class Math, class R>
SELECTIVE_SCAN_HD Complex<R> expm1(Complex<R> x) {
  const R growth = Math::expm1(x.re);
  R sine, cosine;
  Math::sincos(x.im, sine, cosine);
  const R versine = select(cosine > constant<R>(0), sine * sine / (constant<R>(1) + cosine),
                           constant<R>(1) - cosine);
  return {growth * cosine - versine, sine + growth * sine};
}

template <class R>
SELECTIVE_SCAN_HD R reciprocal(R x) {
  return constant<R>(1) / x;
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> reciprocal(Complex<R> x) {
  const R scale = reciprocal(norm(x));
  return {x.re * scale, constant<R>(0) - x.im * scale};
}

/// log(1 + exp(x)), or x itself above the threshold.
template <class Math, class R>
SELECTIVE_SCAN_HD R softplus(R x) {
  return select(x > constant<R>(kSoftplusThreshold), x, Math::log1p(Math::exp(x)));
}

/// Returns a finite step unchanged and NaN for an infinite one: no method can use an infinite step,
/// and its result would depend on the order of operations.
template <class R>
SELECTIVE_SCAN_HD R finite_step(R delta) {
  return delta + constant<R>(0) * delta;
}

template <class Math, class R>
SELECTIVE_SCAN_HD R sigmoid(R x) {
  return constant<R>(1) / (constant<R>(1) + Math::exp(constant<R>(0) - x));
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
