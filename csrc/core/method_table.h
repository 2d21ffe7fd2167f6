// Which methods a build has, and tables with an entry for each of them.
#pragma once

#include <utility>

#include "discretization.h"

// Bit i stands for the i-th Method; setup.py defines this where SELECTIVE_SCAN_METHODS names some.
#ifndef SELECTIVE_SCAN_METHOD_BITS
#define SELECTIVE_SCAN_METHOD_BITS ~0u
#endif

namespace selective_scan {

constexpr bool is_built(Method method) {
  constexpr unsigned kBits = SELECTIVE_SCAN_METHOD_BITS;
  return (kBits >> static_cast<int>(method) & 1) != 0;
}

/// One entry per Method. That of a method left out of the build is null and must not be used; ops
/// refuse such a method before.
template <class Entry>
struct MethodTable {
  Entry entries[kNumMethods];

  constexpr const Entry& operator[](Method method) const {
    return entries[static_cast<int>(method)];
  }
};

/// The table of the entries that make.operator()<kMethod>() returns. Every choice by a method that
/// is known at run time alone goes through such a table.
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

/// Whether a method is the first in the build of those that its kernels run.
constexpr bool is_first_of_kernels(Method method) {
  for (int i = 0; i < static_cast<int>(method); ++i) {
    const auto other = static_cast<Method>(i);
    if (is_built(other) && kernel_method(other) == kernel_method(method)) return false;
  }
  return is_built(method);
}

/// Calls visit.operator()<kMethod>() with the kernels' method for one that is known at run time,
/// within a kernel that has the code of all.
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
