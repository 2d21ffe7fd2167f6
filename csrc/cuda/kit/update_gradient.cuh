// The gradients of one state update, and sums of a block of steps over the lanes of a channel.
#pragma once

#include "states.cuh"

namespace selective_scan::cuda {

/// Gradients of one update h = abar·h_before + bbar·B·u, given the gradient g of h.
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
    // dabar/dΔ = A·abar and dabar/dA = Δ·abar share the factor that the carry has already.
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

/// Those of h = abar·h_before + gain·b·B, where the gain is a step of the input's own times u; `du`
/// is that of the gain.
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

/// Adds values[j] over the lanes that share a channel. Afterwards a lane holds the sums of kHeld
/// steps from held_step() on: halving the values while doubling the lanes takes 3 shuffles for 4
/// values over 4 lanes.
template <int kHeld, class R>
__device__ __forceinline__ Pack<R, kHeld> sum_over_parts(const Pack<R, kBlockSteps>& values,
                                                         int part, int lane_bits) {
  static_assert(kBlockSteps == 4);
  if constexpr (kHeld == 4) {
    return values;
  } else {
    const bool upper = part & 1;
    Pack<R, 2> half;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const R keep = upper ? values.v[2 + j] : values.v[j];
      const R give = upper ? values.v[j] : values.v[2 + j];
      half.v[j] = keep + __shfl_xor_sync(kFullMask, give, part_bit_mask(0, lane_bits));
    }
    if constexpr (kHeld == 2) {
      return half;
    } else {
      const bool odd = part & 2;
      const R give = odd ? half.v[0] : half.v[1];
      R sum = odd ? half.v[1] : half.v[0];
      sum += __shfl_xor_sync(kFullMask, give, part_bit_mask(1, lane_bits));
#pragma unroll
      for (int bit = 2; bit < kWarpBits; ++bit) {
        if (bit >= lane_bits) break;
        sum += __shfl_xor_sync(kFullMask, sum, part_bit_mask(bit, lane_bits));
      }
      return {sum};
    }
  }
}

/// Calls f.operator()<kHeld>() with the steps of a block that each of so many lanes holds sums of.
template <class F>
__device__ __forceinline__ void with_held_steps(int lane_bits, const F& f) {
  if (lane_bits >= 2) {
    f.template operator()<1>();
  } else if (lane_bits == 1) {
    f.template operator()<2>();
  } else {
    f.template operator()<4>();
  }
}

/// Whether a lane holds sums that no other one has: beyond four lanes the others repeat them.
__device__ __forceinline__ bool holds_sums(int part) {
  return part < kBlockSteps;
}

/// The first step of a block whose sums a lane holds.
template <int kHeld>
__device__ __forceinline__ int held_step(int part) {
  return kHeld == 4 ? 0 : kHeld == 2 ? 2 * (part & 1) : 2 * (part & 1) + ((part >> 1) & 1);
}

}  // namespace selective_scan::cuda
