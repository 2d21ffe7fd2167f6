// Elementary functions on the device: special-function instructions for fp32, where their error is
// understood, and CUDA's library for fp64.
#pragma once

#include "../core/complex.h"

namespace selective_scan::cuda {

struct DeviceMath {
  static __device__ __forceinline__ float exp(float x) { return ::expf(x); }
  static __device__ __forceinline__ double exp(double x) { return ::exp(x); }
  template <class R>
  static __device__ __forceinline__ Complex<R> exp(Complex<R> x) {
    return complex_exp<DeviceMath>(x);
  }

  static __device__ __forceinline__ float expm1(float x) { return ::expm1f(x); }
  static __device__ __forceinline__ double expm1(double x) { return ::expm1(x); }

  static __device__ __forceinline__ float log1p(float x) { return ::log1pf(x); }
  static __device__ __forceinline__ double log1p(double x) { return ::log1p(x); }

  /// In units of π no argument needs the slow reduction of sincosf. Rounding x/π moves the angle by
  /// no more than the rounding of x itself did.
  static __device__ __forceinline__ void sincos(float x, float& sine, float& cosine) {
    ::sincospif(x * kInversePi, &sine, &cosine);
  }
  static __device__ __forceinline__ void sincos(double x, double& sine, double& cosine) {
    ::sincos(x, &sine, &cosine);
  }

  /// A·log2(e), an angle in units of π.
  static __device__ __forceinline__ float exponent(float A) { return A * kLog2e; }
  static __device__ __forceinline__ double exponent(double A) { return A; }
  static __device__ __forceinline__ Complex<float> exponent(Complex<float> A) {
    return {A.re * kLog2e, A.im * kInversePi};
  }
  static __device__ __forceinline__ Complex<double> exponent(Complex<double> A) { return A; }

  /// ex2.approx errs by 2 ulp at most; the rounding of its argument y adds |y|·2^-24 relative.
  static __device__ __forceinline__ float exp_of(float y) { return exp2_approx(y); }
  static __device__ __forceinline__ double exp_of(double y) { return ::exp(y); }
  static __device__ __forceinline__ Complex<float> exp_of(Complex<float> y) {
    const float modulus = exp2_approx(y.re);
    float sine, cosine;
    ::sincospif(y.im, &sine, &cosine);
    return {modulus * cosine, modulus * sine};
  }
  static __device__ __forceinline__ Complex<double> exp_of(Complex<double> y) { return exp(y); }

 private:
  static constexpr float kLog2e = 1.4426950408889634f;
  static constexpr float kInversePi = 0.31830988618379067f;

  static __device__ __forceinline__ float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
};

}  // namespace selective_scan::cuda
