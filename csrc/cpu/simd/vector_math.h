// VectorMath: the Math policy (core/math.h) for vectors, inlined and without branches, so that it
// pipelines with the surrounding code. Results are within 2 ulp (softplus and sigmoid: 2.75),
// including infinities, NaN, overflow and gradual underflow, although tasks flush the denormals
// that result. exp_of and sigmoid trade the outermost binades for speed.
#pragma once

#include "../../core/complex.h"
#include "../../core/discretization.h"
#include "../../core/math.h"
#include "exponentials.h"
#include "vector.h"

namespace selective_scan::cpu {

/// Returns 2^n, given n + kExponentBias in the low bits.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> power_of_two(Bits<T, K> biased) {
  return as_number(biased << MathConstants<T>::kMantissaBits);
}

/// log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)].
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> log1p_of_reduced(Vec<T, K> f) {
  using R = Vec<T, K>;
  const R s = f / (R(2) + f);
  const R s2 = s * s;
  const R half_square = R(T(0.5)) * f * f;
  const R series = s2 * polynomial(s2, MathConstants<T>::kLogPolynomial);
  return f - (half_square - s * (half_square + series));
}

/// log(1 + t) for 0 <= t <= 1.
template <class T, class K>
SELECTIVE_SCAN_HD Vec<T, K> log1p_of_fraction(Vec<T, K> t) {
  using R = Vec<T, K>;
  if constexpr (kLooksUp<T, K>) {  // these sets also fuse multiply-add
    return t - (t * t) * polynomial(t, MathConstants<T>::kLog1pPolynomial);
  } else {
    const auto is_large = t > R(T(0.41421356237309504880));  // sqrt(2) - 1
    const R f = select(is_large, R(T(0.5)) * t - R(T(0.5)), t);
    const R log_of_scale = select(is_large, R(T(0.69314718055994530942)), R(T(0)));
    return log_of_scale + log1p_of_reduced(f);
  }
}

/// If kIsBounded, the arguments of exp_of are known to be in the range of ReducedExp2 and are not
/// clamped; the results are the same.
template <bool kIsBounded>
struct VectorMathOf {
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> exp(Vec<T, K> x) {
    using R = Vec<T, K>;
    using Constants = MathConstants<T>;
    const ReducedExp<T, K> reduced(clamp(x, Constants::kExpLow, Constants::kExpHigh));
    // 2^n may leave the range of normal numbers when exp(x) does not, so it is applied in two
    // steps.
    const Bits<T, K> n = reduced.biased_exponent() + bits_t<T>(-Constants::kExponentBias);
    const Bits<T, K> half = n >> 1;
    return (R(1) + reduced.growth) * power_of_two(half + bits_t<T>(Constants::kExponentBias)) *
           power_of_two((n - half) + bits_t<T>(Constants::kExponentBias));
  }

  /// exp for x <= 0 and NaN. 2^n can only be too small, so it is computed with a larger exponent
  /// and scaled down at the end.
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> exp_of_negative(Vec<T, K> x) {
    using R = Vec<T, K>;
    using Constants = MathConstants<T>;
    const R bounded = greater(R(Constants::kExpLow), x);
    if constexpr (kLooksUp<T, K>) {
      constexpr int kShift = Constants::kSubnormalShift;
      return PowerByTable<K>::template of_exp<kShift>(bounded).value() *
             R(Constants::kSubnormalScale);
    } else {
      const ReducedExp<T, K> reduced(bounded);
      const R power = power_of_two(reduced.biased + Constants::kSubnormalShift);
      return (power + power * reduced.growth) * R(Constants::kSubnormalScale);
    }
  }

  /// 1/(1 + exp(-x)); 0 if exp(-x) would become infinite. If exp(-x) would underflow, it adds
  /// nothing to 1.
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> sigmoid(Vec<T, K> x) {
    using R = Vec<T, K>;
    constexpr T kLimit = MathConstants<T>::kExpHigh - 2;
    const R bounded = greater(R(-kLimit), -x);
    R sum;  // 1 + exp(-x), without first rounding exp(-x)
    if constexpr (kLooksUp<T, K>) {
      const auto reduced = PowerByTable<K>::of_exp(bounded);
      sum = (R(T(1)) + (reduced.power * reduced.f) *
                           polynomial(reduced.f, Exp2Table<R::kWidth>::kPolynomial)) +
            reduced.power;
    } else {
      const ReducedExp<T, K> reduced(bounded);
      const R power = power_of_two(reduced.biased);
      sum = (R(T(1)) + power * reduced.growth) + power;
    }
    return select(x < R(-kLimit), R(T(0)), reciprocal_of_normal(sum));
  }

  /// log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), or x itself above the threshold.
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> softplus(Vec<T, K> x) {
    return softplus(x, decay(x));
  }
  /// exp(-|x|), from which softplus and its derivative are computed.
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> decay(Vec<T, K> x) {
    return exp_of_negative(negative_magnitude(x));
  }
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> softplus(Vec<T, K> x, Vec<T, K> decay) {
    using R = Vec<T, K>;
    const R sum = greater(R(T(0)), x) + log1p_of_fraction(decay);
    if constexpr (sizeof(T) == 4) return sum;  // above the threshold it rounds to x
    return select(x > R(T(kSoftplusThreshold)), x, sum);
  }
  /// 1/(1 + exp(-x)), or 1 above the threshold.
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> softplus_derivative(Vec<T, K> x, Vec<T, K> decay) {
    using R = Vec<T, K>;
    const R result = select(x > R(T(0)), R(T(1)), decay) * reciprocal_of_normal(R(T(1)) + decay);
    if constexpr (sizeof(T) == 4) return result;  // above the threshold it rounds to 1
    return select(x > R(T(kSoftplusThreshold)), R(T(1)), result);
  }

