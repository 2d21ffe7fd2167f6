// The methods that a build contains, and tables with an entry for each of them.
#pragma once

#include <utility>

#include "discretization.h"

// Bit i stands for the i-th Method; setup.py defines this if SELECTIVE_SCAN_METHODS is set.
#ifndef SELECTIVE_SCAN_METHOD_BITS
#define SELECTIVE_SCAN_METHOD_BITS ~0u
#endif

namespace selective_scan {

constexpr bool is_built(Method method) {
  constexpr unsigned kBits = SELECTIVE_SCAN_METHOD_BITS;
  return (kBits >> static_cast<int>(method) & 1) != 0;
}

/// One entry per Method. The entry of a method left out of the build is null and must not be used;
/// the ops refuse such a method earlier.
template <class Entry>
struct MethodTable {
  Entry entries[kNumMethods];

  constexpr const Entry& operator[](Method method) const {
    return entries[static_cast<int>(method)];
  }
};

/// Returns the table of the entries that make.operator()<kMethod>() returns. Every choice by a
/// method that is known only at run time goes through such a table.
template <class Entry, class Make>
constexpr MethodTable<Entry> make_method_table(const Make& make) {
  const auto entry = [&]<Method kMethod>() -> Entry {
    if constexpr (is_built(kMethod)) {
      return make.template operator()<kMethod>();
    } else {
      return Entry{};
    }
  };
  return [&]<int... kMethods>(std::integer_sequence<int, kMethods...>) {
    return MethodTable<Entry>{{entry.template operator()<static_cast<Method>(kMethods)>()...}};
  }(std::make_integer_sequence<int, kNumMethods>());
}

/// Returns whether `method` is the first of the built methods that share its kernels.
constexpr bool is_first_of_kernels(Method method) {
  for (int i = 0; i < static_cast<int>(method); ++i) {
    const auto other = static_cast<Method>(i);
    if (is_built(other) && kernel_method(other) == kernel_method(method)) return false;
  }
  return is_built(method);
}

/// Calls visit.operator()<kMethod>() with the kernels' method for a method known at run time,
/// within a kernel that contains the code of all methods.
template <class Visit>
SELECTIVE_SCAN_HD void visit_kernel_method(Method method, const Visit& visit) {
  const auto is_visited = [&]<Method kMethod>() {
    if constexpr (is_first_of_kernels(kMethod)) {
      constexpr Method kKernels = kernel_method(kMethod);
      if (kernel_method(method) != kKernels) return false;
      visit.template operator()<kKernels>();
      return true;
    }
    return false;
  };
  [&]<int... kMethods>(std::integer_sequence<int, kMethods...>) {
    (is_visited.template operator()<static_cast<Method>(kMethods)>() || ...);
  }(std::make_integer_sequence<int, kNumMethods>());
}

}  // namespace selective_scan
