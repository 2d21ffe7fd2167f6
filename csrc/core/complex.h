// A complex number of any real type: float, double, or a vector of either.
#pragma once

#include <concepts>

#include "config.h"

namespace selective_scan {

template <class R>
struct Complex {
  R re;
  R im;
};

/// The real type of the components of T, and the scalar type of a vector's lanes (vector types
/// specialize ScalarOf).
template <class T>
struct RealOf {
  using type = T;
};
template <class R>
struct RealOf<Complex<R>> {
  using type = R;
};
template <class T>
using real_t = typename RealOf<T>::type;

template <class T>
struct ScalarOf {
  using type = T;
};
template <class T>
using scalar_t = typename ScalarOf<real_t<T>>::type;

template <class T>
constexpr bool is_complex_v = false;
template <class R>
constexpr bool is_complex_v<Complex<R>> = true;

/// Returns a constant of the real type of T.
template <class T>
SELECTIVE_SCAN_HD real_t<T> constant(double value) {
  return real_t<T>(static_cast<scalar_t<T>>(value));
}

/// Returns the number 1 as a T.
template <class T>
SELECTIVE_SCAN_HD T one() {
  if constexpr (is_complex_v<T>) {
    return {constant<T>(1), constant<T>(0)};
  } else {
    return constant<T>(1);
  }
}

template <class R>
SELECTIVE_SCAN_HD Complex<R> operator+(Complex<R> a, Complex<R> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> operator-(Complex<R> a, Complex<R> b) {
  return {a.re - b.re, a.im - b.im};
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> operator*(Complex<R> a, Complex<R> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> operator*(R a, Complex<R> b) {
  return {a * b.re, a * b.im};
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> operator+(R a, Complex<R> b) {
  return {a + b.re, b.im};
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> operator-(R a, Complex<R> b) {
  return {a - b.re, R(scalar_t<R>(0)) - b.im};
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> operator-(Complex<R> a) {
  return {-a.re, -a.im};
}
template <class R>
SELECTIVE_SCAN_HD Complex<R>& operator+=(Complex<R>& a, Complex<R> b) {
  a = a + b;
  return a;
}

/// a·b + c, in an order in which every multiplication can fuse with an addition.
template <class R>
SELECTIVE_SCAN_HD Complex<R> multiply_add(Complex<R> a, Complex<R> b, Complex<R> c) {
  return {(c.re + a.re * b.re) - a.im * b.im, (c.im + a.re * b.im) + a.im * b.re};
}
template <class R>
SELECTIVE_SCAN_HD R multiply_add(R a, R b, R c) {
  return a * b + c;
}

// The same functions for real and complex numbers, so that one formula serves both.

template <class R>
SELECTIVE_SCAN_HD Complex<R> conj(Complex<R> a) {
  return {a.re, -a.im};
}
template <class R>
SELECTIVE_SCAN_HD R conj(R a) {
  return a;
}

template <class R>
SELECTIVE_SCAN_HD R real(Complex<R> a) {
  return a.re;
}
template <class R>
SELECTIVE_SCAN_HD R real(R a) {
  return a;
}

/// |a|²
template <class R>
SELECTIVE_SCAN_HD R norm(Complex<R> a) {
  return a.re * a.re + a.im * a.im;
}
template <class R>
SELECTIVE_SCAN_HD R norm(R a) {
  return a * a;
}

/// Re(a·conj(b)), with half the work of the product.
template <class R>
SELECTIVE_SCAN_HD R real_of_product_conj(Complex<R> a, Complex<R> b) {
  return a.re * b.re + a.im * b.im;
}
template <class R>
SELECTIVE_SCAN_HD R real_of_product_conj(R a, R b) {
  return a * b;
}

/// condition ? a : b, lane by lane for a vector condition.
template <std::floating_point R>
SELECTIVE_SCAN_HD R select(bool condition, R a, R b) {
  return condition ? a : b;
}
template <class Mask, class R>
SELECTIVE_SCAN_HD Complex<R> select(Mask condition, Complex<R> a, Complex<R> b) {
  return {select(condition, a.re, b.re), select(condition, a.im, b.im)};
}

}  // namespace selective_scan
