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

/// A step for a scan that has Δ·u at hand: h[t] = abar·h[t-1] + input·B. The input is real where
/// bbar is Δ itself.
template <class T, class Input>
struct Step {
  T abar;
  Input input;
};

/// A step of H = A·h: see ExactIncrements.
template <class T>
struct IncrementStep {
  T growth;
  real_t<T> u;
};

/// A step h[t] = r·(h[t-1] + input·B) − h[t-1].
template <class T>
struct ReflectedStep {
  T r;
  real_t<T> input;
};

/// Gradients from g, that of h[t], for scans that have B and the states on both sides of a step at
/// hand; the last two divided by Formula::kInputScale and kXScale.
template <class T>
struct StepBack {
  T state;  // of h[t-1]
  T input;  // g·conj(b): Δ·u times it is the gradient of B, Re Σ input·conj(B) that of Δ·u
  T x;      // of x = Δ·A
};

/// What exp(Δ·A) needs of A, for a policy that has rate(A) and exp_at(Δ, rate).
template <class Math, class T>
using rate_t = decltype(Math::rate(T{}));

/// Partial derivatives of abar and bbar.
template <class T>
struct Derivatives {
  T abar_delta;
  T abar_A;
  T bbar_delta;
  T bbar_A;
};

/// The same by x = Δ·A: abar = a(x), bbar = Δ·b(x). But for that one factor Δ, everything depends
/// on Δ and A through x alone, so the gradient of x serves both: dA = Δ·dx and, with w = g·conj(B),
///   dΔ = Re Σ (dx·conj(A) + u·w·conj(b))        du = Δ·Re Σ w·conj(b)
template <class T>
struct Hold {
  T a;
  T b;
};

