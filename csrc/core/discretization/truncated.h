// zoh, highorder, poly, rk4: abar = exp(x), and bbar is Δ times the first 1, 2, 3, 4 terms of the
// series of φ1(x) = (exp(x) − 1)/x.
#pragma once

#include <type_traits>

#include "formula.h"

namespace selective_scan {

/// The value that exp(Δ·A) takes from A, for a policy that has rate(A) and exp_at(Δ, rate).
template <class Math, class T>
using rate_t = decltype(Math::rate(T{}));

/// The number of terms depends on the method of the call: the coefficients are known at run time,
/// and missing ones are zero.
constexpr int kAnyTerms = 0;

/// Takes the place of a Series if all coefficients are known at compile time.
struct NoSeries {
  template <class R>
  SELECTIVE_SCAN_HD operator Series<R>() const {
    return {};
  }
};

/// b(x) = Σ_{k<kTerms} x^k/(k+1)!
template <int kTerms>
struct TruncatedHold : StepForms<TruncatedHold<kTerms>> {
  static constexpr bool kAbarIsExponential = true;
  static constexpr bool kBbarDependsOnA = kTerms != 1;
  static constexpr bool kAbarIsByRate = true;
  static constexpr int kMostTerms = kTerms == kAnyTerms ? 4 : kTerms;

