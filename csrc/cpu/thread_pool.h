// The threads that the kernels run on.
#pragma once

#include <cstdint>

namespace selective_scan::cpu {

/// The interface to the caller's thread pool; the kernels themselves use no thread library.
struct ThreadPool {
  /// Calls task(begin, end, context) on ranges that together cover [0, count), and waits for them.
  void (*parallel_for)(int64_t count, void (*task)(int64_t begin, int64_t end, void* context),
                       void* context);
  int num_threads = 1;

  ThreadPool one_thread() const { return {parallel_for, 1}; }
};

}  // namespace selective_scan::cpu
