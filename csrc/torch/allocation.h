// What becomes of an op for whose tensors there is no memory.
//
// Through the stable ABI no exception passes, only the news that a call has failed. So the message
// is asked of Python, which repeats the allocation, and thrown; selective_scan/_memory.py has the
// other half.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "op_namespace.h"
#include "tensor_checks.h"

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace selective_scan::op {

using torch::headeronly::IntHeaderOnlyArrayRef;

/// Keeps PyTorch from logging errors while it lives. Before 2.13 it writes each exception that the
/// stable ABI stops to stderr, with a backtrace. Nothing depends on this: where PyTorch has no such
/// level, it logs.
class QuietLog {
 public:
  QuietLog() { set(kFatal); }
  ~QuietLog() { set(usual()); }
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;

 private:
  static constexpr int kFatal = 3;

#if defined(__linux__)
  /// PyTorch's; threads share it.
  static int* level() {
    static int* const level = static_cast<int*>(dlsym(RTLD_DEFAULT, "FLAGS_caffe2_log_level"));
    return level;
  }
  /// What is set in the beginning, for later another thread may have set kFatal.
  static int usual() {
    static const int usual = level() ? *level() : kFatal;
    return usual;
  }
  static void set(int value) {
    usual();
    if (level()) __atomic_store_n(level(), value, __ATOMIC_RELAXED);
  }
#else
  static int usual() { return kFatal; }
  static void set(int) {}
#endif
};

/// Throws the allocator's message where a tensor of these sizes has no room on the device of
/// `like`.
inline void check_memory(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  using torch::stable::detail::from, torch::stable::detail::to;
  // The elements of an expanded tensor may be more than any memory has bytes.
  double bytes = static_cast<double>(aoti_torch_dtype_element_size(to<int32_t>(from(dtype))));
  for (const int64_t size : sizes) bytes *= static_cast<double>(size);
  const auto asked = static_cast<int64_t>(std::min(bytes, 0x1p62));
  std::array<StableIValue, 2> stack{from(asked), from(int64_t{like.get_device_index()})};
  // Fails where there is no Python; the caller's error says no more then than that a call failed.
  if (torch_call_dispatcher(SELECTIVE_SCAN_OP("_allocation_error"), "", stack.data(),
                            TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    return;
  }
  const auto message = to<std::string>(stack[0]);
  if (!message.empty()) throw std::runtime_error(message);
}

/// What `function` returns, which allocates a tensor of these sizes on the device of `like`. If
/// that fails although there is memory, it is called once more: another thread may have freed some.
template <class Function>
Tensor allocating(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype,
                  const Function& function) {
  const QuietLog quiet;
  try {
    return function();
  } catch (const std::runtime_error&) {
    check_memory(like, sizes, dtype);
  }
  return function();
}

/// Does the same for a tensor like `like`.
template <class Function>
Tensor allocating(const Tensor& like, const Function& function) {
  return allocating(like, like.sizes(), dtype_of(like), function);
}

}  // namespace selective_scan::op
