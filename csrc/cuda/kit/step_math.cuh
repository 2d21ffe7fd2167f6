// Elementary functions for the streamed kernels: prepared from the pole, with few instructions per
// state update and without branches.
#pragma once

#include "../../core/discretization.h"
#include "../../core/dtype.h"
#include "config.h"
#include "math.cuh"

namespace selective_scan::cuda {

/// A math policy for Formula::step() and for the backward sweep through steps, for results of kSize
/// bytes. kShort: for states that are carried no further than a chunk.
template <int kSize, bool kShort = false>
struct ScanMathFor : DeviceMath {
  /// Angles are reduced in units of π. A·(1/π) is kept to twice the digits of fp32 because its
  /// error adds up over a long memory. For 2-byte results the low part is not applied: their
  /// rounding hides the error.
  struct ComplexRate {
    float log2_modulus;
    float angle;
    float angle_low;
  };
  /// For sine and cosine by the special-function unit: their error is up to 3e-7, on average −1e-7.
  struct ShortRate {
    float log2_modulus;
    float angle;
  };

  static __device__ __forceinline__ float rate(float A) { return DeviceMath::exponent(A); }
  static __device__ __forceinline__ auto rate(Complex<float> A) {
    if constexpr (kShort && kSize == 2) {
      return ShortRate{A.re * static_cast<float>(kLog2e), A.im};
    } else {
      return turn_rate(A);
    }
  }
  static __device__ __forceinline__ ComplexRate turn_rate(Complex<float> A) {
    constexpr float kInverse = 0.318309873f;
    constexpr float kInverseLow = 1.28412765e-8f;  // 1/π = kInverse + kInverseLow
    const float angle = A.im * kInverse;
    const float low = fmaf(A.im, kInverse, -angle) + A.im * kInverseLow;
    return {A.re * static_cast<float>(kLog2e), angle, low};
  }

  static __device__ __forceinline__ float exp_at(float delta, float rate) {
    return exp_of(delta * rate);
  }

  /// exp(iπr), |r| ≤ 1/2, for an angle reduced by n half turns. The parity of n, the lowest bit of
  /// `half_turns`, is a sign. Half the angle takes fewer terms, and gives 1 − cos with all its
  /// digits: cos πr = 1 − sine² and sin πr = sine·cosine.
  struct HalfAngle {
    float half_turns;  // plus kShift
    float sine;        // √2·sin(πr/2)
    float cosine;      // √2·cos(πr/2)

    static constexpr float kShift = 12582912.0f;  // 1.5·2^23
    __device__ __forceinline__ float with_sign(float x) const {
      // The sum, like an xor, flips the highest bit, and is one instruction with the shift.
      return bit_cast<float>(bit_cast<uint32_t>(x) + (bit_cast<uint32_t>(half_turns) << 31));
    }
  };
  /// Reduces the angle of exp(Δ·A). The polynomials are Remez's, to 3e-9 and 5e-8; the latter error
  /// vanishes with the angle.
  static __device__ __forceinline__ HalfAngle turn_at(float delta, const ComplexRate& rate) {
    HalfAngle turn;
    turn.half_turns = fmaf(delta, rate.angle, HalfAngle::kShift);
    const float n = turn.half_turns - HalfAngle::kShift;
    float r = fmaf(delta, rate.angle, -n);
    if constexpr (kSize == 4) r = fmaf(delta, rate.angle_low, r);
    const float r2 = r * r;
    float sine = fmaf(r2, -0.00650772700189f, 0.112684583008f);
    sine = fmaf(r2, sine, -0.913530286263f);
    turn.sine = fmaf(r2, sine, 2.22144146189f) * r;
    float cosine = fmaf(r2, -0.0289000751502f, 0.358658780899f);
    cosine = fmaf(r2, cosine, -1.74471288107f);
    turn.cosine = fmaf(r2, cosine, 1.41421356237f);
    return turn;
  }
  static __device__ __forceinline__ Complex<float> exp_at(float delta, const ShortRate& rate) {
    const float modulus = balanced_exp2(delta * rate.log2_modulus);
    const float angle = delta * rate.angle;
    return {modulus * __cosf(angle), modulus * __sinf(angle)};
  }
  static __device__ __forceinline__ Complex<float> exp_at(float delta, const ComplexRate& rate) {
    const HalfAngle turn = turn_at(delta, rate);
    const float modulus = turn.with_sign(balanced_exp2(delta * rate.log2_modulus));
    const float sine = modulus * turn.sine;
    return {fmaf(-sine, turn.sine, modulus), sine * turn.cosine};
  }

  // The exact hold: abar = exp(x) and φ1 = (exp(x) − 1)/x.

  template <class T>
  struct ExactHoldStep {
    T abar;
    T phi1;
  };

  /// Returns 1/Δ, which the states of a step share. For Δ = 0 any number will do.
  static __device__ __forceinline__ float step_inverse(float delta) {
    return reciprocal(delta == 0.0f ? 1.0f : delta);
  }
  /// A pole this small acts as 0 on every fp32 number.
  static constexpr float kTinyPole = 1e-15f;