  /// Accurate up to |x| = 6000 (fp32) or 10^6 (fp64). Beyond, the error grows with x.
  template <class T, class K>
  static SELECTIVE_SCAN_HD void sincos(Vec<T, K> x, Vec<T, K>& sine, Vec<T, K>& cosine) {
    using R = Vec<T, K>;
    using Constants = MathConstants<T>;
    const R round(Constants::kRound);
    const R rounded = round + R(static_cast<T>(kTwoOverPi)) * x;
    const R n = rounded - round;
    // x - n·π/2; the rounding errors of the differences are added at the end.
    R r = x, missing(T(0));
    for (int part = 0; part < 3; ++part) {
      const R product = n * R(Constants::kHalfPi[part]);
      const R before = r;
      r = before - product;
      if (part >= Constants::kExactParts) missing = missing + ((before - r) - product);
    }
    r = r + (missing - n * R(Constants::kHalfPi[3]));
    // If x is so large that n is not exact, any angle will do, but it must be a valid one.
    r = clamp(r, T(-1), T(1));

    const R r2 = r * r;
    sine = r + (r * r2) * polynomial(r2, Constants::kSinPolynomial);
    const R half_square = R(T(0.5)) * r2;
    const R head = R(1) - half_square;
    const R lost = (R(1) - head) - half_square;
    cosine = head + (lost + (r2 * r2) * polynomial(r2, Constants::kCosPolynomial));

    constexpr int kSignBit = sizeof(T) * 8 - 1;
    const Bits<T, K> quadrant = bits_of(rounded);
    const auto is_odd = is_set(quadrant & 1);
    const Bits<T, K> sine_sign = (quadrant & 2) << (kSignBit - 1);
    const Bits<T, K> cosine_sign = ((quadrant + bits_t<T>(1)) & 2) << (kSignBit - 1);
    const R sine_of_r = sine;
    sine = as_number(bits_of(select(is_odd, cosine, sine_of_r)) ^ sine_sign);
    cosine = as_number(bits_of(select(is_odd, sine_of_r, cosine)) ^ cosine_sign);
  }

  /// A·log2(e). Angles keep their unit: no decay would hide the rounding error of a conversion.
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> exponent(Vec<T, K> A) {
    return A * Vec<T, K>(static_cast<T>(kLog2e));
  }
  template <class R>
  static SELECTIVE_SCAN_HD Complex<R> exponent(Complex<R> A) {
    return {exponent(A.re), A.im};
  }

  /// exp, but 0 below 2^-126 and infinite above 2^127.5 (fp32; fp64 likewise), each at the latest
  /// half a binade beyond.
  template <class T, class K>
  static SELECTIVE_SCAN_HD Vec<T, K> exp_of(Vec<T, K> y) {
    if constexpr (kLooksUp<T, K>) {
      const PowerByTable<K> reduced(y);
      return kIsBounded ? reduced.value() : reduced.within_range(reduced.value(), 0.f);
    } else {
      return ReducedExp2<T, K, kIsBounded>(y).value();
    }
  }
  template <class R>
  static SELECTIVE_SCAN_HD Complex<R> exp_of(Complex<R> y) {
    const R modulus = exp_of(y.re);
    R sine, cosine;
    sincos(y.im, sine, cosine);
    return {modulus * cosine, modulus * sine};
  }

  /// exp(x) and exp(x) - 1 from x = Δ·A in the unit of exp_of, each to full precision; 0 and -1, or
  /// infinite, if exp_of is 0 or infinite.
  template <class T, class K>
  static SELECTIVE_SCAN_HD ExpAndGrowth<Vec<T, K>> exp_and_growth(Vec<T, K> y) {
    if constexpr (kLooksUp<T, K>) {
      const PowerByTable<K> reduced(y);
      const auto result = reduced.exp_and_growth();
      if constexpr (kIsBounded) return result;
      return {reduced.within_range(result.exp, 0.f), reduced.within_range(result.growth, -1.f)};
    } else {
      // Rounded on its own; otherwise some loops would fuse it and others not.
      return ReducedExp2<T, K, kIsBounded>(kept_apart(y)).exp_and_growth();
    }
  }
  template <class R>
  static SELECTIVE_SCAN_HD ExpAndGrowth<Complex<R>> exp_and_growth(Complex<R> y) {
    const ExpAndGrowth<R> modulus = exp_and_growth(y.re);
    const Turn<R> turn(y.im);
    const R lost = modulus.exp * turn.versine;
    const R im = modulus.exp * turn.sine;
    return {{modulus.exp - lost, im}, {modulus.growth - lost, im}};
  }

  /// exp(x) and (exp(x) - 1)/A for x = Δ·A; A must not be 0.
  template <class State>
  static SELECTIVE_SCAN_HD Coefficients<State> exact_hold(real_t<State> delta,
                                                          const Pole<State>& pole) {
    const ExpAndGrowth<State> step = exp_and_growth(delta * pole.exponent);
    return {step.exp, step.growth * pole.inverse};
  }

 private:
  /// exp(i·angle) - 1 = -versine + i·sine, from half the angle, so that nothing cancels.
  template <class R>
  struct Turn {
    R versine;
    R sine;
    SELECTIVE_SCAN_HD explicit Turn(R angle) {
      R half_sine, half_cosine;
      sincos(constant<R>(0.5) * angle, half_sine, half_cosine);
      const R twice = half_sine + half_sine;
      versine = twice * half_sine;
      sine = twice * half_cosine;
    }
  };
};

using VectorMath = VectorMathOf<false>;

}  // namespace selective_scan::cpu
