// Poles and states of a channel, and what a step does to them.
#pragma once

#include <limits>

#include "../../core/affine_map.h"
#include "../../core/discretization.h"
#include "elements.cuh"
#include "geometry.cuh"
#include "math.cuh"

namespace selective_scan::cuda {

/// bbar·u. A bbar that is Δ itself is real also where the states are complex.
template <Method kMethod, class T>
__device__ __forceinline__ auto held_input(real_t<T> delta, real_t<T> u,
                                           const Coefficients<T>& value) {
  if constexpr (Formula<kMethod>::kBbarDependsOnA) {
    return u * value.bbar;
  } else {
    return delta * u;
  }
}

/// Of real fp64 poles and steps with |Δ·A·log2(e)| ≤ PowerOfTwo::kNear, given that power of two.
struct BoundedMath : DeviceMath {
  static __device__ __forceinline__ double exp_of(double /*delta*/, const PowerOfTwo& power) {
    return power.near();
  }
  /// exp(x) and (exp(x) − 1)/A
  static __device__ __forceinline__ Coefficients<double> exact_hold(
      double delta, const Pole<double, PowerOfTwo>& pole) {
    const PowerOfTwo& power = pole.exponent;
    // For n = 0, which A = 0 has, f is Δ·A·log2(e).
    const double bbar =
        power.n == 0 ? delta * kLog2e * power.slope : power.near_less_one() * pole.inverse;
    return {power.near(), bbar};
  }
};

/// abar and bbar of poles and steps that BoundedMath serves.
template <Method kMethod, int kCount>
__device__ __forceinline__ void bounded_coefficients(const double (&deltas)[kCount],
                                                     const Pole<double> (&poles)[kCount],
                                                     Coefficients<double> (&values)[kCount]) {
  PowerOfTwo powers[kCount];
  powers_of_products(deltas, [&](int k) { return poles[k].exponent; }, powers);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    values[k] =
        Formula<kMethod>::template value<BoundedMath>(deltas[k], poles[k].with_exponent(powers[k]));
  }
}

/// Of those and, by functions for any number, all others.
template <Method kMethod>
__device__ __noinline__ Coefficients<double> fp64_coefficients(double delta, Pole<double> pole) {
  if (!(fabs(delta * pole.exponent) <= PowerOfTwo::kNear)) {
    return Formula<kMethod>::template value<DeviceMath>(delta, pole);
  }
  Coefficients<double> value[1];
  bounded_coefficients<kMethod>({delta}, {pole}, value);
  return value[0];
}

template <Method kMethod, class T>
__device__ __forceinline__ Coefficients<T> coefficients(real_t<T> delta, const Pole<T>& pole) {
  if constexpr (std::is_same_v<T, double> && Formula<kMethod>::kTakesPowers) {
    return fp64_coefficients<kMethod>(delta, pole);
  } else {
    return Formula<kMethod>::template value<DeviceMath>(delta, pole);
  }
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

template <class T, int kStates>
__device__ void load_poles(const ScanParams& params, int64_t channel, bool exists, int first_state,
                           Pole<T> (&poles)[kStates]) {
  Pack<T, kStates> A{};
  if (exists) {
    A = load_states<T, kStates>(params.A, channel * params.A.channel, first_state, params.dstate);
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) poles[s] = make_pole<DeviceMath>(A.v[s], params.method);
}

/// The states of a lane's channel in a (batch, channel, state) array.
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

/// The poles of a lane's states.
template <class T, int kStates>
struct Poles {
  Pole<T> v[kStates];

  __device__ const Pole<T>& operator[](int s) const { return v[s]; }
  __device__ void find_reach() {}
};
template <int kStates>
struct Poles<double, kStates> {
  Pole<double> v[kStates];
  float reach;  // as the high word of a double: up to which |Δ| BoundedMath serves all of them

  __device__ const Pole<double>& operator[](int s) const { return v[s]; }
  __device__ void find_reach() {
    double least = 1e300;  // whose high word, like those below, is a number in fp32, too
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const double exponent = fabs(v[s].exponent);
      const double limit = exponent >= 0 ? PowerOfTwo::kNear / exponent : -1.0;
      least = limit < least ? limit : least;
    }
    reach = high_word_of(least);
  }
  template <int kCount>
  __device__ __forceinline__ bool reach_all(const Pack<double, kCount>& delta) const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < kCount; ++j) all = all && fabsf(high_word_of(delta.v[j])) <= reach;
    return all;
  }

 private:
  static __device__ __forceinline__ float high_word_of(double x) {
    return __int_as_float(__double2hiint(x));
  }
};

/// abar and bbar of a block of steps: of step j and state s, v[j][s].
template <class T, int kStates>
struct BlockCoefficients {
  Coefficients<T> v[kBlockSteps][kStates];
};

template <Method kMethod, class T, int kStates>
__device__ __forceinline__ BlockCoefficients<T, kStates> block_coefficients(
    const Pack<real_t<T>, kBlockSteps>& delta, const Poles<T, kStates>& poles) {
  BlockCoefficients<T, kStates> values;
  if constexpr (std::is_same_v<T, double> && Formula<kMethod>::kTakesPowers) {
    constexpr int kCount = kBlockSteps * kStates;
    double deltas[kCount];
    Pole<double> all_poles[kCount];
    Coefficients<double> all_values[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      deltas[k] = delta.v[k / kStates];
      all_poles[k] = poles[k % kStates];
    }
    bounded_coefficients<kMethod>(deltas, all_poles, all_values);
    if (!poles.reach_all(delta)) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        all_values[k] = fp64_coefficients<kMethod>(deltas[k], all_poles[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) values.v[k / kStates][k % kStates] = all_values[k];
  } else {
#pragma unroll
    for (int j = 0; j < kBlockSteps; ++j) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        values.v[j][s] = coefficients<kMethod>(delta.v[j], poles[s]);
      }
    }
  }
  return values;
}

template <class T, int kStates>
__device__ Poles<T, kStates> lane_poles(const ScanParams& params, int64_t channel, bool exists,
                                        int first_state) {
  Poles<T, kStates> poles;
  load_poles<T>(params, channel, exists, first_state, poles.v);
  poles.find_reach();
  return poles;
}

template <class T, int kStates>
__device__ __forceinline__ Pack<T, kStates> ones() {
  Pack<T, kStates> result;
#pragma unroll
  for (int s = 0; s < kStates; ++s) result.v[s] = one<T>();
  return result;
}

/// What stands for the factor of a segment behind which its offset comes whatever enters it: a
/// product with 0 would let through what is not finite. A factor that is no number by itself has
/// such an offset, too.
template <class T, int kStates>
__device__ __forceinline__ Pack<T, kStates> no_factor() {
  Pack<T, kStates> factor;
#pragma unroll
  for (T& value : factor.v) value = T{std::numeric_limits<real_t<T>>::quiet_NaN()};
  return factor;
}

/// Dynamic shared memory. Going through this function rather than through a pointer that was passed
/// around lets the compiler see that an access is to shared memory.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(16) char selective_scan_shared[];
  return selective_scan_shared;
}

/// `value`, of which the compiler knows nothing. What derives from it inside a loop is computed
/// there again; kept in registers it would crowd out the scan.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace selective_scan::cuda
