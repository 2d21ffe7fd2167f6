// foh: the exact solution for an input held constant over the step, abar = exp(x) and bbar =
// Δ·φ1(x) with φ1(x) = (exp(x) − 1)/x.
#pragma once

#include "formula.h"

namespace selective_scan {

/// For |x|² below this, φ1(x) = 1 + x/2 and φ1'(x) = 1/2 + x/3 to full precision.
constexpr double kTinyNorm = 1e-18;

/// Returns φ1'(x)/φ1(x) = 1/2 + coth(x/2)/2 − 1/x = 1/2 + x·r(x²) for |x| < 1, by r's Taylor
/// series, in which each term is a fortieth of the one before. `norm` is |x|².
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
    // A polynomial with real coefficients takes two real multiplications per term, because y is a
    // root of y² = twice·y − square.
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

  /// Δ·φ1(x) = (exp(x) − 1)/A avoids a division per step. A policy may supply its own exact_hold,
  /// in which exp and expm1 share work.
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

  /// Computes φ1 as bbar/Δ, so that a policy's handling of a zero pole applies here too.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Hold<T> hold(real_t<T> delta, const Pole<T>& pole) {
    const Coefficients<T> step = value<Math>(delta, pole);
    const T x = delta * pole.A;
    const T limit = constant<T>(1) + constant<T>(0.5) * x;
    return {step.abar,
            select(norm(x) < constant<T>(kTinyNorm), limit, reciprocal(delta) * step.bbar)};
  }

  /// bbar = (abar − 1)/A, so its derivative by A is (Δ·abar − bbar)/A. That difference cancels for
  /// a small x; there a short series gives the derivative as a multiple of φ1 itself.
  template <class T>
  static SELECTIVE_SCAN_HD T bbar_by_A(real_t<T> delta, const Pole<T>& pole,
                                       const Coefficients<T>& value) {
    const T x = delta * pole.A;
    const real_t<T> square = norm(x);
    const T near = (delta * value.bbar) * phi1_logarithmic_derivative(x, square);
    const T away = (delta * value.abar - value.bbar) * pole.inverse;
    return select(square < constant<T>(1), near, away);
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>& value) {
    return {pole.A * value.abar, delta * value.abar, value.abar, bbar_by_A(delta, pole, value)};
  }

  /// a' = a and φ1' = (a − φ1)/x.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Slopes<T> slopes(real_t<T> delta, const Pole<T>& pole,
                                            const Hold<T>& hold) {
    const T x = delta * pole.A;
    const real_t<T> square = norm(x);
    const T near = hold.b * phi1_logarithmic_derivative(x, square);
    const T away = (hold.a - hold.b) * reciprocal(x);
    return {hold.a, select(square < constant<T>(1), near, away)};
  }

  /// The policy supplies exact_hold_constants(A) and exact_hold_step(Δ, constants).
  template <class Math, class T>
  using Constants = decltype(Math::exact_hold_constants(T{}));
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A, const Series<real_t<T>>& = {}) {
    return Math::exact_hold_constants(A);
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Step<T, T> step(real_t<T> delta, real_t<T> delta_u,
                                           const Constants<Math, T>& constants) {
    const auto value = Math::exact_hold_step(delta, constants);
    return {value.abar, delta_u * value.phi1};
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepCache<T> keep(real_t<T> delta, T A,
                                             const Constants<Math, T>& constants) {
    const auto value = Math::exact_hold_step(delta, constants);
    // For Δ = 0 the scan does not depend on φ1, but the gradient of Δ does.
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

/// abar and expm1 = abar − 1, each to full precision.
template <class T>
struct Growth {
  T abar;
  T expm1;
  bool is_small;  // expm1 is the more precise of the two

  /// Returns abar·H, the part of a state that a step keeps.
  SELECTIVE_SCAN_HD T stays(T H) const { return is_small ? multiply_add(expm1, H, H) : abar * H; }
};

/// A step of H = A·h; see ExactIncrements.
template <class T>
struct IncrementStep {
  Growth<T> growth;
  real_t<T> u;

  SELECTIVE_SCAN_HD T advance(T H, T B) const {
    return multiply_add(growth.expm1, u * B, growth.stays(H));
  }
};

/// The exact hold for scans of H = A·h. With e = exp(x) − 1,
///   H[t] = abar·H[t-1] + e·B·u
/// where abar·H is H + e·H for a small x, so that a long memory keeps its state exactly. From the
/// gradients g of h[t] and c = g·conj(abar) of h[t-1], both unscaled,
///   dΔ = Re Σ c·conj(H[t-1] + B·u)       dB = u·g·conj(e/A)       du = Re Σ g·conj(B·e/A)
///   conj(A)·dA = Σ Δ·c·conj(H[t-1]) + conj(B·u)·q                 q = g·conj(A·dbbar/dA)
/// where A·dbbar/dA = Δ·abar − e/A, which cancels for a small x: there it is Δ·e·φ1'(x)/φ1(x). This
/// form needs no φ1, but A must not be 0.
struct ExactIncrements {
  template <class T>
  struct StepCache {
    T growth;  // e
    T abar;
    T inverse;  // 1/A
  };
  /// Requires a policy that has growth(Δ, exact_hold_constants(A)).
  template <class Math, class T>
  static SELECTIVE_SCAN_HD IncrementStep<T> step(real_t<T> delta, real_t<T> u,
                                                 const ExactHold::Constants<Math, T>& constants) {
    return {Math::growth(delta, constants), u};
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T advance(real_t<T> delta, real_t<T> u,
                                     const ExactHold::Constants<Math, T>& constants, T H, T B,
                                     StepCache<T>& kept) {
    const IncrementStep<T> step = ExactIncrements::step<Math, T>(delta, u, constants);
    kept = {step.growth.expm1, step.growth.abar, constants.inverse};
    return step.advance(H, B);
  }
  /// `input` is u·B. The gradient of Δ is the real part of the result's `x`.
  template <class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(const StepCache<T>& kept, T H, T input, T g) {
    const T carry = g * conj(kept.abar);
    return {carry, (g * conj(kept.growth)) * conj(kept.inverse), carry * conj(H + input)};
  }
  /// Returns the term of conj(A)·dA for one step; `carry` is c.
  template <class T>
  static SELECTIVE_SCAN_HD T gradient_of_A(real_t<T> delta, T A, const StepCache<T>& kept, T H,
                                           T input, T g, T carry) {
    const T x = delta * A;
    const real_t<T> square = norm(x);
    const T growing = g * conj(kept.growth);
    const T delta_carry = delta * carry;
    const T near = (delta * growing) * conj(phi1_logarithmic_derivative(x, square));
    const T away = delta_carry - growing * conj(kept.inverse);
    const T q = select(square < constant<T>(1), near, away);
    return delta_carry * conj(H) + q * conj(input);
  }
};

}  // namespace selective_scan
