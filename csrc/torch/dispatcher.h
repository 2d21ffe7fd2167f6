// Ops that are called through PyTorch's dispatcher.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>

#include <array>

namespace selective_scan::op {

/// Calls an op that returns one tensor. Every argument must be passed, defaults included.
template <class... Arguments>
torch::stable::Tensor call(const char* op, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<torch::stable::Tensor>(stack[0]);
}

}  // namespace selective_scan::op
