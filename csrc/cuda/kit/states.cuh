// Poles and states of a channel, and the effect of a step on them.
#pragma once

#include <limits>

#include "../../core/affine_map.h"
#include "../../core/discretization.h"
#include "elements.cuh"
#include "geometry.cuh"
#include "math.cuh"

namespace selective_scan::cuda {

/// Returns bbar·u. If bbar is Δ itself, the result is real even for complex states.
template <Method kMethod, class T>
__device__ __forceinline__ auto held_input(real_t<T> delta, real_t<T> u,
                                           const Coefficients<T>& value) {
  if constexpr (Formula<kMethod>::kBbarDependsOnA) {
    return u * value.bbar;
  } else {
    return delta * u;
  }
}

template <Method kMethod, class T>
__device__ __forceinline__ Coefficients<T> coefficients(real_t<T> delta, const Pole<T>& pole) {
  return Formula<kMethod>::template value<DeviceMath>(delta, pole);
}

/// Returns a state after a step.
template <Method kMethod, class T>
__device__ __forceinline__ T after_step(T h, real_t<T> delta, real_t<T> u, const Pole<T>& pole,
                                        T B) {
  const Coefficients<T> value = coefficients<kMethod>(delta, pole);
  return value.abar * h + held_input<kMethod>(delta, u, value) * B;
}

/// Returns a and b of a step, whatever the input's own step is.
template <Method kMethod, class T>
__device__ __forceinline__ Hold<T> hold_of(real_t<T> delta, const Pole<T>& pole) {
  return Formula<kMethod>::template hold<DeviceMath>(delta, pole);
}

/// Returns the state after a step whose input, E·u, has its own step size E.
template <Method kMethod, class T>
__device__ __forceinline__ T after_driven_step(T h, real_t<T> delta, real_t<T> input,
                                               const Pole<T>& pole, T B) {
  const Hold<T> hold = hold_of<kMethod>(delta, pole);
  return hold.a * h + input * (hold.b * B);
}

/// Re(a·b)
template <class R>
__device__ __forceinline__ R real_of_product(Complex<R> a, Complex<R> b) {
  return a.re * b.re - a.im * b.im;
}
template <class R>
__device__ __forceinline__ R real_of_product(R a, R b) {
  return a * b;
}

/// Complex states stand for themselves and their conjugates, so y = 2·Re Σ C·h.
template <class T>
constexpr int kOutputScale = is_complex_v<T> ? 2 : 1;

/// Loads the states of a lane's channel from a (batch, channel, state) array.
template <class T, int kStates>
__device__ Pack<T, kStates> load_channel_states(const ArrayView& view, const WorkItem& item,
                                                int64_t channel, bool exists, int first_state,
                                                int64_t dstate) {
  if (!exists || !view.present()) return Pack<T, kStates>{};
  return load_states<T, kStates>(view, item.batch * view.batch + channel * view.channel,
                                 first_state, dstate);
}

template <class T, int kStates>
__device__ void store_channel_states(const ArrayView& view, const WorkItem& item, int64_t channel,
                                     int first_state, int64_t dstate,
                                     const Pack<T, kStates>& states) {
  store_states(view, item.batch * view.batch + channel * view.channel, first_state, dstate, states);
}

template <class T, int kStates>
__device__ __forceinline__ Pack<T, kStates> ones() {
  Pack<T, kStates> result;
#pragma unroll
  for (int s = 0; s < kStates; ++s) result.v[s] = one<T>();
  return result;
}

/// Returns the factor that marks a segment which leaves its offset whatever enters it: NaN, because
/// a product with 0 would propagate entering values that are not finite. A segment whose factor is
/// NaN by computation also has a NaN offset.
template <class T, int kStates>
__device__ __forceinline__ Pack<T, kStates> no_factor() {
  Pack<T, kStates> factor;
#pragma unroll
  for (T& value : factor.v) value = T{std::numeric_limits<real_t<T>>::quiet_NaN()};
  return factor;
}

/// Returns the dynamic shared memory. With this function instead of a pointer that is passed
/// around, the compiler sees that accesses are to shared memory.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(16) char selective_scan_shared[];
  return selective_scan_shared;
}

/// Returns `value` as one that the compiler knows nothing about. Values derived from it in a loop
/// are computed there again; kept in registers, they would crowd out the scan.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace selective_scan::cuda
