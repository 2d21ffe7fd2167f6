// What a stretch of steps does to the state of a linear recurrence.
#pragma once

#include "complex.h"
#include "config.h"

namespace selective_scan {

/// What becomes of `entering` in a part of the sequence that maps x to factor·x + offset. Such a
/// part may grow by a factor that overflows while what enters is still 0.
template <class R>
SELECTIVE_SCAN_HD R apply_map(R factor, R offset, R entering) {
  return entering == 0 ? offset : factor * entering + offset;
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> apply_map(Complex<R> factor, Complex<R> offset, Complex<R> entering) {
  return entering.re == 0 && entering.im == 0 ? offset : factor * entering + offset;
}

/// What a stretch of steps does to the state: h -> product·h + offset.
template <class T>
struct AffineMap {
  T product;
  T offset;

  static SELECTIVE_SCAN_HD AffineMap identity() { return {one<T>(), T{}}; }
  SELECTIVE_SCAN_HD T operator()(T state) const { return apply_map(product, offset, state); }
};

/// First `first`, then `second`.
struct Compose {
  template <class T>
  SELECTIVE_SCAN_HD AffineMap<T> operator()(const AffineMap<T>& first,
                                            const AffineMap<T>& second) const {
    return {second.product * first.product, second(first.offset)};
  }
};

}  // namespace selective_scan
