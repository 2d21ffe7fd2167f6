// What a discretization is, and all that follows from it.
//
// With x = Δ·A a method is abar = a(x), bbar = Δ·b(x). Its formula has a value and its derivatives,
//
//   hold<Math>(Δ, pole)           a and b
//   slopes<Math>(Δ, pole, hold)   a' and b'
//
// and StepForms derives from these two every form in which a kernel takes a step or goes back
// through one. A formula that does one of them better, with fewer operations or without a
// cancellation, has a member of the same name, which hides the derived one.
#pragma once

#include "../complex.h"
#include "../config.h"
#include "../math.h"
#include "method.h"

namespace selective_scan {

/// b(x) = 1 + x/2 + square·x² + cube·x³, of a method that Method::kSeries stands for.
template <class R>
struct Series {
  R square;
  R cube;
};

template <class R>
SELECTIVE_SCAN_HD Series<R> series_of(Method method) {
  return {constant<R>(method == Method::kHighorder ? 0 : 1.0 / 6),
          constant<R>(method == Method::kRk4 ? 1.0 / 24 : 0)};
}

/// One entry of A with what depends on it alone, so that no kernel computes that for every step.
template <class T>
struct Pole {
  T A;
  T exponent;                  // Math::exponent(A)
  T inverse;                   // 1/A; not finite for A = 0
  Series<real_t<T>> series{};  // for Method::kSeries
};

template <class Math, class T>
SELECTIVE_SCAN_HD Pole<T> make_pole(T A) {
  return {A, Math::exponent(A), reciprocal(A)};
}
template <class Math, class T>
SELECTIVE_SCAN_HD Pole<T> make_pole(T A, Method method) {
  return {A, Math::exponent(A), reciprocal(A), series_of<real_t<T>>(method)};
}

/// a(x) and b(x). But for the one factor Δ of bbar, everything depends on Δ and A through x alone,
/// so the gradient of x serves both: dA = Δ·dx and, with w = g·conj(B),
///   dΔ = Re Σ (dx·conj(A) + u·w·conj(b))        du = Δ·Re Σ w·conj(b)
/// Where the input has a step E of its own, bbar = E·b(x): then dΔ is Re Σ dx·conj(A) alone, and
///   dE = u·Re Σ w·conj(b)                       du = E·Re Σ w·conj(b)
template <class T>
struct Hold {
  T a;
  T b;
};

/// a'(x) and b'(x).
template <class T>
struct Slopes {
  T a;
  T b;
};

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

/// A step for a scan that has Δ·u at hand: h[t] = abar·h[t-1] + input·B. The input is real where
/// bbar is Δ itself.
template <class T, class Input>
struct Step {
  T abar;
  Input input;
};

/// Gradients from g, that of h[t], for scans that have B and the states on both sides of a step at
/// hand; the last two divided by Formula::kInputScale and kXScale.
template <class T>
struct StepGradient {
  T state;  // of h[t-1]
  T input;  // g·conj(b): Δ·u times it is the gradient of B, Re Σ input·conj(B) that of Δ·u
  T x;      // of x = Δ·A
};

/// The base of formula F.
template <class F>
struct StepForms {
  /// Whether a(x) = exp(x): then a' = a, and abar over several steps is that of the sum of them.
  static constexpr bool kAbarIsExponential = false;
  /// Whether bbar is anything but Δ itself.
  static constexpr bool kBbarDependsOnA = true;
  /// Whether abar is Math::exp_at(Δ, constants.rate), and keep_with() makes the rest of a step for
  /// whoever has abar.
  static constexpr bool kAbarIsByRate = false;
  /// Whether scans may go by ExactIncrements.
  static constexpr bool kHasIncrements = false;

