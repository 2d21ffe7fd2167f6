// Compensated sums, used over all chunks of a sequence.
#pragma once

#include "../../core/math.h"
#include "../simd/vector.h"

namespace selective_scan::cpu {

/// Returns sum + lost. An infinite sum has no meaningful correction.
template <class R>
SELECTIVE_SCAN_HD R corrected(R sum, R lost) {
  return select(lost == lost, sum + lost, sum);
}
template <class R>
SELECTIVE_SCAN_HD Complex<R> corrected(Complex<R> sum, Complex<R> lost) {
  return {corrected(sum.re, lost.re), corrected(sum.im, lost.im)};
}

/// A sum of many terms that keeps the rounding errors in `lost`.
template <class State>
struct CompensatedSum {
  State sum;
  State lost;

  SELECTIVE_SCAN_HD void add(State term) {
    State error;
    sum = two_sum(sum, term, error);
    lost += error;
  }
  SELECTIVE_SCAN_HD State value() const { return corrected(sum, lost); }
};

}  // namespace selective_scan::cpu
