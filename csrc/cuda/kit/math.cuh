// Elementary functions on the device: special-function instructions for fp32, where their error is
// understood, and CUDA's library for fp64.
#pragma once

#include "../../core/math.h"

namespace selective_scan {

/// 1/x to 1 ulp, 0 where that is below 2^-126: a division rounded to the last bit takes ten times
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

// fp64 functions are long; inlined at every use they would make up most of the library.
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

  /// In units of π no argument needs the slow reduction of sincosf. Rounding x/π moves the angle by
  /// no more than the rounding of x itself did.
  static __device__ __forceinline__ void sincos(float x, float& sine, float& cosine) {
    ::sincospif(x * kInversePi, &sine, &cosine);
  }
  static __device__ __forceinline__ void sincos(double x, double& sine, double& cosine) {
    const double2 both = outlined::sincos(x);
    sine = both.x;
    cosine = both.y;
  }

  /// A·log2(e) spares a multiplication for every step where A is real. A complex A keeps its value:
  /// next to the work of a sine, two multiplications buy an exponent without a systematic error.
  static __device__ __forceinline__ float exponent(float A) { return A * kLog2e; }
  template <class T>
  static __device__ __forceinline__ T exponent(T A) {
    return A;
  }

  /// ex2.approx errs by 1.4e-7 at most; but on average by −6e-9 for −0.001 < y < 0, by −2e-8 for
  /// −0.5 < y < −0.01 and by −4e-8 for y < −2 (measured on an H200), which over a long memory adds
  /// up. Shifting y, free as part of an FMA, balances it where memories are long. For complex
  /// numbers a shift that depends on y costs little beside the rest.
  static __device__ __forceinline__ float exp_of(float y) { return exp2_approx(y + kBalance); }
  static __device__ __forceinline__ double exp_of(double y) { return exp(y); }
  static __device__ __forceinline__ Complex<float> exp_of(Complex<float> y) {
    const float modulus =
        exp2_approx(y.re * kLog2e + (y.re < -0.002f ? kBalanceAway : kBalanceNearZero));
    float sine, cosine;
    ::sincospif(y.im * kInversePi, &sine, &cosine);
    return {modulus * cosine, modulus * sine};
  }
  static __device__ __forceinline__ Complex<double> exp_of(Complex<double> y) { return exp(y); }

  static constexpr float kLog2e = 1.4426950408889634f;

  static __device__ __forceinline__ float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }

 private:
  static constexpr float kBalance = 1.9e-8f;
  static constexpr float kBalanceNearZero = 8e-9f;
  static constexpr float kBalanceAway = 2.6e-8f;
  static constexpr float kInversePi = 0.31830988618379067f;
};

// What every (channel, step) needs, without the general functions' branches for special cases.

__device__ __forceinline__ double device_sigmoid(double x) {
  return sigmoid<DeviceMath>(x);
}
/// The product's rounding moves the result by 1e-7 of it where |x| is 4, less where that matters.
__device__ __forceinline__ float device_sigmoid(float x) {
  return reciprocal(1.0f + DeviceMath::exp2_approx(-x * DeviceMath::kLog2e));
}

__device__ __forceinline__ double device_softplus(double x) {
  return softplus<DeviceMath>(x);
}
/// log(1 + exp(x)) = max(x, 0) + log1p(v), v = exp(−|x|), and log1p(v) = 2 atanh(s), s = v/(2 + v).
/// For s up to 1/3 the polynomial is within 5e-9 of atanh(s)/s. Above the threshold v is lost in
/// the sum, so that no comparison is needed.
__device__ __forceinline__ float softplus_of(float x, float v) {
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
  return softplus_of(x, ::expf(-fabsf(x)));
}

/// The same, with the derivative, sigmoid(x): 1/(1 + v) or, for a negative x, v/(1 + v). Above the
/// threshold that rounds to 1.
__device__ __forceinline__ float device_softplus(float x, float& slope) {
  const float v = ::expf(-fabsf(x));
  slope = (x < 0.0f ? v : 1.0f) * reciprocal(1.0f + v);
  return softplus_of(x, v);
}

/// The derivative of softplus at x from Δ = softplus(x): 1 − exp(−Δ).
__device__ __forceinline__ double softplus_slope(double delta) {
  return delta > kSoftplusThreshold ? 1.0 : -outlined::expm1(-delta);
}
__device__ __forceinline__ float softplus_slope(float delta) {
  // Taylor's series where the subtraction would cancel.
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