/// exp(x) with the input held by the first kTerms terms of φ1: b(x) = Σ_{k<kTerms} x^k/(k+1)!
template <int kTerms>
struct TruncatedHold {
  static constexpr bool kAbarIsExponential = true;
  static constexpr bool kBbarDependsOnA = kTerms > 1;

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Hold<T> hold(real_t<T> delta, const Pole<T>& pole) {
    const T x = delta * pole.A;
    double factorial = 1;
    for (int k = 2; k <= kTerms; ++k) factorial *= k;
    T b = constant<T>(1 / factorial) * one<T>();
    for (int k = kTerms; k > 1; --k) {
      factorial /= k;
      b = constant<T>(1 / factorial) + x * b;
    }
    return {Math::exp_of(delta * pole.exponent), b};
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Coefficients<T> value(real_t<T> delta, const Pole<T>& pole) {
    const Hold<T> factors = hold<Math>(delta, pole);
    return {factors.a, delta * factors.b};
  }

  /// b is a polynomial of Δ, with coefficients A^k/(k+1)! for k > 0.
  template <class Math, class T>
  struct Constants {
    rate_t<Math, T> rate;
    T coefficients[kTerms > 1 ? kTerms - 1 : 1];
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A) {
    Constants<Math, T> result{Math::rate(A), {}};
    T power = one<T>();
    double factorial = 1;
    for (int k = 1; k < kTerms; ++k) {
      power = power * A;
      factorial *= k + 1;
      result.coefficients[k - 1] = constant<T>(1 / factorial) * power;
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
      T sum = constants.coefficients[kTerms - 2];
      for (int k = kTerms - 3; k >= 0; --k) sum = constants.coefficients[k] + delta * sum;
      return Step<T, T>{abar, delta_u + (delta * delta_u) * sum};
    }
  }

  /// What a step is made of. With k = kInputScale and s = k·Δ·u·B,
  ///   h[t] = a·h[t-1] + s·b/k        its derivative by x is a·h[t-1] + s·b'/k
  /// b/k and b'/k take few operations where they are polynomials of the right v:
  ///   b                        k    v          b/k                          b'/k
  ///   1 + x/2                  1/2  1 + x      1 + v                        1
  ///   1 + x/2 + x²/6           2/3  3/4 + x/2  v² + 15/16                   v
  ///   1 + x/2 + x²/6 + x³/24   9/8  4/9 + x/3  v·(v² + 20/27) + 344/729     v² + 20/81
  template <class T>
  struct Kept {
    T a;
    T v;
    T b;      // divided by k
    T slope;  // b'/k
    T by_x;   // the derivative of h[t] by x
  };
  static constexpr double kInputScale = kTerms == 1   ? 1
                                        : kTerms == 2 ? 0.5
                                        : kTerms == 3 ? 2.0 / 3
                                                      : 9.0 / 8;
  static constexpr double kPoleScale = kTerms == 3 ? 0.5 : kTerms == 4 ? 1.0 / 3 : 1;
  static constexpr double kXScale = 1;
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Kept<T> keep(real_t<T> delta, T scaled_A,
                                        const Constants<Math, T>& constants) {
    return keep_with(Math::exp_at(delta, constants.rate), delta, scaled_A);
  }
  /// Where abar is known.
  template <class T>
  static SELECTIVE_SCAN_HD Kept<T> keep_with(T a, real_t<T> delta, T scaled_A) {
    if constexpr (kTerms == 1) {
      return {a, {}, {}, {}, {}};
    } else if constexpr (kTerms == 2) {
      return {a, constant<T>(1) + delta * scaled_A, {}, {}, {}};
    } else if constexpr (kTerms == 3) {
      const T v = constant<T>(0.75) + delta * scaled_A;
      return {a, v, multiply_add(v, v, constant<T>(15.0 / 16) * one<T>()), v, {}};
    } else {
      static_assert(kTerms == 4);
      const T v = constant<T>(4.0 / 9) + delta * scaled_A;
      const T slope = multiply_add(v, v, constant<T>(20.0 / 81) * one<T>());
      const T factor = constant<T>(40.0 / 81) + slope;
      return {a, v, multiply_add(v, factor, constant<T>(344.0 / 729) * one<T>()), slope, {}};
    }
  }

  template <class T>
  static SELECTIVE_SCAN_HD T advance(Kept<T>& kept, real_t<T> input, T h, T B) {
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
  static SELECTIVE_SCAN_HD StepBack<T> step_back(real_t<T> /*delta_u*/, const Kept<T>& kept,
                                                 T before, T /*after*/, T /*B*/, T g) {
    const T carry = g * conj(kept.a);
    if constexpr (kTerms == 1) {
      return {carry, g, carry * conj(before)};
    } else if constexpr (kTerms == 2) {
      return {carry, multiply_add(g, conj(kept.v), g), g * conj(kept.by_x)};
    } else {
      return {carry, g * conj(kept.b), g * conj(kept.by_x)};
    }
  }

  /// From the gradients of a and b. a' = a, so that da·conj(a), which a scan needs anyway, will do.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T gradient_of_x(real_t<T> delta, T A, const Hold<T>&, T /*da*/,
                                           T da_conj_a, T db) {
    if constexpr (kTerms == 1) {
      return da_conj_a;
    } else {
      return da_conj_a + db * conj(slope_terms<1, kTerms>(delta * A));
    }
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

 private:
  /// Σ_{kFirst ≤ k < kEnd} k·x^(k-kFirst)/(k+1)!
  template <int kFirst, int kEnd, class T>
  static SELECTIVE_SCAN_HD T slope_terms(T x) {
    constexpr double kCoefficient = kFirst / factorial(kFirst + 1);
    if constexpr (kFirst + 1 == kEnd) {
      return constant<T>(kCoefficient) * one<T>();
    } else {
      return constant<T>(kCoefficient) + x * slope_terms<kFirst + 1, kEnd>(x);
    }
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

  /// Of a policy that has exact_hold_constants(A) and exact_hold_step(Δ, constants), and may have
  /// exact_hold_step(Δ, Δ·u, constants).
  template <class Math, class T>
  using Constants = decltype(Math::exact_hold_constants(T{}));
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A) {
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
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>& value) {
    // bbar = (abar − 1)/A, so its derivative is (Δ·abar − bbar)/A, which cancels for a small x.
    const T x = delta * pole.A;
    const T near = (delta * delta) * phi1_derivative_series(x);
    const T away = (delta * value.abar - value.bbar) * pole.inverse;
    return {pole.A * value.abar, delta * value.abar, value.abar,
            select(norm(x) < constant<T>(1), near, away)};
  }

  template <class T>
  struct Kept {
    Hold<T> hold;
    real_t<T> delta;
    T A;
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Kept<T> keep(real_t<T> delta, T A, const Constants<Math, T>& constants) {
    const auto value = Math::exact_hold_step(delta, constants);
    // A scan does not mind what φ1 is where Δ = 0, but the gradient of Δ does.
    if constexpr (is_complex_v<T>) {
      const T phi1 = select(delta == constant<T>(0), one<T>(), value.phi1);
      return {{value.abar, phi1}, delta, A};
    } else {
      return {{value.abar, value.phi1}, delta, A};
    }
  }

  template <class T>
  static SELECTIVE_SCAN_HD T advance(const Kept<T>& kept, real_t<T> delta_u, T h, T B) {
    return kept.hold.a * h + delta_u * (kept.hold.b * B);
  }

  static constexpr double kInputScale = 1;
  static constexpr double kPoleScale = 1;
  static constexpr double kXScale = 1;
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepBack<T> step_back(real_t<T> delta_u, const Kept<T>& kept, T before,
                                                 T /*after*/, T B, T g) {
    const T carry = g * conj(kept.hold.a);
    return {carry, g * conj(kept.hold.b),
            gradient_of_x<Math>(kept.delta, kept.A, kept.hold, T{}, carry * conj(before),
                                delta_u * (g * conj(B)))};
  }

  /// φ1' = (a − φ1)/x cancels for a small x. There φ1 itself is a factor of a short series.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T gradient_of_x(real_t<T> delta, T A, const Hold<T>& value, T /*da*/,
                                           T da_conj_a, T db) {
    const T x = delta * A;
    const real_t<T> square = norm(x);
    const T near = value.b * phi1_logarithmic_derivative(x, square);
    const T away = (value.a - value.b) * reciprocal(x);
    return da_conj_a + db * conj(select(square < constant<T>(1), near, away));
  }
};

/// The exact hold once more, for scans of H = A·h. With e = exp(x) − 1 and w = H[t-1] + B·u,
///   H[t] = H[t-1] + e·w
/// and from the gradients g of h[t] and g·conj(1 + e) of h[t-1], both unscaled,
///   dΔ = Re Σ g·conj((1 + e)·w)       dB = u·g·conj(e/A)       du = Re Σ g·conj(B·e/A)
///   conj(A)·dA = Σ Δ·g·conj((1 + e)·w) − dB·conj(B)
/// This takes no φ1 and no derivative of it. But where x is small, the last two terms cancel to a
/// part |x|/2 of each, and A must not be 0.
struct ExactIncrements {
  template <class T>
  struct Kept {
    T growth;  // e
    T w;
    T inverse;  // 1/A
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
                                     Kept<T>& kept) {
    kept = {Math::growth(delta, constants), H + u * B, constants.inverse};
    return multiply_add(kept.growth, kept.w, H);
  }
  /// Of h instead, for scans that may take another form at any step: w, and with it the `x` of
  /// step_back, is divided by A. Then
  ///   dΔ = Re Σ x·conj(A)       dA = Σ Δ·x − dB·conj(B/A)
  template <class T>
  static SELECTIVE_SCAN_HD T advance_state(T growth, real_t<T> u, T inverse, T h, T B,
                                           Kept<T>& kept) {
    kept = {growth, multiply_add(u * inverse, B, h), inverse};
    return multiply_add(growth, kept.w, h);
  }

  /// `x` is g·conj((1 + e)·w), by which the gradients of Δ and A go.
  template <class T>
  static SELECTIVE_SCAN_HD StepBack<T> step_back(const Kept<T>& kept, T g) {
    const T growing = g * conj(kept.growth);
    const T carry = g + growing;
    return {carry, growing * conj(kept.inverse), carry * conj(kept.w)};
  }
};

/// Tustin's rule. For A = −A it is the form that some print, (1 − x/2)/(1 + x/2).
struct Tustin {
  static constexpr bool kAbarIsExponential = false;
  static constexpr bool kBbarDependsOnA = true;

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Hold<T> hold(real_t<T> delta, const Pole<T>& pole) {
    const T half = (constant<T>(0.5) * delta) * pole.A;
    const T r = reciprocal(constant<T>(1) - half);
    return {(constant<T>(1) + half) * r, r};
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Coefficients<T> value(real_t<T> delta, const Pole<T>& pole) {
    const Hold<T> factors = hold<Math>(delta, pole);
    return {factors.a, delta * factors.b};
  }

  /// With r = 2/(1 − x/2), a = r − 1 and b = r/2: h[t] = r·(h[t-1] + Δ·u/2·B) − h[t-1].
  template <class Math, class T>
  struct Constants {
    T quarter;  // A/4
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Constants<Math, T> constants(T A) {
    return {constant<T>(0.25) * A};
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD ReflectedStep<T> step(real_t<T> delta, real_t<T> delta_u,
                                                 const Constants<Math, T>& constants) {
    return {reciprocal(constant<T>(0.5) - delta * constants.quarter), constant<T>(0.5) * delta_u};
  }

  template <class T>
  struct Kept {
    T r;
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Kept<T> keep(real_t<T> delta, T /*A*/,
                                        const Constants<Math, T>& constants) {
    return {step<Math, T>(delta, delta, constants).r};
  }

  template <class T>
  static SELECTIVE_SCAN_HD T advance(const Kept<T>& kept, real_t<T> input, T h, T B) {
    return multiply_add(kept.r, h + input * B, -h);
  }

  /// dr/dx = r²/4, and r·(h[t-1] + Δ·u/2·B) = h[t] + h[t-1].
  static constexpr double kInputScale = 0.5;
  static constexpr double kPoleScale = 1;
  static constexpr double kXScale = 0.25;
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepBack<T> step_back(real_t<T> /*delta_u*/, const Kept<T>& kept,
                                                 T before, T after, T /*B*/, T g) {
    const T through_r = g * conj(kept.r);
    return {through_r - g, through_r, through_r * conj(before + after)};
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

  /// a' = b², b' = b²/2.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T gradient_of_x(real_t<T>, T /*A*/, const Hold<T>& value, T da,
                                           T /*da_conj_a*/, T db) {
    return (da + constant<T>(0.5) * db) * conj(value.b * value.b);
  }
};

/// The formula of a method: value<Math>(Δ, pole) and derivatives<Math>(Δ, pole, value); where that
/// is no more work, hold<Math>(Δ, pole) too; and for scans that prepare more, constants<Math>(A),
/// step<Math>(Δ, Δ·u, constants), and to go back through steps
/// keep<Math>(Δ, kPoleScale·A, constants), advance(kept, kInputScale·Δ·u, h[t-1], B) and
/// step_back<Math>(Δ·u, kept, h[t-1], h[t], B, g).
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
