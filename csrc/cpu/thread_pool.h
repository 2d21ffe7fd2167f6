// The threads that the kernels work on.
#pragma once

#include <cstdint>

namespace selective_scan::cpu {

/// The kernels know no thread library: the caller lends them its pool.
struct ThreadPool {
  /// Calls task(begin, end, context) on ranges that together cover [0, count), and waits.
  void (*parallel_for)(int64_t count, void (*task)(int64_t begin, int64_t end, void* context),
                       void* context);
  int num_threads = 1;

  ThreadPool one_thread() const { return {parallel_for, 1}; }
};

}  // namespace selective_scan::cpu
