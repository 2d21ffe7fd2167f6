#include "tensor_checks.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace selective_scan::op {
namespace {

/// Returns whether a tensor has these sizes, ignoring unknown ones.
bool has_shape(const Tensor& tensor, std::span<const Dim> dims) {
  const auto sizes = tensor.sizes();
  if (sizes.size() != dims.size()) return false;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i].size != Dim::kAny && dims[i].size != sizes[i]) return false;
  }
  return true;
}

struct DtypeName {
  ScalarType dtype;
  const char* name;
};
constexpr DtypeName kDtypeNames[] = {
    {ScalarType::Float, "float32"},
    {ScalarType::Double, "float64"},
    {ScalarType::Half, "float16"},
    {ScalarType::BFloat16, "bfloat16"},
    {ScalarType::ComplexHalf, "complex32"},
    {ScalarType::ComplexFloat, "complex64"},
    {ScalarType::ComplexDouble, "complex128"},
    {ScalarType::Bool, "bool"},
    {ScalarType::Byte, "uint8"},
    {ScalarType::Char, "int8"},
    {ScalarType::Short, "int16"},
    {ScalarType::Int, "int32"},
    {ScalarType::Long, "int64"},
    {ScalarType::UInt16, "uint16"},
    {ScalarType::UInt32, "uint32"},
    {ScalarType::UInt64, "uint64"},
    {ScalarType::Float8_e5m2, "float8_e5m2"},
    {ScalarType::Float8_e4m3fn, "float8_e4m3fn"},
};

}  // namespace

void fail_with(const std::string& text) {
  throw std::runtime_error("selective_scan: " + text);
}

ScalarType dtype_of(const Tensor& tensor) {
  static constexpr auto kUnknown = ScalarType::Undefined;
  static const auto by_number = [] {
    using torch::stable::detail::from, torch::stable::detail::to;
    std::array<ScalarType, 64> types;
    types.fill(kUnknown);
    for (ScalarType type :
         {ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16,
          ScalarType::ComplexFloat, ScalarType::ComplexDouble, ScalarType::Int, ScalarType::Long}) {
      const auto number = static_cast<uint32_t>(to<int32_t>(from(type)));
      if (number < types.size()) types[number] = type;
    }
    return types;
  }();
  int32_t number;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  const auto index = static_cast<uint32_t>(number);
  const ScalarType known = index < by_number.size() ? by_number[index] : kUnknown;
  return known == kUnknown ? tensor.scalar_type() : known;
}

std::string dtype_name(ScalarType dtype) {
  for (const DtypeName& it : kDtypeNames) {
    if (it.dtype == dtype) return it.name;
  }
  return "another dtype";
}

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

std::string sizes_text(std::span<const int64_t> sizes) {
  return tuple_text(sizes, [](int64_t size) { return std::to_string(size); });
}

std::string shape_text(const Tensor& tensor) {
  return sizes_text(tensor.sizes());
}

std::string strides_text(const Tensor& tensor) {
  return sizes_text(tensor.strides());
}

bool is_complex_dtype(ScalarType dtype) {
  return dtype == ScalarType::ComplexFloat || dtype == ScalarType::ComplexDouble;
}

bool is_half_dtype(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

bool is_double_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::ComplexDouble;
}

bool is_dense(const Tensor& tensor) {
  int32_t layout;  // by the C interface: Tensor::layout() is newer than PyTorch 2.10
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

Place place_of(const Tensor& tensor) {
  Place place;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &place.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &place.index));
  return place;
}

bool has_sizes(const Tensor& tensor, std::span<const int64_t> wanted) {
  const auto sizes = tensor.sizes();
  return std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end());
}

void check_dense(const char* name, const Tensor& tensor) {
  if (!is_dense(tensor)) fail(name, " must be a dense (strided) tensor, got another layout");
}

void check_same_device(const char* name, const Tensor& tensor, const char* other_name,
                       const Tensor& other) {
  if (place_of(tensor) != place_of(other)) {
    fail(name, " must be on the device of ", other_name, ", ", device_name(other), ", got ",
         device_name(tensor));
  }
}

void check_dtype(const char* name, const Tensor& tensor, std::span<const ScalarType> allowed,
                 const char* remark) {
  const ScalarType dtype = dtype_of(tensor);
  if (std::find(allowed.begin(), allowed.end(), dtype) == allowed.end()) {
    fail(name, " must have dtype ", alternatives_text(allowed, dtype_name), remark, ", got ",
         dtype_name(dtype));
  }
}

void check_shape(const char* name, const Tensor& tensor, Dims dims) {
  const std::span wanted(dims.begin(), dims.size());
  if (!has_shape(tensor, wanted)) fail_on_shape(name, tensor, wanted);
}

void check_beside(const char* name, const Tensor& tensor, const char* other_name,
                  const Tensor& other, std::initializer_list<ScalarType> allowed, Dims dims) {
  check_dense(name, tensor);
  check_same_device(name, tensor, other_name, other);
  check_dtype(name, tensor, allowed);
  check_shape(name, tensor, dims);
}

void fail_on_shape(const char* name, const Tensor& tensor, std::span<const Dim> dims) {
  const bool any_known =
      std::any_of(dims.begin(), dims.end(), [](const Dim& dim) { return dim.size != Dim::kAny; });
  const std::string names = tuple_text(dims, [](const Dim& dim) { return dim.name; });
  const std::string expected = tuple_text(
      dims, [](const Dim& dim) { return dim.size == Dim::kAny ? "*" : std::to_string(dim.size); });
  fail(name, " must be ", names, any_known ? " = " + expected : "", ", got ", shape_text(tensor));
}

void check_shape_of(const char* name, const Tensor& tensor, const char* other_name,
                    const Tensor& other) {
  if (!has_sizes(tensor, other.sizes())) {
    fail(name, " must have the shape of ", other_name, ", ", shape_text(other), ", got ",
         shape_text(tensor));
  }
}

void check_like(const char* name, const Tensor& tensor, const char* other_name,
                const Tensor& other) {
  check_dense(name, tensor);
  check_same_device(name, tensor, other_name, other);
  check_dtype(name, tensor, {dtype_of(other)});
  check_shape_of(name, tensor, other_name, other);
}

void check_changed(const char* name, const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  if (tensor.numel() == 0) return;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 2 || strides[i] != 0) continue;
    fail(name, " must have no stride of 0, got strides ", strides_text(tensor));
  }
}

void check_given_gradient(const char* name, const Tensor& gradient, const char* input_name,
                          const Tensor& input) {
  check_like(name, gradient, input_name, input);
  check_changed(name, gradient);
}

void check_groups(const char* name, int64_t groups, Dim divided) {
  if (groups == 0 || divided.size % groups != 0) {
    fail(name, " must have a number of groups that divides ", divided.name, " = ", divided.size,
         ", got ", groups);
  }
}

}  // namespace selective_scan::op
