// The affine map that a stretch of steps applies to the state of a linear recurrence.
#pragma once

#include "complex.h"
#include "config.h"

namespace selective_scan {

/// Returns factor·entering + offset, the state after a stretch of steps that begins with the state
/// `entering`. For a state of 0 the product is skipped, since the factor may have overflowed.
template <class R>
SELECTIVE_SCAN_HD R apply_map(R factor, R offset, R entering) {
  return entering == 0 ? offset : factor * entering + offset;
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> apply_map(Complex<R> factor, Complex<R> offset, Complex<R> entering) {
  return entering.re == 0 && entering.im == 0 ? offset : factor * entering + offset;
}

/// The map h -> product·h + offset that a stretch of steps applies to the state.
template <class T>
struct AffineMap {
  T product;
  T offset;

  static SELECTIVE_SCAN_HD AffineMap identity() { return {one<T>(), T{}}; }
  SELECTIVE_SCAN_HD T operator()(T state) const { return apply_map(product, offset, state); }
};

/// Composes two maps: `first` is applied first, then `second`.
struct Compose {
  template <class T>
  SELECTIVE_SCAN_HD AffineMap<T> operator()(const AffineMap<T>& first,
                                            const AffineMap<T>& second) const {
    return {second.product * first.product, second(first.offset)};
  }
};

}  // namespace selective_scan