  /// Returns `scale` times the coefficient of x^k in b.
  template <class T>
  static SELECTIVE_SCAN_HD real_t<T> coefficient(int k, const Series<real_t<T>>& series,
                                                 int scale = 1) {
    constexpr double kCoefficients[] = {1, 1.0 / 2, 1.0 / 6, 1.0 / 24};
    if (kTerms != kAnyTerms || k < 2) return constant<T>(scale * kCoefficients[k]);
    return constant<T>(scale) * (k == 2 ? series.square : series.cube);
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Hold<T> hold(real_t<T> delta, const Pole<T>& pole) {
    const T x = delta * pole.A;
    T b = coefficient<T>(kMostTerms - 1, pole.series) * one<T>();
    for (int k = kMostTerms - 2; k >= 0; --k) b = coefficient<T>(k, pole.series) + x * b;
    return {Math::exp_of(delta * pole.exponent), b};
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Slopes<T> slopes(real_t<T> delta, const Pole<T>& pole,
                                            const Hold<T>& hold) {
    constexpr int kLast = kMostTerms - 1;
    if constexpr (kLast == 0) {
      return {hold.a, T{}};
    } else {
      const T x = delta * pole.A;
      T slope = coefficient<T>(kLast, pole.series, kLast) * one<T>();  // Σ k·x^(k-1)/(k+1)!
      for (int k = kLast - 1; k >= 1; --k) slope = coefficient<T>(k, pole.series, k) + x * slope;
      return {hold.a, slope};
    }
  }

  /// d(Δ·b)/dΔ = b + x·b' is the series of exp with the same number of terms; d(Δ·b)/dA = Δ²·b'.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>& value) {
    const T x = delta * pole.A;
    T exp_series = coefficient<T>(kMostTerms - 1, pole.series, kMostTerms) * one<T>();
    T slope = T{};  // b'(x) = Σ k·x^(k-1)/(k+1)!
    for (int k = kMostTerms - 1; k >= 1; --k) {
      slope = coefficient<T>(k, pole.series, k) + x * slope;
      exp_series = coefficient<T>(k - 1, pole.series, k) + x * exp_series;
    }
    return {pole.A * value.abar, delta * value.abar, exp_series, (delta * delta) * slope};
  }

  /// b is a polynomial in Δ, with coefficients A^k/(k+1)! for k > 0.
  template <class Math, class T>
  struct Constants : std::conditional_t<kTerms == kAnyTerms, Series<real_t<T>>, NoSeries> {
    rate_t<Math, T> rate;
    T coefficients[kMostTerms > 1 ? kMostTerms - 1 : 1];
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A, const Series<real_t<T>>& series = {}) {
    Constants<Math, T> result{};
    if constexpr (kTerms == kAnyTerms) static_cast<Series<real_t<T>>&>(result) = series;
    result.rate = Math::rate(A);
    for (int k = 1; k < kMostTerms; ++k) {
      // The product begins with the coefficient: a power of A alone may be infinite, and zero times
      // infinity is NaN.
      T& product = result.coefficients[k - 1];
      product = coefficient<T>(k, series) * A;
      for (int i = 1; i < k; ++i) product = product * A;
    }
    return result;
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD auto step(real_t<T> delta, real_t<T> delta_u,
                                     const Constants<Math, T>& constants) {
    const T abar = Math::exp_at(delta, constants.rate);
    if constexpr (kTerms == 1) {
      return Step<T, real_t<T>>{abar, delta_u};
    } else {
      T sum = constants.coefficients[kMostTerms - 2];
      for (int k = kMostTerms - 3; k >= 0; --k) sum = constants.coefficients[k] + delta * sum;
      return Step<T, T>{abar, delta_u + (delta * delta_u) * sum};
    }
  }

  /// With k = kInputScale and s = k·Δ·u·B,
  ///   h[t] = a·h[t-1] + s·b/k        and its derivative by x is a·h[t-1] + s·b'/k
  /// b/k and b'/k take few operations as polynomials of the right v:
  ///   b                        k    v          b/k                          b'/k
  ///   1 + x/2                  1/2  1 + x      1 + v                        1
  ///   1 + x/2 + x²/6           2/3  3/4 + x/2  v² + 15/16                   v
  ///   1 + x/2 + x²/6 + x³/24   9/8  4/9 + x/3  v·(v² + 20/27) + 344/729     v² + 20/81
  /// With coefficients known at run time k = 1 and v = x, and b and b' are computed directly.
  template <class T>
  struct StepCache {
    T a;
    T v;
    T b;      // divided by k
    T slope;  // b'/k
    T by_x;   // the derivative of h[t] by x
  };
  static constexpr double kInputScale = kTerms == 2   ? 0.5
                                        : kTerms == 3 ? 2.0 / 3
                                        : kTerms == 4 ? 9.0 / 8
                                                      : 1;
  static constexpr double kPoleScale = kTerms == 3 ? 0.5 : kTerms == 4 ? 1.0 / 3 : 1;
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepCache<T> keep(real_t<T> delta, T scaled_A,
                                             const Constants<Math, T>& constants) {
    return keep_with(Math::exp_at(delta, constants.rate), delta, scaled_A, constants);
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepCache<T> keep_with(
      T a, real_t<T> delta, T scaled_A, [[maybe_unused]] const Constants<Math, T>& constants) {
    if constexpr (kTerms == 1) {
      return {a, {}, {}, {}, {}};
    } else if constexpr (kTerms == 2) {
      return {a, constant<T>(1) + delta * scaled_A, {}, {}, {}};
    } else if constexpr (kTerms == 3) {
      const T v = constant<T>(0.75) + delta * scaled_A;
      return {a, v, multiply_add(v, v, constant<T>(15.0 / 16) * one<T>()), v, {}};
    } else if constexpr (kTerms == kAnyTerms) {
      const T v = delta * scaled_A;
      const T high = coefficient<T>(2, constants) * one<T>() + coefficient<T>(3, constants) * v;
      const T b = constant<T>(1) + v * (coefficient<T>(1, constants) + v * high);
      const T high_slope =
          coefficient<T>(2, constants, 2) * one<T>() + coefficient<T>(3, constants, 3) * v;
      return {a, v, b, coefficient<T>(1, constants) + v * high_slope, {}};
    } else {
      static_assert(kTerms == 4);
      const T v = constant<T>(4.0 / 9) + delta * scaled_A;
      const T slope = multiply_add(v, v, constant<T>(20.0 / 81) * one<T>());
      const T factor = constant<T>(40.0 / 81) + slope;
      return {a, v, multiply_add(v, factor, constant<T>(344.0 / 729) * one<T>()), slope, {}};
    }
  }

  template <class T>
  static SELECTIVE_SCAN_HD T advance(StepCache<T>& kept, real_t<T> input, T h, T B) {
    if constexpr (kTerms == 1) {
      return kept.a * h + input * B;
    } else {
      const T s = input * B;
      if constexpr (kTerms == 2) {
        kept.by_x = multiply_add(kept.a, h, s);
        return multiply_add(kept.v, s, kept.by_x);
      } else {
        const T carried = kept.a * h;
        kept.by_x = multiply_add(kept.slope, s, carried);
        return multiply_add(kept.b, s, carried);
      }
    }
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(real_t<T> /*delta_u*/,
                                                     const StepCache<T>& kept, T before,
                                                     T /*after*/, T /*B*/, T g) {
    const T carry = g * conj(kept.a);
    if constexpr (kTerms == 1) {
      return {carry, g, carry * conj(before)};
    } else if constexpr (kTerms == 2) {
      return {carry, multiply_add(g, conj(kept.v), g), g * conj(kept.by_x)};
    } else {
      return {carry, g * conj(kept.b), g * conj(kept.by_x)};
    }
  }
};

template <>
struct Formula<Method::kZoh> : TruncatedHold<1> {};
template <>
struct Formula<Method::kHighorder> : TruncatedHold<2> {};
template <>
struct Formula<Method::kPoly> : TruncatedHold<3> {};
template <>
struct Formula<Method::kRk4> : TruncatedHold<4> {};
template <>
struct Formula<Method::kSeries> : TruncatedHold<kAnyTerms> {};

}  // namespace selective_scan
