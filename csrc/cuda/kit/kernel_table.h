// Tables of kernels by method.
#pragma once

#include "../../core/method_table.h"
#include "config.h"

namespace selective_scan::cuda {

/// Returns a table of the entries that make.operator()<kMethod>() returns: for all methods, or only
/// for kCommonMethod if plans refuse all others.
template <class Entry, bool kHasMethods, class Make>
constexpr MethodTable<Entry> make_kernel_table(const Make& make) {
  return make_method_table<Entry>([&]<Method kMethod>() -> Entry {
    if constexpr (kHasMethods || has_all_kernels(kMethod)) {
      return make.template operator()<kernel_method(kMethod)>();
    } else {
      return Entry{};
    }
  });
}

}  // namespace selective_scan::cuda
