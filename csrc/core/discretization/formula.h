// The definition of a discretization and the step forms derived from it.
//
// With x = Δ·A a method has abar = a(x) and bbar = Δ·b(x). Its formula supplies a and b and their
// derivatives,
//
//   hold<Math>(Δ, pole)           a and b
//   slopes<Math>(Δ, pole, hold)   a' and b'
//
// from which StepForms derives every form in which a kernel takes a step or goes back through one.
// A formula that computes one of these forms better, with fewer operations or without cancellation,
// defines a member of the same name, which hides the derived one.
#pragma once

#include "../complex.h"
#include "../config.h"
#include "../math.h"
#include "method.h"

namespace selective_scan {

/// b(x) = 1 + x/2 + square·x² + cube·x³, for the methods that Method::kSeries stands for.
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

/// One entry of A and the values that depend on it alone, so that no kernel recomputes them each
/// step.
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

/// a(x) and b(x). Apart from the factor Δ of bbar, everything depends on Δ and A through x alone,
/// so the gradient of x serves both: dA = Δ·dx and, with w = g·conj(B),
///   dΔ = Re Σ (dx·conj(A) + u·w·conj(b))        du = Δ·Re Σ w·conj(b)
/// If the input has its own step E, bbar = E·b(x). Then dΔ is Re Σ dx·conj(A) alone, and
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

/// A step for a scan that already has Δ·u: h[t] = abar·h[t-1] + input·B. The input is real if bbar
/// is Δ itself.
template <class T, class Input>
struct Step {
  T abar;
  Input input;
};

/// Gradients computed from g, the gradient of h[t], for scans that already have B and the states
/// before and after a step. `input` is divided by Formula::kInputScale, `x` by kXScale.
template <class T>
struct StepGradient {
  T state;  // of h[t-1]
  T input;  // g·conj(b): Δ·u·input is the gradient of B, Re Σ input·conj(B) that of Δ·u
  T x;      // of x = Δ·A
};

/// The base class of formula F.
template <class F>
struct StepForms {
  /// True if a(x) = exp(x). Then a' = a, and the product of abar over several steps is abar of the
  /// sum of their Δ.
  static constexpr bool kAbarIsExponential = false;
  /// True unless bbar is Δ itself.
  static constexpr bool kBbarDependsOnA = true;
  /// True if abar is Math::exp_at(Δ, constants.rate) and keep_with() computes the rest of a step
  /// from a given abar.
  static constexpr bool kAbarIsByRate = false;
  /// True if scans may use ExactIncrements.
  static constexpr bool kHasIncrements = false;

  // For scans that compute each step from Δ, A and u.

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

  /// Returns the gradient of x from those of a and b. The caller passes da·conj(a), since a scan
  /// needs it anyway.
  template <class Math, class T>
  static SELECTIVE_SCAN_HD T gradient_of_x(real_t<T> delta, const Pole<T>& pole,
                                           const Hold<T>& hold, T da, T da_conj_a, T db) {
    const Slopes<T> slopes = F::template slopes<Math>(delta, pole, hold);
    T dx = da_conj_a;
    if constexpr (!F::kAbarIsExponential) dx = da * conj(slopes.a);
    if constexpr (F::kBbarDependsOnA) dx = dx + db * conj(slopes.b);
    return dx;
  }

  // For scans that prepare each pole once and already have Δ·u.

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

  // For scans that go forward and then back through steps:
  //   keep<Math>(Δ, kPoleScale·A, constants), advance(kept, kInputScale·Δ·u, h[t-1], B) and
  //   step_back<Math>(Δ·u, kept, h[t-1], h[t], B, g)

  static constexpr double kInputScale = 1;
  static constexpr double kPoleScale = 1;
  static constexpr double kXScale = 1;

  /// The values that a scan keeps of a step.
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

/// Gradients of the step and the pole, computed from those of abar and bbar (conjugate Wirtinger
/// derivatives if complex, as in PyTorch).
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
