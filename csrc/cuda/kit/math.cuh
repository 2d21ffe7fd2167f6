// Elementary functions on the device: special-function instructions for fp32 if their error is
// understood, and CUDA's library for fp64.
#pragma once

#include "../../core/math.h"
#include "config.h"

namespace selective_scan {

/// Returns 1/x to 1 ulp, or 0 if it is below 2^-126. A correctly rounded division takes ten times
/// as many instructions, which shows in bilinear.
template <>
SELECTIVE_SCAN_HD float reciprocal<float>(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

}  // namespace selective_scan

namespace selective_scan::cuda {

// fp64 functions are long; inlined at every use, they would be most of the library.
namespace outlined {
static __device__ __noinline__ double exp(double x) {
  return ::exp(x);
}
static __device__ __noinline__ double expm1(double x) {
  return ::expm1(x);
}
static __device__ __noinline__ double log1p(double x) {
  return ::log1p(x);
}
static __device__ __noinline__ double2 sincos(double x) {
  double2 result;
  ::sincos(x, &result.x, &result.y);
  return result;
}
}  // namespace outlined

__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

struct DeviceMath {
  static __device__ __forceinline__ float exp(float x) { return ::expf(x); }
  static __device__ __forceinline__ double exp(double x) { return outlined::exp(x); }
  template <class R>
  static __device__ __forceinline__ Complex<R> exp(Complex<R> x) {
    return complex_exp<DeviceMath>(x);
  }

  static __device__ __forceinline__ float expm1(float x) { return ::expm1f(x); }
  static __device__ __forceinline__ double expm1(double x) { return outlined::expm1(x); }

  static __device__ __forceinline__ float log1p(float x) { return ::log1pf(x); }
  static __device__ __forceinline__ double log1p(double x) { return outlined::log1p(x); }

  /// In units of π, no argument needs the slow reduction of sincosf. Rounding x/π moves the angle
  /// by no more than the rounding of x itself.
  static __device__ __forceinline__ void sincos(float x, float& sine, float& cosine) {
    ::sincospif(x * kInversePi, &sine, &cosine);
  }
  static __device__ __forceinline__ void sincos(double x, double& sine, double& cosine) {
    const double2 both = outlined::sincos(x);
    sine = both.x;
    cosine = both.y;
  }

  /// For real A, A·log2(e) saves a multiplication at every step. A complex A keeps its value: next
  /// to the work of a sine, two multiplications are a small price for an exponent without a
  /// systematic error.
  static __device__ __forceinline__ float exponent(float A) {
    return A * static_cast<float>(kLog2e);
  }
  template <class T>
  static __device__ __forceinline__ T exponent(T A) {
    return A;
  }

  /// The error of ex2.approx is at most 1.4e-7, but its average is −5e-9 to −1e-8 for −0.004 < y <
  /// 0, −2e-8 for −0.5 < y < −0.005 and −5e-8 for y < −1 (measured on an H100), which accumulates
  /// over a memory of 1/|y| steps. Shifting y, which is free as part of an FMA, balances it where
  /// that is worst. For complex numbers, a shift that depends on y costs little compared with the
  /// rest.
  static __device__ __forceinline__ float exp_of(float y) { return exp2_approx(y + kBalance); }
  static __device__ __forceinline__ double exp_of(double y) { return exp(y); }
  static __device__ __forceinline__ float balanced_exp2(float y) {
    return exp2_approx(y + (y < -0.004f ? kBalanceAway : kBalance));
  }
  static __device__ __forceinline__ Complex<float> exp_of(Complex<float> y) {
    const float modulus = balanced_exp2(y.re * static_cast<float>(kLog2e));
    float sine, cosine;
    ::sincospif(y.im * kInversePi, &sine, &cosine);
    return {modulus * cosine, modulus * sine};
  }
  static __device__ __forceinline__ Complex<double> exp_of(Complex<double> y) { return exp(y); }

