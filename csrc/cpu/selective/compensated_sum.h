// Compensated sums, used over all chunks of a sequence.
#pragma once

#include "../simd/vector.h"

namespace selective_scan::cpu {

/// A sum of many terms that keeps the rounding errors in `lost` (Knuth's two-sum).
template <class R>
struct CompensatedSum {
  R sum;
  R lost;

  SELECTIVE_SCAN_HD void add(R term) {
    const R total = sum + term;
    const R rounded_term = total - sum;
    lost += (sum - (total - rounded_term)) + (term - rounded_term);
    sum = total;
  }
  /// An infinite sum has no meaningful correction.
  SELECTIVE_SCAN_HD R value() const { return select(lost == lost, sum + lost, sum); }
};

template <class State>
struct CompensatedState {
  CompensatedSum<State> real;
  SELECTIVE_SCAN_HD void add(State term) { real.add(term); }
  SELECTIVE_SCAN_HD State value() const { return real.value(); }
};
template <class R>
struct CompensatedState<Complex<R>> {
  CompensatedSum<R> re;
  CompensatedSum<R> im;
  SELECTIVE_SCAN_HD void add(Complex<R> term) {
    re.add(term.re);
    im.add(term.im);
  }
  SELECTIVE_SCAN_HD Complex<R> value() const { return {re.value(), im.value()}; }
};

}  // namespace selective_scan::cpu