  // These are for scans that take each step from Δ, A and u.

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Coefficients<T> value(real_t<T> delta, const Pole<T>& pole) {
    const Hold<T> hold = F::template hold<Math>(delta, pole);
    return {hold.a, delta * hold.b};
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD Derivatives<T> derivatives(real_t<T> delta, const Pole<T>& pole,
                                                      const Coefficients<T>& /*value*/) {
    const Hold<T> hold = F::template hold<Math>(delta, pole);
    const Slopes<T> slopes = F::template slopes<Math>(delta, pole, hold);
    return {pole.A * slopes.a, delta * slopes.a, hold.b + (delta * pole.A) * slopes.b,
            (delta * delta) * slopes.b};
  }

  /// The gradient of x from those of a and b; da·conj(a) is what a scan needs anyway.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T gradient_of_x(real_t<T> delta, const Pole<T>& pole,
                                           const Hold<T>& hold, T da, T da_conj_a, T db) {
    const Slopes<T> slopes = F::template slopes<Math>(delta, pole, hold);
    T dx = da_conj_a;
    if constexpr (!F::kAbarIsExponential) dx = da * conj(slopes.a);
    if constexpr (F::kBbarDependsOnA) dx = dx + db * conj(slopes.b);
    return dx;
  }

  // These are for scans that prepare a pole once and have Δ·u at hand.

  template <class Math, class T>
  using Constants = Pole<T>;
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Pole<T> constants(T A, const Series<real_t<T>>& = {}) {
    return make_pole<Math>(A);
  }
  template <class Math, class T>
  static SELECTIVE_SCAN_HD Step<T, T> step(real_t<T> delta, real_t<T> delta_u,
                                           const Pole<T>& constants) {
    const Hold<T> hold = F::template hold<Math>(delta, constants);
    return {hold.a, delta_u * hold.b};
  }

  // To go forth and back through steps:
  //   keep<Math>(Δ, kPoleScale·A, constants), advance(kept, kInputScale·Δ·u, h[t-1], B) and
  //   step_back<Math>(Δ·u, kept, h[t-1], h[t], B, g)

  static constexpr double kInputScale = 1;
  static constexpr double kPoleScale = 1;
  static constexpr double kXScale = 1;

  /// What a step is made of.
  template <class T>
  struct StepCache {
    Hold<T> hold;
    real_t<T> delta;
    T A;
  };
  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepCache<T> keep(real_t<T> delta, T /*scaled_A*/,
                                             const Pole<T>& constants) {
    return {F::template hold<Math>(delta, constants), delta, constants.A};
  }

  template <class T>
  static SELECTIVE_SCAN_HD T advance(const StepCache<T>& kept, real_t<T> delta_u, T h, T B) {
    return kept.hold.a * h + delta_u * (kept.hold.b * B);
  }

  template <class Math, class T>
  static SELECTIVE_SCAN_HD StepGradient<T> step_back(real_t<T> delta_u, const StepCache<T>& kept,
                                                     T before, T /*after*/, T B, T g) {
    const T carry = g * conj(kept.hold.a);
    return {
        carry, g * conj(kept.hold.b),
        F::template gradient_of_x<Math>(kept.delta, Pole<T>{kept.A}, kept.hold, g * conj(before),
                                        carry * conj(before), delta_u * (g * conj(B)))};
  }
};

/// The formula of a method.
template <Method kMethod>
struct Formula;

/// Gradients of the step and the pole, from those of abar and bbar (conjugate Wirtinger derivatives
/// where complex, as PyTorch has them).
template <class T>
struct DiscretizationGradient {
  real_t<T> delta;
  T A;
};

template <Method kMethod, class Math, class T>
SELECTIVE_SCAN_HD DiscretizationGradient<T> backpropagate(real_t<T> delta, const Pole<T>& pole,
                                                          const Coefficients<T>& value, T dabar,
                                                          T dbbar) {
  using F = Formula<kMethod>;
  const Derivatives<T> d = F::template derivatives<Math>(delta, pole, value);
  DiscretizationGradient<T> gradient{real_of_product_conj(dabar, d.abar_delta),
                                     dabar * conj(d.abar_A)};
  if constexpr (F::kBbarDependsOnA) {
    gradient.delta = gradient.delta + real_of_product_conj(dbbar, d.bbar_delta);
    gradient.A = gradient.A + dbbar * conj(d.bbar_A);
  } else {
    gradient.delta = gradient.delta + real(dbbar);  // bbar = Δ
  }
  return gradient;
}

}  // namespace selective_scan
