// Gives the CPU kernels PyTorch's thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../cpu/thread_pool.h"

namespace selective_scan::op {

inline cpu::ThreadPool torch_thread_pool() {
  const auto parallel_for = [](int64_t count, void (*task)(int64_t, int64_t, void*),
                               void* context) {
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, /*grain_size=*/1, task, context));
  };
  return {parallel_for, static_cast<int>(torch::stable::get_num_threads())};
}

}  // namespace selective_scan::op
