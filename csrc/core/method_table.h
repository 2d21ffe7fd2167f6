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

/// This does the same for kernels that take a series' coefficients at run time.
template <class Entry, class Make>
constexpr MethodTable<Entry> make_kernel_table(const Make& make) {
  return make_method_table<Entry>([&]<Method kMethod>() -> Entry {
    return make.template operator()<kernel_method(kMethod)>();
  });
}

}  // namespace selective_scan
