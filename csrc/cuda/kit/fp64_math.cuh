// Elementary functions in fp64 without branches, of several numbers at a time: each is a chain of
// FMAs, whose links wait 8 cycles for one another, so that chains have to go in step. They do where
// loops over the numbers are innermost.
#pragma once

#include "../../core/math.h"
#include "config.h"

namespace selective_scan::cuda {

// In memory from which instructions take an operand: as literals they would fill registers.

static __constant__ Exp2Polynomial exp2_polynomial = kExp2Polynomial;

/// 2·atanh(s) = s·(2 + s²·Σ v[i]·s^(2i)) for |s| ≤ 1/3, a minimax fit to 1.2e-18.
struct AtanhPolynomial {
  double v[10];
};
static __constant__ AtanhPolynomial atanh_polynomial = {
    {0.66666666666666134237, 0.4000000000019032521, 0.28571428544925155861, 0.22222224111771498506,
     0.18181739787794444934, 0.15386635452549939115, 0.13300102534770183116, 0.12112248794468288655,
     0.083156850731489220001, 0.17060061138162188694}};

/// sums[k] = Σ polynomial[i]·x[k]^i
template <int kTerms, int kCount>
__device__ __forceinline__ void polynomials_at(const double (&polynomial)[kTerms],
                                               const double (&x)[kCount], double (&sums)[kCount]) {
#pragma unroll
  for (double& sum : sums) sum = polynomial[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[k] = fma(sums[k], x[k], polynomial[i]);
  }
}

/// 2^y = 2^n·(1 + f·slope), |f| ≤ 1/2 and |y| < 2^31.
struct PowerOfTwo {
  double f;
  double slope;
  int n;

  /// For |y| ≤ kNear, of which the power is neither 0 nor infinite.
  static constexpr double kNear = 1021;
  __device__ __forceinline__ double near() const {
    const double mantissa = fma(f, slope, 1.0);
    return __hiloint2double(__double2hiint(mantissa) + (n << kExponentShift),
                            __double2loint(mantissa));
  }
  /// The same less 1.
  __device__ __forceinline__ double near_less_one() const {
    const double scale = __hiloint2double((n + kBias) << kExponentShift, 0);
    return fma(f * slope, scale, scale - 1.0);
  }
  /// For y < 0: 0 where the power is subnormal.
  __device__ __forceinline__ double decayed() const {
    return fma(f, slope, 1.0) * __hiloint2double(max(n + kBias, 0) << kExponentShift, 0);
  }

 private:
  static constexpr int kExponentShift = 20;  // in the high word
  static constexpr int kBias = 1023;
};

/// Of y = a·b(k) + a·low, of which the first product is not rounded.
template <int kCount, class B>
__device__ __forceinline__ void powers_of_products(const double (&a)[kCount], const B& b,
                                                   PowerOfTwo (&powers)[kCount], double low = 0) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds to an integer, kept in the low bits
  double f[kCount], slopes[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const double rounded = fma(a[k], b(k), kRound);
    powers[k].n = __double2loint(rounded);
    f[k] = fma(a[k], b(k), kRound - rounded);
    if (low != 0) f[k] = fma(a[k], low, f[k]);
  }
  polynomials_at(exp2_polynomial.v, f, slopes);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    powers[k].f = f[k];
    powers[k].slope = slopes[k];
  }
}

/// The powers of two that are exp(x).
template <int kCount>
__device__ __forceinline__ void powers_of_exponentials(const double (&x)[kCount],
                                                       PowerOfTwo (&powers)[kCount]) {
  powers_of_products(x, [](int) { return kLog2e; }, powers, kLog2eLow);
}

/// 1/x of a normal x with a normal inverse.
__device__ __forceinline__ double near_reciprocal(double x) {
  double inverse;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(x));  // to 2^-23
  const double error = fma(-x, inverse, 1.0);
  return fma(inverse, fma(error, error, error), inverse);
}

/// exp(−|x|), also of ±inf; what becomes of NaN is the caller's care.
template <int kCount>
__device__ __forceinline__ void decays_of(const double (&x)[kCount], double (&decays)[kCount]) {
  constexpr double kGone = 746;
#pragma unroll
  for (int k = 0; k < kCount; ++k) decays[k] = fabs(x[k]) < kGone ? -fabs(x[k]) : -kGone;
  PowerOfTwo powers[kCount];
  powers_of_exponentials(decays, powers);
#pragma unroll
  for (int k = 0; k < kCount; ++k) decays[k] = powers[k].decayed();
}

/// log(1 + exp(x)), x itself above the threshold.
template <int kCount>
__device__ __forceinline__ void fp64_softplus(double (&x)[kCount]) {
  double v[kCount], s[kCount], square[kCount], series[kCount];
  decays_of(x, v);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    s[k] = v[k] * near_reciprocal(2.0 + v[k]);  // log(1 + v) = 2·atanh(s)
    square[k] = s[k] * s[k];
  }
  polynomials_at(atanh_polynomial.v, square, series);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const double sum = (x[k] < 0 ? 0 : x[k]) + s[k] * fma(square[k], series[k], 2.0);
    x[k] = x[k] > kSoftplusThreshold ? x[k] : sum;
  }
}

/// 1/(1 + exp(−x)) of numbers.
template <int kCount>
__device__ __forceinline__ void fp64_sigmoid(double (&x)[kCount]) {
  double v[kCount];
  decays_of(x, v);
#pragma unroll
  for (int k = 0; k < kCount; ++k) x[k] = (x[k] < 0 ? v[k] : 1.0) * near_reciprocal(1.0 + v[k]);
}

/// 1 − exp(−x) for 0 ≤ x < 2^30.
__device__ __forceinline__ double fp64_decayed_part(double x) {
  PowerOfTwo power[1];
  powers_of_exponentials({-x}, power);
  return -power[0].near_less_one();
}

}  // namespace selective_scan::cuda
