// Allocation of tensors, with the allocator's own message when memory runs out.
//
// No exception crosses the stable ABI: the caller only learns that a call has failed. So
// check_memory() asks Python for the message, which repeats the allocation to get it, and throws
// that. selective_scan/_memory.py is the Python side.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "op_namespace.h"
#include "tensor_checks.h"
#include "text.h"

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace selective_scan::op {

using torch::headeronly::IntHeaderOnlyArrayRef;

/// Silences the log of a PyTorch before 2.13 during its lifetime, which writes each exception that
/// the stable ABI stops to stderr, with a backtrace. This is cosmetic: if PyTorch has no such log
/// level, it logs as usual.
class QuietLog {
 public:
  QuietLog() { set(kFatal); }
  ~QuietLog() { set(usual()); }
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;

 private:
  static constexpr int kFatal = 3;

#if defined(__linux__)
  /// PyTorch's log level, which all threads share; null if it need not change.
  static int* level() {
    constexpr uint64_t kQuietVersion = uint64_t{2} << 56 | uint64_t{13} << 48;
    static int* const level =
        aoti_torch_abi_version() >= kQuietVersion
            ? nullptr
            : static_cast<int*>(dlsym(RTLD_DEFAULT, "FLAGS_caffe2_log_level"));
    return level;
  }
  /// The level at the first call. A later read could see the kFatal that another thread has set.
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

/// Throws the allocator's message if the device of `like` has no room for a tensor of these sizes.
inline void check_memory(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  using torch::stable::detail::from, torch::stable::detail::to;
  // An expanded tensor can have more elements than any memory has bytes.
  double bytes = static_cast<double>(aoti_torch_dtype_element_size(to<int32_t>(from(dtype))));
  for (const int64_t size : sizes) bytes *= static_cast<double>(size);
  const auto asked = static_cast<int64_t>(std::min(bytes, 0x1p62));
  std::array<StableIValue, 2> stack{from(asked), from(int64_t{like.get_device_index()})};
  // This fails without Python; the caller's error then only says that a call failed.
  if (torch_call_dispatcher(SELECTIVE_SCAN_OP("_allocation_error"), "", stack.data(),
                            TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    return;
  }
  const auto message = to<Text>(stack[0]);
  if (!message.empty()) throw std::runtime_error(message);
}

/// Returns the result of `function`, which allocates a tensor of these sizes on the device of
/// `like`. If that fails although there is memory, calls it once more: another thread may have
/// freed some.
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
