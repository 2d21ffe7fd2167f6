// One step of the diagonal scan, forward and backward, shared by all kernels.
#pragma once

#include "complex.h"
#include "config.h"

namespace selective_scan {

/// advance() replaces the state before a step by the state after it and returns the value to store.
/// As a function of the state, a step is h -> factor(a)·h + offset(a, x).
template <class T>
struct ForwardStep {
  using Value = T;
  static constexpr bool kBackward = false;

  static SELECTIVE_SCAN_HD T advance(T a, T b, T& state) {
    state = multiply_add(a, state, b);
    return state;
  }
  static SELECTIVE_SCAN_HD T factor(T a) { return a; }
  static SELECTIVE_SCAN_HD T offset(T, T b) { return b; }
};

template <class T>
struct BackwardStep {
  using Value = T;
  static constexpr bool kBackward = true;

  static SELECTIVE_SCAN_HD T advance(T a, T dh, T& state) {
    const T g = dh + state;
    state = conj(a) * g;
    return g;
  }
  static SELECTIVE_SCAN_HD T factor(T a) { return conj(a); }
  static SELECTIVE_SCAN_HD T offset(T a, T dh) { return conj(a) * dh; }
};

}  // namespace selective_scan
