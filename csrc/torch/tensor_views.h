// What the ops need of tensors beside checks: component types, and memory like that of a tensor.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>

#include "../core/dtype.h"
#include "tensor_checks.h"

namespace selective_scan::op {

using OptionalTensor = std::optional<Tensor>;

/// Real components per element.
inline int64_t components(const Tensor& tensor) {
  return is_complex_dtype(tensor.scalar_type()) ? 2 : 1;
}

inline DType component_dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
    case ScalarType::ComplexDouble:
      return DType::kFloat64;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

inline ScalarType float_dtype(bool is_double, bool is_complex) {
  if (is_complex) return is_double ? ScalarType::ComplexDouble : ScalarType::ComplexFloat;
  return is_double ? ScalarType::Double : ScalarType::Float;
}

/// empty_like with another dtype; torch::stable's has no such argument.
inline Tensor empty_like(const Tensor& tensor, ScalarType dtype) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(tensor),       from(std::optional<ScalarType>(dtype)),
                                    from(std::nullopt), from(std::nullopt),
                                    from(std::nullopt), from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

/// Scratch memory that lives as long as this object; null for 0 bytes.
class Workspace {
 public:
  Workspace(const Tensor& like, int64_t bytes) {
    if (bytes == 0) return;
    const std::array<int64_t, 1> shape = {bytes};
    storage_ = torch::stable::new_empty(like, shape, ScalarType::Byte);
    data_ = storage_.mutable_data_ptr();
  }

  void* data() const { return data_; }

 private:
  Tensor storage_;
  void* data_ = nullptr;
};

}  // namespace selective_scan::op