 private:
  static constexpr float kBalance = 9e-9f;
  static constexpr float kBalanceAway = 2.6e-8f;
  static constexpr float kInversePi = 0.31830988618379067f;
};

// Functions that every (channel, step) needs, without the branches for special cases of general
// functions.

/// Makes the compiler branch around a rare case instead of always executing it under a predicate.
/// All lanes of a warp call this together.
__device__ __forceinline__ void really_branch() {
  __syncwarp();
}

/// Returns exp(x) of a finite x, corrected for the rounding of x·log2(e). The correction matters
/// for |x| above 1, and is left out for 2-byte results (kSize), whose rounding hides it.
template <int kSize>
__device__ __forceinline__ float exp_for(float x) {
  const float y = x * static_cast<float>(kLog2e);
  const float power = exp2_approx(y);
  if constexpr (kSize == 2) return power;
  return fmaf(power, fmaf(y, -0.693147182f, x), power);
}

/// Returns exp(−|x|), also for ±inf and NaN. exp(−104) is 0 in fp32.
template <int kSize>
__device__ __forceinline__ float decay_of(float x) {
  float exponent = -fabsf(x);
  if constexpr (kSize != 2) {
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(exponent) : "f"(exponent), "f"(-104.0f));
#else
    exponent = exponent < -104.0f ? -104.0f : exponent;  // keeps NaN, too
#endif
  }
  return exp_for<kSize>(exponent);
}

// softplus(x) = log(1 + exp(x)) = max(x, 0) + log1p(v), with v = exp(−|x|). Above the threshold v
// vanishes in the sum, so no comparison is needed.

/// Returns the derivative of softplus, sigmoid(x): 1/(1 + v) or, for a negative x, v/(1 + v). Above
/// the threshold it rounds to 1.
__device__ __forceinline__ float softplus_slope(float x, float v) {
  return (x < 0.0f ? v : 1.0f) * reciprocal(1.0f + v);
}

/// softplus for kernels that are bound by instructions: log1p(v) = 2 atanh(s) with s = v/(2 + v).
/// For s up to 1/3 the polynomial is within 5e-9 of atanh(s)/s.
__device__ __forceinline__ float softplus_by_atanh(float x, float v) {
  const float s = v * reciprocal(2.0f + v);
  const float s2 = s * s;
  float series = 0.280244604f;
  series = 0.279991407f + s2 * series;
  series = 0.400216991f + s2 * series;
  series = 0.666664131f + s2 * series;
  series = 2.0f + s2 * series;
  return fmaxf(x, 0.0f) + s * series;
}
__device__ __forceinline__ float device_softplus(float x) {
  return softplus_by_atanh(x, ::expf(-fabsf(x)));
}
__device__ __forceinline__ double device_softplus(double x) {
  return softplus<DeviceMath>(x);
}

/// Returns Δ from delta + delta_bias.
template <class R>
__device__ __forceinline__ R step_size(R biased, bool has_softplus) {
  return finite_step(has_softplus ? device_softplus(biased) : biased);
}
/// Computes several steps in place, with one branch for all of them, for results of kSize bytes.
template <int kSize, int kCount>
__device__ __forceinline__ void make_steps(float (&values)[kCount], bool has_softplus) {
  if (has_softplus) {
#pragma unroll
    for (float& value : values) value = softplus_by_atanh(value, decay_of<kSize>(value));
  }
#pragma unroll
  for (float& value : values) value = finite_step(value);
}
/// Computes several steps and their derivatives.
template <int kSize, int kCount>
__device__ __forceinline__ void make_steps(float (&values)[kCount], bool has_softplus,
                                           float (&slopes)[kCount]) {
#pragma unroll
  for (float& slope : slopes) slope = 1.0f;
  if (has_softplus) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float v = decay_of<kSize>(values[i]);
      slopes[i] = softplus_slope(values[i], v);
      values[i] = softplus_by_atanh(values[i], v);
    }
  }
