// exp(i·angle) for a recurrence that multiplies by it at every step and never forgets.
//
// In such a recurrence the errors of the rotations add up over the whole sequence: unbiased
// rounding in proportion to the square root of the number of steps, a bias in proportion to the
// number itself. An ordinary sine within 2 ulp leaves a bias of some 1e-9 to 1e-8, and so does
// adding a constant to an angle that is already rounded (every sum loses the same digits of the
// constant). After 65536 steps that is 10 to 20 times the error of rounding. So in fp32 the sum,
// the argument reduction and the leading terms of both series carry their rounding errors along,
// and sine and cosine are each rounded once, at the end, with an approximation error below 2e-10.
#pragma once

#include <cmath>
#include <cstdint>

#include "complex.h"
#include "config.h"
#include "dtype.h"
#include "math.h"

namespace selective_scan {

SELECTIVE_SCAN_HD bool all(bool condition) {
  return condition;
}

/// The largest angle for which n has few enough bits; larger angles use the Math policy's sincos.
constexpr float kLargestReducibleAngle = 6000;

template <class R>
SELECTIVE_SCAN_HD auto is_reducible(R angle) {
  return angle * angle < R(kLargestReducibleAngle * kLargestReducibleAngle);
}
SELECTIVE_SCAN_HD bool is_reducible(float angle) {
  return std::fabs(angle) < kLargestReducibleAngle;
}

/// angle + low = n·π/2 + r + low', with n an integer in the low bits of `shifted`.
template <class R>
struct ReducedAngle {
  R r;
  R low;
  R shifted;
};

/// Adding kRound rounds a number to an integer, which is then in the low bits of the sum.
constexpr float kRound = 0x1.8p23f;
constexpr float kQuartersPerRadian = 0.636619772f;

/// Subtracts n·π/2 in three parts. The products of n with the first two are exact.
template <class R>
SELECTIVE_SCAN_HD ReducedAngle<R> reduce(R angle, R low) {
  const R shifted = angle * R(kQuartersPerRadian) + R(kRound);
  const R n = shifted - R(kRound);
  R lost;
  const R head = two_sum(angle - n * R(0x1.92p+0f), n * R(-0x1.fb4p-12f), lost);
  const R tail = (low + lost) - n * R(0x1.4442d2p-24f);
  const R r = head + tail;
  return {r, (head - r) + tail, shifted};
}

/// Subtracts n·π/2 in two parts, since a fused multiply-add has no rounding error here: angle and
/// n·P, with P the first part with its 24 bits, are multiples of 2^-23 (or n is 0 or ±1), and so is
/// their difference, which is below 1.
SELECTIVE_SCAN_HD ReducedAngle<float> reduce(float angle, float low) {
  const float shifted = std::fma(angle, kQuartersPerRadian, kRound);
  const float n = shifted - kRound;
  const float head = std::fma(n, -0x1.921fb6p+0f, angle);
  const float tail = std::fma(n, 0x1.777a5cp-25f, low);
  const float r = head + tail;
  return {r, (head - r) + tail, shifted};
}

/// Returns z·i^n. The components of i^n are 0 and ±1, so nothing is rounded.
template <class R>
SELECTIVE_SCAN_HD Complex<R> turn_by_quarters(Complex<R> z, R shifted) {
  const auto number = [](float value) { return R(value); };
  const R n = shifted - number(kRound);
  const R quarter = (n * number(0.25f) + number(kRound)) - number(kRound);
  const R k = n - number(4) * quarter;  // -2 to 2
  const R k_size = select(k < number(0), number(0) - k, k);
  const Complex<R> power{number(1) - k_size, k * (number(2) - k_size)};
  return power * z;
}
SELECTIVE_SCAN_HD Complex<float> turn_by_quarters(Complex<float> z, float shifted) {
  constexpr uint32_t kSign = 0x80000000u;
  const uint32_t n = bit_cast<uint32_t>(shifted);
  const bool swaps = (n & 1) != 0;
  const float re = swaps ? z.im : z.re;
  const float im = swaps ? z.re : z.im;
  return {bit_cast<float>(bit_cast<uint32_t>(re) ^ (((n + 1) << 30) & kSign)),
          bit_cast<float>(bit_cast<uint32_t>(im) ^ ((n << 30) & kSign))};
}

/// Returns the rotation by theta + bias in fp32, where R is float or a vector of it. Valid if
/// is_reducible(angle).
template <class R>
SELECTIVE_SCAN_HD Complex<R> reducible_rotation(R theta, R bias, R& angle) {
  const auto number = [](float value) { return R(value); };
  R lost;
  angle = two_sum(theta, bias, lost);
  const ReducedAngle<R> reduced = reduce(angle, lost);
  const R r = reduced.r;
  const R low = reduced.low;

  const R r2 = r * r;
  const R sine_series = number(-0x1.555556p-3f) +
                        (number(0x1.555556p-28f) +
                         r2 * (number(0x1.11110ep-7f) +
                               r2 * (number(-0x1.a0128ap-13f) + r2 * number(0x1.6d6c7p-19f))));
  const R cosine_series = number(0x1.555556p-5f) +
                          (number(-0x1.555556p-30f) +
                           r2 * (number(-0x1.6c16bep-10f) +
                                 r2 * (number(0x1.a01432p-16f) + r2 * number(-0x1.24b964p-22f))));
  const R half_square = number(0.5f) * r2;
  const R cosine_head = number(1) - half_square;
  const R cosine_lost = (number(1) - cosine_head) - half_square;
  const R sine = r + ((r * r2) * sine_series + low * cosine_head);
  const R cosine = cosine_head + ((cosine_lost + (r2 * r2) * cosine_series) - low * r);
  return turn_by_quarters(Complex<R>{cosine, sine}, reduced.shifted);
}

template <class Math, class R>
SELECTIVE_SCAN_HD Complex<R> rotation_in_single(R theta, R bias) {
  R angle;
  Complex<R> rotation = reducible_rotation(theta, bias, angle);
  const auto reducible = is_reducible(angle);
  if (!all(reducible)) {
    Complex<R> plain;
    Math::sincos(angle, plain.im, plain.re);
    rotation = {select(reducible, rotation.re, plain.re), select(reducible, rotation.im, plain.im)};
  }
  return rotation;
}

/// Returns the rotation by theta + bias.
template <class Math, class R>
SELECTIVE_SCAN_HD Complex<R> rotation(R theta, R bias) {
  if constexpr (sizeof(scalar_t<R>) == 4) {
    return rotation_in_single<Math>(theta, bias);
  } else {
    Complex<R> result;
    Math::sincos(theta + bias, result.im, result.re);
    return result;
  }
}

/// Computes several rotations with one branch for all of them, so that their latencies overlap.
template <class Math, class R, int n>
SELECTIVE_SCAN_HD void rotations(const R (&theta)[n], R bias, Complex<R> (&turns)[n]) {
  bool reducible = true;
  if constexpr (sizeof(scalar_t<R>) == 4) {
    for (int i = 0; i < n; ++i) {
      R angle;
      turns[i] = reducible_rotation(theta[i], bias, angle);
      reducible = reducible && all(is_reducible(angle));
    }
    if (reducible) return;
  }
  for (int i = 0; i < n; ++i) turns[i] = rotation<Math>(theta[i], bias);
}

}  // namespace selective_scan
