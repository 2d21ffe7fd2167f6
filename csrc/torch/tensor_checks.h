// Checks of one tensor, and their messages. Python's _checks.py has the same messages for the
// reference and for fake tensors; one table of bad calls tests both.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "joined_text.h"

namespace selective_scan::op {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

/// Throws "selective_scan: " and the text. STD_TORCH_CHECK would put a source line before the text
/// that the user should read.
[[noreturn]] void fail_with(const std::string& text);
[[noreturn]] void fail(const auto&... parts) {
  fail_with(joined(parts...));
}

/// Returns tensor.scalar_type(). Unlike that function, this one does not ask PyTorch for the number
/// of one dtype after another, which adds up in small calls.
ScalarType dtype_of(const Tensor& tensor);

/// Text as Python prints it: "bfloat16", "cuda:0", "(2, 16)", "(64,)".
std::string dtype_name(ScalarType dtype);
std::string device_name(const Tensor& tensor);
std::string sizes_text(std::span<const int64_t> sizes);
std::string shape_text(const Tensor& tensor);
std::string strides_text(const Tensor& tensor);

/// A required dimension of a shape: its name and size.
struct Dim {
  static constexpr int64_t kAny = -1;

  const char* name;
  int64_t size = kAny;
};
using Dims = std::initializer_list<Dim>;

bool is_complex_dtype(ScalarType dtype);
/// float16 or bfloat16
bool is_half_dtype(ScalarType dtype);
/// float64 or complex128
bool is_double_dtype(ScalarType dtype);

bool is_dense(const Tensor& tensor);
/// The device of a tensor.
struct Place {
  int32_t type, index;
  bool operator==(const Place&) const = default;
};
Place place_of(const Tensor& tensor);
bool has_sizes(const Tensor& tensor, std::span<const int64_t> wanted);

void check_dense(const char* name, const Tensor& tensor);
void check_same_device(const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other);
/// Checks the dtype. `remark` follows the list of allowed dtypes in the message.
void check_dtype(const char* name, const Tensor& tensor, std::span<const ScalarType> allowed,
                 const char* remark = "");
inline void check_dtype(const char* name, const Tensor& tensor,
                        std::initializer_list<ScalarType> allowed, const char* remark = "") {
  check_dtype(name, tensor, std::span(allowed.begin(), allowed.size()), remark);
}
[[noreturn]] void fail_on_shape(const char* name, const Tensor& tensor, std::span<const Dim> dims);
void check_shape(const char* name, const Tensor& tensor, Dims dims);
/// Checks that a tensor is dense and on the device of `other`, then its dtype and shape.
void check_beside(const char* name, const Tensor& tensor, const char* other_name,
                  const Tensor& other, std::initializer_list<ScalarType> allowed, Dims dims);
/// Checks that a tensor has the shape of `other`.
void check_shape_of(const char* name, const Tensor& tensor, const char* other_name,
                    const Tensor& other);
/// Checks that a tensor is dense and has the device, dtype and shape of `other`.
void check_like(const char* name, const Tensor& tensor, const char* other_name,
                const Tensor& other);
/// Checks a tensor that is changed in place: elements that share memory could not hold two values.
void check_changed(const char* name, const Tensor& tensor);
/// Checks a tensor of any strides that the gradient of `input` will be written to.
void check_given_gradient(const char* name, const Tensor& gradient, const char* input_name,
                          const Tensor& input);

/// Checks that the groups of B or C divide the dimension `divided`.
void check_groups(const char* name, int64_t groups, Dim divided);

constexpr std::initializer_list<ScalarType> kRealDtypes = {
    ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double};

}  // namespace selective_scan::op
