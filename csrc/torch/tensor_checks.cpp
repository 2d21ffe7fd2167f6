#include "tensor_checks.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace selective_scan::op {
namespace {

/// "(a, b)", and "(a,)" for one entry.
template <class Range, class TextOf>
std::string tuple_text(const Range& entries, const TextOf& text_of) {
  std::string text = "(";
  size_t count = 0;
  for (const auto& entry : entries) {
    if (count++ > 0) text += ", ";
    text += text_of(entry);
  }
  return text + (count == 1 ? ",)" : ")");
}
/// Gives the text of sizes or strides.
std::string tuple_text(torch::headeronly::IntHeaderOnlyArrayRef entries) {
  return tuple_text(entries, [](int64_t entry) { return std::to_string(entry); });
}

/// "a, b or c"
std::string alternatives_text(std::span<const ScalarType> dtypes) {
  std::string text;
  size_t index = 0;
  for (ScalarType dtype : dtypes) {
    if (index > 0) text += index + 1 == dtypes.size() ? " or " : ", ";
    text += dtype_name(dtype);
    ++index;
  }
  return text;
}

std::string dim_names(std::span<const Dim> dims) {
  return tuple_text(dims, [](const Dim& dim) { return dim.name; });
}

/// Whether its sizes are these, as far as they are known.
bool has_shape(const Tensor& tensor, std::span<const Dim> dims) {
  const auto sizes = tensor.sizes();
  if (sizes.size() != dims.size()) return false;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i].size != Dim::kAny && dims[i].size != sizes[i]) return false;
  }
  return true;
}

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
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return "another dtype";
  }
}

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

std::string shape_text(const Tensor& tensor) {
  return tuple_text(tensor.sizes());
}

std::string strides_text(const Tensor& tensor) {
  return tuple_text(tensor.strides());
}

bool is_complex_dtype(ScalarType dtype) {
  return dtype == ScalarType::ComplexFloat || dtype == ScalarType::ComplexDouble;
}

bool is_double_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::ComplexDouble;
}

bool is_dense(const Tensor& tensor) {
  int32_t layout;  // by the C interface: Tensor::layout() is younger than PyTorch 2.10
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

Place place_of(const Tensor& tensor) {
  Place place;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &place.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &place.index));
  return place;
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
    fail(name, " must have dtype ", alternatives_text(allowed), remark, ", got ",
         dtype_name(dtype));
  }
}

void check_shape(const char* name, const Tensor& tensor, std::span<const Dim> dims) {
  if (!has_shape(tensor, dims)) fail_on_shape(name, tensor, dims);
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
  const std::string expected = tuple_text(
      dims, [](const Dim& dim) { return dim.size == Dim::kAny ? "*" : std::to_string(dim.size); });
  fail(name, " must be ", dim_names(dims), any_known ? " = " + expected : "", ", got ",
       shape_text(tensor));
}

void check_shape_of(const char* name, const Tensor& tensor, const char* other_name,
                    const Tensor& other) {
  const auto sizes = tensor.sizes(), wanted = other.sizes();
  if (sizes.size() != wanted.size() || !std::equal(sizes.begin(), sizes.end(), wanted.begin())) {
    fail(name, " must have the shape of ", other_name, ", ", shape_text(other), ", got ",
         shape_text(tensor));
  }
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
  check_dense(name, gradient);
  check_same_device(name, gradient, input_name, input);
  check_dtype(name, gradient, {dtype_of(input)});
  check_shape_of(name, gradient, input_name, input);
  check_changed(name, gradient);
}

void check_groups(const char* name, int64_t groups, Dim divided) {
  if (groups == 0 || divided.size % groups != 0) {
    fail(name, " must have a number of groups that divides ", divided.name, " = ", divided.size,
         ", got ", groups);
  }
}

}  // namespace selective_scan::op