#pragma unroll
  for (float& value : values) value = finite_step(value);
}

/// softplus for kernels that are bound by the special-function unit. The polynomial is log1p(v)/v
/// on [0, 1] to 5e-9 (Remez), which saves a reciprocal.
__device__ __forceinline__ float softplus_by_series(float x, float v) {
  float series = -0.003244025632739067f;
  series = fmaf(series, v, 0.019851477816700935f);
  series = fmaf(series, v, -0.056959591805934906f);
  series = fmaf(series, v, 0.10603664815425873f);
  series = fmaf(series, v, -0.15305601060390472f);
  series = fmaf(series, v, 0.196759432554245f);
  series = fmaf(series, v, -0.24954134225845337f);
  series = fmaf(series, v, 0.3332996368408203f);
  series = fmaf(series, v, -0.4999990165233612f);
  series = fmaf(series, v, 1.0f);
  return fmaf(series, v, fmaxf(x, 0.0f));
}

/// Computes the steps Δ in place from delta + delta_bias.
template <int kSize, class Values>
__device__ __forceinline__ void make_steps_by_series(Values& values, bool has_softplus) {
  if (has_softplus) {
    for (float& value : values.v) value = softplus_by_series(value, decay_of<kSize>(value));
  }
  for (float& value : values.v) value = finite_step(value);
}

/// Computes several steps and their derivatives. All lanes of a warp call this together.
template <int kSize, class Values>
__device__ __forceinline__ void make_steps_by_series(Values& values, bool has_softplus,
                                                     Values& slopes) {
  constexpr int kCount = sizeof(values.v) / sizeof(float);
  if (has_softplus) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float v = decay_of<kSize>(values.v[i]);
      slopes.v[i] = softplus_slope(values.v[i], v);
      values.v[i] = softplus_by_series(values.v[i], v);
    }
  } else {
    really_branch();
    for (float& slope : slopes.v) slope = 1.0f;
  }
  for (float& value : values.v) value = finite_step(value);
}

/// sigmoid(z) = 1/(1 + exp(−z))
template <int kSize>
__device__ __forceinline__ float sigmoid_for(float z) {
  return reciprocal(1.0f + exp_for<kSize>(-z));
}

/// sigmoid(x) to the precision of the compute type. In fp32, the product's rounding changes the
/// result by a relative 1e-7 at |x| = 4, and by less where that matters.
__device__ __forceinline__ float device_sigmoid(float x) {
  return sigmoid_for<2>(x);
}
__device__ __forceinline__ double device_sigmoid(double x) {
  return sigmoid<DeviceMath>(x);
}

template <class R>
__device__ __forceinline__ R device_silu(R x) {
  return x * device_sigmoid(x);
}
/// x·silu(z)
template <int kSize>
__device__ __forceinline__ float gated(float x, float z) {
  return (x * z) * sigmoid_for<kSize>(z);
}

/// Returns the derivative of softplus at x from Δ = softplus(x): 1 − exp(−Δ).
__device__ __forceinline__ double softplus_slope_from(double delta) {
  return delta > kSoftplusThreshold ? 1.0 : -outlined::expm1(-delta);
}
__device__ __forceinline__ float softplus_slope_from(float delta) {
  // Taylor's series, for arguments at which the subtraction would cancel.
  float series = 1.0f / 5040;
  series = 1.0f / 720 - delta * series;
  series = 1.0f / 120 - delta * series;
  series = 1.0f / 24 - delta * series;
  series = 1.0f / 6 - delta * series;
  series = 0.5f - delta * series;
  series = delta * (1.0f - delta * series);
  const float outside = 1.0f - ::expf(-delta);
  if (delta > static_cast<float>(kSoftplusThreshold)) return 1.0f;
  return delta < 0.5f ? series : outside;
}

}  // namespace selective_scan::cuda