  /// Returns whether 2^y − 1 cancels.
  static __device__ __forceinline__ bool is_small_growth(float y) { return fabsf(y) < 0.17f; }
  /// Returns 2^y − 1 from `power`, which is 2^y to a rounding error. If the difference cancels, it
  /// uses a polynomial instead (Remez, relative error 2e-7).
  static __device__ __forceinline__ float growth_of(float y, float power) {
    float series = fmaf(y, 0.00961812944339f, 0.055542640542f);
    series = fmaf(y, series, 0.240226587349f);
    series = fmaf(y, series, 0.693147041508f);
    return is_small_growth(y) ? y * series : power - 1.0f;
  }

  /// Returns a pole that has an inverse and acts like A on every fp32 number.
  static __device__ __forceinline__ float invertible(float A) {
    constexpr float kHuge = 1 / kTinyPole;
    if (fabsf(A) < kTinyPole) return kTinyPole;
    return A < -kHuge ? -kHuge : A > kHuge ? kHuge : A;
  }

  struct RealHold {
    float half_rate;
    float A;
    float inverse;  // 1/A, or 0 if it does not exist
  };
  static __device__ __forceinline__ RealHold exact_hold_constants(float A) {
    return {rate(0.5f * A), A, fabsf(A) < kTinyPole ? 0.0f : 1.0f / A};
  }

  /// With g = exp(x/2), abar = g² and φ1 = g·sinh(x/2)/(x/2), an even series that does not cancel
  /// near 0. The coefficients of x², x⁴ and x⁶ are by Remez, to 2.4e-8 for |x| < kSmall.
  static constexpr float kSmall = 2.0f;
  static constexpr float kSeries2 = 0.041666790055768836f;
  static constexpr float kSeries4 = 0.0005206427324291659f;
  static constexpr float kSeries6 = 3.1831553696582425e-06f;

  static __device__ __forceinline__ ExactHoldStep<float> exact_hold_step(float delta,
                                                                         const RealHold& hold) {
    const float g = exp_at(delta, hold.half_rate);
    const float x2 = (delta * delta) * (hold.A * hold.A);
    float series = fmaf(x2, kSeries6, kSeries4);
    series = fmaf(x2, series, kSeries2);
    series = fmaf(x2, series, 1.0f);
    const float abar = g * g;
    const float inverse = hold.inverse * step_inverse(delta);
    const float away = fmaf(abar, inverse, -inverse);
    return {abar, x2 < kSmall * kSmall ? g * series : away};
  }

  static __device__ __forceinline__ Growth<float> growth(float delta, const RealHold& hold) {
    const float y = delta * (2.0f * hold.half_rate);
    const float power = exp2_approx(y);
    return {power, growth_of(y, power), is_small_growth(y)};
  }
};

using ScanMath = ScanMathFor<4>;

/// a·b + c
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ Complex<float> multiply_add(Complex<float> a, Complex<float> b,
                                                       Complex<float> c) {
  return {fmaf(a.re, b.re, fmaf(-a.im, b.im, c.re)), fmaf(a.re, b.im, fmaf(a.im, b.re, c.im))};
}
/// Re(a·b) + c
__device__ __forceinline__ float add_real_of_product(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ float add_real_of_product(Complex<float> a, Complex<float> b, float c) {
  return fmaf(a.re, b.re, fmaf(-a.im, b.im, c));
}
/// Re(a·conj(b)) + c
__device__ __forceinline__ float add_real_of_product_conj(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ float add_real_of_product_conj(Complex<float> a, Complex<float> b,
                                                          float c) {
  return fmaf(a.re, b.re, fmaf(a.im, b.im, c));
}

/// Computes h[t] from h[t-1].
template <class T, class Input>
__device__ __forceinline__ T advance(const Step<T, Input>& step, T h, T B) {
  return multiply_add(step.abar, h, step.input * B);
}
template <class T>
__device__ __forceinline__ T advance(const IncrementStep<T>& step, T h, T B) {
  return step.advance(h, B);
}
template <class T>
__device__ __forceinline__ T advance(const TustinStep<T>& step, T h, T B) {
  return step.advance(h, B);
}

template <class T, class Input>
__device__ __forceinline__ T abar_of(const Step<T, Input>& step) {
  return step.abar;
}
template <class T>
__device__ __forceinline__ T abar_of(const TustinStep<T>& step) {
  return multiply_add(step.x, step.r, one<T>());
}

/// True if the scan uses ExactIncrements. Then states are A·h, and rows of inputs hold u.
template <Method kMethod>
constexpr bool kGoesByIncrements = Formula<kMethod>::kHasIncrements;

template <Method kMethod, class T, class Constants>
__device__ __forceinline__ auto step_of(float delta, float input, const Constants& constants) {
  if constexpr (kGoesByIncrements<kMethod>) {
    return ExactIncrements::step<ScanMath, T>(delta, input, constants);
  } else {
    return Formula<kMethod>::template step<ScanMath, T>(delta, input, constants);
  }
}
/// Returns h from the scanned state.
template <Method kMethod, class T, class Constants>
__device__ __forceinline__ T state_of(const Constants& constants, T h) {
  if constexpr (kGoesByIncrements<kMethod>) {
    return constants.inverse * h;
  } else {
    return h;
  }
}

}  // namespace selective_scan::cuda
