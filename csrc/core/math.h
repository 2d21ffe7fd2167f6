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

/// Below this |x|², φ1(x) = 1 + x/2 and φ1'(x) = 1/2 + x/3 to full precision.
constexpr double kTinyNorm = 1e-18;

constexpr double factorial(int n) {
  return n > 1 ? n * factorial(n - 1) : 1;
}

/// Of φ1'(x), φ1(x) = (exp(x) − 1)/x, for |x| < 1: where x is complex the series' (k+1)/(k+2)!,
/// where it is real a minimax fit (relative error 4e-8 in fp32, 5e-18 in fp64), which needs fewer.
template <class T>
struct Phi1DerivativePolynomial {
  static constexpr bool kIsSingle = sizeof(scalar_t<T>) == 4;
  static constexpr int kDegree = is_complex_v<T> ? (kIsSingle ? 10 : 18) : (kIsSingle ? 7 : 14);

  static constexpr double coefficient(int k) {
    constexpr double kSingle[] = {0.49999998398818260549,    0.33333340410197916513,
                                  0.12500056281402538038,    0.033332797388798734681,
                                  0.0069414772626984916189,  0.0011913790809990059355,
                                  0.00017851079603811413271, 0.000021846651072880085932};
    constexpr double kDouble[] = {
        0.50000000000000000154,    0.33333333333333336762,     0.12499999999999984835,
        0.033333333333331986623,   0.0069444444444468606599,   0.0011904761904913051836,
        0.00017361111109685439507, 0.000022045855305025606602, 2.4801587694669177788e-6,
        2.5052126950439612812e-7,  2.2964379083431073229e-8,   1.9268375815627598909e-9,
        1.4915232766401145781e-10, 1.0873547200630750961e-11,  7.1323346339599588467e-13};
    return is_complex_v<T> ? (k + 1) / factorial(k + 2) : kIsSingle ? kSingle[k] : kDouble[k];
  }
};

template <int kFirst = 0, class T>
SELECTIVE_SCAN_HD T phi1_derivative_series(T x) {
  using Polynomial = Phi1DerivativePolynomial<T>;
  constexpr double kCoefficient = Polynomial::coefficient(kFirst);
  if constexpr (kFirst == Polynomial::kDegree) {
    return constant<T>(kCoefficient) * one<T>();
  } else {
    return constant<T>(kCoefficient) + x * phi1_derivative_series<kFirst + 1>(x);
  }
}

/// φ1'(x)/φ1(x) = 1/2 + coth(x/2)/2 − 1/x = 1/2 + x·r(x²) for |x| < 1: r's Taylor series, in which
/// a term is a fortieth of the one before. `norm` is |x|².
template <class T>
SELECTIVE_SCAN_HD T phi1_logarithmic_derivative(T x, real_t<T> norm) {
  using R = real_t<T>;
  constexpr int kDegree = sizeof(R) == 4 ? 3 : 9;
  constexpr double kCoefficients[] = {1.0 / 12,
                                      -1.0 / 720,
                                      1.0 / 30240,
                                      -1.0 / 1209600,
                                      1.0 / 47900160,
                                      -691.0 / 1307674368000,
                                      1.0 / 74724249600,
                                      -3617.0 / 10670622842880000,
                                      43867.0 / 5109094217170944000,
                                      -174611.0 / 802857662698291200000.0};
  const T y = x * x;
  const R half = constant<R>(0.5);
  if constexpr (is_complex_v<T>) {
    // A polynomial with real coefficients takes two real multiplications a term: y is a root of
    // y² = twice·y − square.
    const R twice = y.re + y.re;
    const R square = norm * norm;
    R last = constant<R>(kCoefficients[kDegree]);
    R sum = constant<R>(kCoefficients[kDegree - 1]) + twice * last;
    for (int k = kDegree - 2; k >= 1; --k) {
      const R next = constant<R>(kCoefficients[k]) + twice * sum - square * last;
      last = sum;
      sum = next;
    }
    const T r{constant<R>(kCoefficients[0]) + y.re * sum - square * last, y.im * sum};
    return {half + x.re * r.re - x.im * r.im, x.re * r.im + x.im * r.re};
  } else {
    R r = constant<R>(kCoefficients[kDegree]);
    for (int k = kDegree - 1; k >= 0; --k) r = constant<R>(kCoefficients[k]) + y * r;
    return half + x * r;
  }
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
SELECTIVE_SCAN_HD R silu(R x) {
  return x * sigmoid<Math>(x);
}

/// silu'(x), given s = sigmoid(x).
template <class R>
SELECTIVE_SCAN_HD R silu_derivative(R x, R s) {
  return s * (constant<R>(1) + x * (constant<R>(1) - s));
}

}  // namespace selective_scan
