// Elementary functions for real and complex arguments, over a policy `Math` that supplies them for
// the real type: StandardMath here, vector code in cpu/, special-function instructions in cuda/.
//
// A policy has static functions of a real type R:
//   exp(R), expm1(R), log1p(R)    and    sincos(R x, R& sine, R& cosine)
// and for exp(Δ·A) with A fixed, the hot spot of every kernel, a pair
//   exponent(T A)      A in the unit that suits exp_of, computed once       (T real or complex)
//   exp_of(T y)        exp(Δ·A) from y = Δ·exponent(A), or exp_of(Δ, exponent) of a policy that
//                      wants the two by themselves
#pragma once

#include <cmath>

#include "complex.h"
#include "config.h"

namespace selective_scan {

/// Above this, softplus is the identity (as in PyTorch).
constexpr double kSoftplusThreshold = 20;

/// log2(e), and what rounding it to a double leaves.
constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLog2eLow = 2.0355273740931033e-17;

template <class Math, class R>
SELECTIVE_SCAN_HD Complex<R> complex_exp(Complex<R> x) {
  const R modulus = Math::exp(x.re);
  R sine, cosine;
  Math::sincos(x.im, sine, cosine);
  return {modulus * cosine, modulus * sine};
}

/// (2^f − 1)/f = Σ kExp2Polynomial.v[i]·f^i for |f| ≤ 1/2, a minimax fit to fp64's last digit.
struct Exp2Polynomial {
  double v[11];
};
inline constexpr Exp2Polynomial kExp2Polynomial{
    {0.69314718055994530942, 0.24022650695910076149, 0.055504108664821606109,
     0.0096181291076186498791, 0.0013333558146410650291, 0.00015403530424813948095,
     0.000015252733838886554288, 1.3215451605345717746e-6, 1.017805762101754121e-7,
     7.0709842384314917973e-9, 4.45581794611090611e-10}};

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

/// exp(Δ·A) from Δ and a pole's exponent.
template <class Math, class R, class Exponent>
SELECTIVE_SCAN_HD auto exp_of_product(R delta, const Exponent& exponent) {
  if constexpr (requires { Math::exp_of(delta, exponent); }) {
    return Math::exp_of(delta, exponent);
  } else {
    return Math::exp_of(delta * exponent);
  }
}

/// exp(x) − 1 without cancellation near 0.
template <class Math, class R>
SELECTIVE_SCAN_HD R expm1(R x) {
  return Math::expm1(x);
}

/// The real part exp(re)·cos(im) − 1 is expm1(re)·cos(im) − (1 − cos(im)), and 1 − cos = sin²/(1 +
/// cos) where cos is near 1.
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

constexpr double factorial(int n) {
  return n > 1 ? n * factorial(n - 1) : 1;
}

/// log(1 + exp(x)), x itself above the threshold.
template <class Math, class R>
SELECTIVE_SCAN_HD R softplus(R x) {
  return select(x > constant<R>(kSoftplusThreshold), x, Math::log1p(Math::exp(x)));
}

/// A step as it is, but NaN where it is infinite: no method has a use for such a step, and what one
/// made of it would depend on its order of operations.
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
