// foh: the exact solution for an input held constant over the step, abar = exp(x) and bbar =
// Δ·φ1(x) with φ1(x) = (exp(x) − 1)/x.
#pragma once

#include "formula.h"

namespace selective_scan {

/// Below this |x|², φ1(x) = 1 + x/2 and φ1'(x) = 1/2 + x/3 to full precision.
constexpr double kTinyNorm = 1e-18;

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
  constexpr int kDegree = sizeof(scalar_t<T>) == 4 ? 3 : 9;
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

struct ExactHold : StepForms<ExactHold> {
  static constexpr bool kAbarIsExponential = true;
  static constexpr bool kHasIncrements = true;
  static constexpr bool kTakesPowers = true;

  /// Δ·φ1(x) = (exp(x) − 1)/A spares a division for every step. A policy may have an exact_hold of
  /// its own, where exp and expm1 share their work.
  template <class Math, class T, class Exponent>
  static SELECTIVE_SCAN_HD Coefficients<T> value(real_t<T> delta, const Pole<T, Exponent>& pole) {
    if constexpr (requires { Math::exact_hold(delta, pole); }) {
      return Math::exact_hold(delta, pole);
    } else {
      const T x = delta * pole.A;
      const auto is_tiny = norm(x) < constant<T>(kTinyNorm);
      const T limit = delta * (constant<T>(1) + constant<T>(0.5) * x);
      return {exp_of_product<Math>(delta, pole.exponent),
              select(is_tiny, limit, expm1<Math>(x) * pole.inverse)};
    }
  }

  /// bbar = (abar − 1)/A, so its derivative is (Δ·abar − bbar)/A, which cancels for a small x.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>& value) {
    const T x = delta * pole.A;
    const T near = (delta * delta) * phi1_derivative_series(x);
    const T away = (delta * value.abar - value.bbar) * pole.inverse;
    return {pole.A * value.abar, delta * value.abar, value.abar,
            select(norm(x) < constant<T>(1), near, away)};
  }

  /// φ1' = (a − φ1)/x cancels for a small x. There φ1 itself is a factor of a short series.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Slopes<T> slopes(real_t<T> delta, T A, const Hold<T>& hold) {
    const T x = delta * A;
    const real_t<T> square = norm(x);
    const T near = hold.b * phi1_logarithmic_derivative(x, square);
    const T away = (hold.a - hold.b) * reciprocal(x);
    return {hold.a, select(square < constant<T>(1), near, away)};
  }

  /// Of a policy that has exact_hold_constants(A) and exact_hold_step(Δ, constants), and may have
  /// exact_hold_step(Δ, Δ·u, constants).
  template <class Math, class T>
  using Constants = decltype(Math::exact_hold_constants(T{}));
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A, const Series<real_t<T>>& = {}) {
    return Math::exact_hold_constants(A);
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Step<T, T> step(real_t<T> delta, real_t<T> delta_u,
                                           const Constants<Math, T>& constants) {
    if constexpr (requires { Math::exact_hold_step(delta, delta_u, constants); }) {
      return Math::exact_hold_step(delta, delta_u, constants);
    } else {
      const auto value = Math::exact_hold_step(delta, constants);
      return {value.abar, delta_u * value.phi1};
    }
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepCache<T> keep(real_t<T> delta, T A,
                                             const Constants<Math, T>& constants) {
    const auto value = Math::exact_hold_step(delta, constants);
    // A scan does not mind what φ1 is where Δ = 0, but the gradient of Δ does.
    if constexpr (is_complex_v<T>) {
      const T phi1 = select(delta == constant<T>(0), one<T>(), value.phi1);
      return {{value.abar, phi1}, delta, A};
    } else {
      return {{value.abar, value.phi1}, delta, A};
    }
  }
};

template <>
struct Formula<Method::kFoh> : ExactHold {};

/// A step of H = A·h: see ExactIncrements.
template <class T>
struct IncrementStep {
  T growth;
  real_t<T> u;
};

/// The exact hold once more, for scans of H = A·h. With e = exp(x) − 1 and w = H[t-1] + B·u,
///   H[t] = H[t-1] + e·w
/// and from the gradients g of h[t] and g·conj(1 + e) of h[t-1], both unscaled,
///   dΔ = Re Σ g·conj((1 + e)·w)       dB = u·g·conj(e/A)       du = Re Σ g·conj(B·e/A)
///   conj(A)·dA = Σ Δ·g·conj((1 + e)·w) − dB·conj(B)
/// This takes no φ1 and no derivative of it, but A must not be 0. And where x is small, the last
/// two terms cancel to a part |x|/2 of each; where abar is, 1 + e is left with few digits. Whoever
/// goes with care has other forms for these.
struct ExactIncrements {
  template <class T>
  struct StepCache {
    T growth;  // e
    T w;
    T inverse;  // 1/A
  };
  template <class T>
  struct CarefulStepCache : StepCache<T> {
    T abar;
  };
  /// By a policy that has growth(Δ, exact_hold_constants(A)).
  template <class Math, class T>
  static SELECTIVE_SCAN_HD IncrementStep<T> step(real_t<T> delta, real_t<T> u,
                                                 const ExactHold::Constants<Math, T>& constants) {
    return {Math::growth(delta, constants), u};
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T advance(real_t<T> delta, real_t<T> u,
                                     const ExactHold::Constants<Math, T>& constants, T H, T B,
                                     StepCache<T>& kept) {
    kept = {Math::growth(delta, constants), H + u * B, constants.inverse};
    return multiply_add(kept.growth, kept.w, H);
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T advance(real_t<T> delta, real_t<T> u,
                                     const ExactHold::Constants<Math, T>& constants, T H, T B,
                                     CarefulStepCache<T>& kept) {
    kept.abar = Math::abar(delta, constants);
    return advance<Math, T>(delta, u, constants, H, B, static_cast<StepCache<T>&>(kept));
  }
  /// `x` is g·conj((1 + e)·w), by which the gradients of Δ and A go.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(const StepCache<T>& kept, T g) {
    const T growing = g * conj(kept.growth);
    return step_back(kept, growing, g + growing);
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(const CarefulStepCache<T>& kept, T g) {
    const T growing = g * conj(kept.growth);
    const auto is_spent = norm(kept.abar) < Math::kLittleAbar * Math::kLittleAbar;
    return step_back(kept, growing, select(is_spent, g * conj(kept.abar), g + growing));
  }

  /// What a step adds to conj(A)·dA, for a small x: g·conj(Δ·(1 + e)·H[t-1] + Δ·x·φ1'(x)·B·u).
  /// `carry` is the gradient of h[t-1].
  template <class T>
  static SELECTIVE_SCAN_HD T small_gradient_of_A(real_t<T> delta, real_t<T> u, T A, T H, T B, T g,
                                                 T carry) {
    const T x = delta * A;
    const T third = constant<T>(1.0 / 3) * one<T>() + constant<T>(1.0 / 8) * x;
    const T x_slope = x * (constant<T>(0.5) * one<T>() + x * third);
    return delta * (carry * conj(H) + (u * g) * conj(x_slope * B));
  }

 private:
  template <class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(const StepCache<T>& kept, T growing, T carry) {
    return {carry, growing * conj(kept.inverse), carry * conj(kept.w)};
  }
};

}  // namespace selective_scan
