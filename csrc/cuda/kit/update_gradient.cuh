// The gradients of one state update.
#pragma once

#include "states.cuh"

namespace selective_scan::cuda {

/// The gradients of one update h = abar·h_before + bbar·B·u, given the gradient g of h.
template <class T>
struct UpdateGradient {
  T carry;  // of h_before
  T dA;
  T dB;
  real_t<T> ddelta;
  real_t<T> du;
};

template <Method kMethod, class T>
__device__ __forceinline__ UpdateGradient<T> backpropagate_update(real_t<T> delta, real_t<T> u,
                                                                  const Pole<T>& pole,
                                                                  const Coefficients<T>& value, T B,
                                                                  T h_before, T g) {
  using F = Formula<kMethod>;
  UpdateGradient<T> result;
  const T w = g * conj(B);  // dbbar = w·u
  result.carry = g * conj(value.abar);
  if constexpr (F::kAbarIsExponential) {
    // dabar/dΔ = A·abar and dabar/dA = Δ·abar share the factor abar, which carry already has.
    const T q = result.carry * conj(h_before);
    result.ddelta = real_of_product_conj(q, pole.A);
    result.dA = delta * q;
    if constexpr (F::kBbarDependsOnA) {
      const auto d = F::template derivatives<DeviceMath>(delta, pole, value);
      result.ddelta += u * real_of_product_conj(w, d.bbar_delta);
      result.dA += u * (w * conj(d.bbar_A));
    } else {
      result.ddelta += u * real(w);
    }
  } else {
    const auto d =
        backpropagate<kMethod, DeviceMath>(delta, pole, value, g * conj(h_before), u * w);
    result.ddelta = d.delta;
    result.dA = d.A;
  }
  if constexpr (F::kBbarDependsOnA) {
    result.du = real_of_product_conj(w, value.bbar);
    result.dB = u * (g * conj(value.bbar));
  } else {
    result.du = delta * real(w);
    result.dB = (delta * u) * g;
  }
  return result;
}

/// Returns the gradients of h = abar·h_before + gain·b·B, in which the gain is the input's own step
/// size times u. `du` is the gradient of the gain.
template <Method kMethod, class T>
__device__ __forceinline__ UpdateGradient<T> backpropagate_hold(real_t<T> delta, real_t<T> gain,
                                                                const Pole<T>& pole,
                                                                const Hold<T>& hold, T B,
                                                                T h_before, T g) {
  const T carry = g * conj(hold.a), input = g * conj(hold.b);
  const T dx = Formula<kMethod>::template gradient_of_x<DeviceMath>(
      delta, pole, hold, g * conj(h_before), carry * conj(h_before), gain * (g * conj(B)));
  return {carry, delta * dx, gain * input, real_of_product_conj(dx, pole.A),
          real_of_product_conj(input, B)};
}

}  // namespace selective_scan::cuda
