// Checks of one tensor, and the sentences they fail with. Python's _checks.py says the same
// sentences for the reference and for fake tensors; one table of bad calls tests both.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "joined_text.h"

namespace selective_scan::op {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

/// Throws "selective_scan: " and the text. Not STD_TORCH_CHECK, which puts a source line in front
/// of what the user should read.
[[noreturn]] void fail_with(const std::string& text);
[[noreturn]] void fail(const auto&... parts) {
  fail_with(joined(parts...));
}

/// tensor.scalar_type() without asking PyTorch for the number of one dtype after another, which
/// adds up in small calls.
ScalarType dtype_of(const Tensor& tensor);

/// These are texts as Python prints them: "bfloat16", "cuda:0", "(2, 16)", "(64,)".
std::string dtype_name(ScalarType dtype);
std::string device_name(const Tensor& tensor);
std::string sizes_text(std::span<const int64_t> sizes);
std::string shape_text(const Tensor& tensor);
std::string strides_text(const Tensor& tensor);

/// One dimension that a shape must have: its name and size.
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
/// `remark` stands behind the list of allowed dtypes.
void check_dtype(const char* name, const Tensor& tensor, std::span<const ScalarType> allowed,
                 const char* remark = "");
inline void check_dtype(const char* name, const Tensor& tensor,
                        std::initializer_list<ScalarType> allowed, const char* remark = "") {
  check_dtype(name, tensor, std::span(allowed.begin(), allowed.size()), remark);
}
[[noreturn]] void fail_on_shape(const char* name, const Tensor& tensor, std::span<const Dim> dims);
void check_shape(const char* name, const Tensor& tensor, Dims dims);
/// Checks all of these, the shape last.
void check_beside(const char* name, const Tensor& tensor, const char* other_name,
                  const Tensor& other, std::initializer_list<ScalarType> allowed, Dims dims);
/// That of `other`.
void check_shape_of(const char* name, const Tensor& tensor, const char* other_name,
                    const Tensor& other);
/// Checks that a tensor has the device, dtype and shape of `other`.
void check_like(const char* name, const Tensor& tensor, const char* other_name,
                const Tensor& other);
/// Checks a tensor that is changed in place: elements that share memory would have no one value.
void check_changed(const char* name, const Tensor& tensor);
/// Checks a tensor of any strides into which the gradient of `input` is to be written.
void check_given_gradient(const char* name, const Tensor& gradient, const char* input_name,
                          const Tensor& input);

/// The groups of B or C share the dimension `divided`.
void check_groups(const char* name, int64_t groups, Dim divided);

constexpr std::initializer_list<ScalarType> kRealDtypes = {
    ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double};

}  // namespace selective_scan::op
