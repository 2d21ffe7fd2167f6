// exp(i·angle) for a recurrence that multiplies by it at every step and never forgets.
//
// There an error of the rotation adds up over the whole sequence: unbiased rounding as the square
// root of the number of steps, a bias in proportion to it. An ordinary sine within 2 ulp leaves a
// bias of some 1e-9 to 1e-8, and so does adding a constant to an angle that was rounded before
// (the digits of the constant that are lost are the same ones every time); after 65536 steps that
// is 10 to 20 times what rounding costs. So in fp32 the sum, the reduction of the argument and the
// leading terms of both series carry their rounding errors along, and sine and cosine are each
// rounded once, at the end, with an approximation error below 2e-10.
#pragma once

#include "complex.h"
#include "config.h"
#include "math.h"

namespace selective_scan {

SELECTIVE_SCAN_HD bool all(bool condition) {
  return condition;
}

/// a + b = sum + lost exactly (Knuth).
template <class R>
SELECTIVE_SCAN_HD R two_sum(R a, R b, R& lost) {
  const R sum = a + b;
  const R b_part = sum - a;
  lost = (a - (sum - b_part)) + (b - b_part);
  return sum;
}

/// Up to here n has few enough bits; larger angles take the Math policy's sincos.
constexpr float kLargestReducibleAngle = 6000;

template <class R>
SELECTIVE_SCAN_HD auto is_reducible(R angle) {
  return angle * angle < R(kLargestReducibleAngle * kLargestReducibleAngle);
}

/// The rotation by theta + bias in fp32, R being float or a vector of it, if is_reducible(angle).
template <class R>
SELECTIVE_SCAN_HD Complex<R> reducible_rotation(R theta, R bias, R& angle) {
  const auto number = [](float value) { return R(value); };
  R low;
  angle = two_sum(theta, bias, low);

  // angle + low = n·π/2 + r + low. Products of n with the first two parts of π/2 are exact.
  const R round = number(0x1.8p23f);
  const R n = (angle * number(0.636619772f) + round) - round;
  R lost;
  const R head = two_sum(angle - n * number(0x1.92p+0f), n * number(-0x1.fb4p-12f), lost);
  const R tail = (low + lost) - n * number(0x1.4442d2p-24f);
  const R r = head + tail;
  low = (head - r) + tail;

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
  const R cosine = cosine_head + (cosine_lost + ((r2 * r2) * cosine_series - low * r));

  // Times i^n; its parts are 0 and ±1, so nothing is rounded.
  const R quarter = (n * number(0.25f) + round) - round;
  const R k = n - number(4) * quarter;  // -2 to 2
  const R k_size = select(k < number(0), number(0) - k, k);
  const Complex<R> power{number(1) - k_size, k * (number(2) - k_size)};
  return power * Complex<R>{cosine, sine};
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

/// The rotation by theta + bias.
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

/// Several at once: one branch for all of them, so that their latencies overlap.
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
