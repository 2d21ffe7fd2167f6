#include "diagonal_arguments.h"

#include <algorithm>

namespace selective_scan::op {
namespace {

bool is_half_dtype(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

constexpr std::initializer_list<ScalarType> kAnyDtypes = {
    ScalarType::Float,  ScalarType::Half,         ScalarType::BFloat16,
    ScalarType::Double, ScalarType::ComplexFloat, ScalarType::ComplexDouble};
constexpr std::initializer_list<ScalarType> kDtypesBesideComplex = {
    ScalarType::Float, ScalarType::Double, ScalarType::ComplexFloat, ScalarType::ComplexDouble};

void check_dtypes(const Tensor& a, const char* b_name, const Tensor& b,
                  const OptionalTensor& initial_state) {
  check_dtype("a", a, kAnyDtypes);
  check_dtype(b_name, b, kAnyDtypes);
  const bool complex_a = is_complex_dtype(a.scalar_type());
  const bool complex_b = is_complex_dtype(b.scalar_type());
  if (complex_b && is_half_dtype(a.scalar_type())) {
    check_dtype("a", a, kDtypesBesideComplex, (std::string(" (complex ") + b_name + ")").c_str());
  }
  if (complex_a && is_half_dtype(b.scalar_type())) {
    check_dtype(b_name, b, kDtypesBesideComplex, " (complex a)");
  }
  if (!initial_state) return;
  if (complex_a || complex_b) {
    check_dtype("initial_state", *initial_state,
                {ScalarType::ComplexFloat, ScalarType::ComplexDouble});
  } else {
    check_dtype("initial_state", *initial_state, {ScalarType::Float, ScalarType::Double});
  }
}

/// Has `first` in place of the first size.
std::string row_shape_text(const Tensor& b, int64_t first) {
  const auto sizes = b.sizes();
  std::string text = "(";
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(i > 0 ? sizes[i] : first);
  }
  return text + (sizes.size() == 2 ? ",)" : ")");
}

void check_shapes(const Tensor& a, const char* b_name, const Tensor& b,
                  const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens) {
  if (b.dim() == 0) fail(b_name, " must be (..., seqlen), got ", shape_text(b));
  const bool is_packed = cu_seqlens.has_value();
  if (is_packed && b.dim() == 1) {
    fail(b_name, " must be (1, ..., seqlen) where cu_seqlens is given, got ", shape_text(b));
  }
  const int64_t sequences = is_packed ? packed_sequences(*cu_seqlens, b_name, b).count : 0;
  bool matches = !initial_state || initial_state->dim() == b.dim() - 1;
  for (int64_t i = 0; initial_state && matches && i < initial_state->dim(); ++i) {
    matches = initial_state->size(i) == (is_packed && i == 0 ? sequences : b.size(i));
  }
  if (!matches) {
    fail("initial_state must be ", is_packed ? "(sequences, ...)" : "(...)", " = ",
         row_shape_text(b, is_packed ? sequences : b.size(0)), ", got ",
         shape_text(*initial_state));
  }
  bool fits = a.dim() <= b.dim();
  for (int64_t i = 1; fits && i <= a.dim(); ++i) {
    const int64_t size = a.size(a.dim() - i);
    fits = size == 1 || size == b.size(b.dim() - i);
  }
  if (!fits) {
    fail("a must be broadcastable to ", b_name, ", ", shape_text(b), ", got ", shape_text(a));
  }
}

}  // namespace

void check_diagonal_scan(const Tensor& a, const char* b_name, const Tensor& b,
                         const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens) {
  check_dense("a", a);
  check_dense(b_name, b);
  if (initial_state) check_dense("initial_state", *initial_state);
  if (cu_seqlens) check_dense("cu_seqlens", *cu_seqlens);
  check_same_device("a", a, b_name, b);
  if (initial_state) check_same_device("initial_state", *initial_state, b_name, b);
  if (cu_seqlens) check_same_device("cu_seqlens", *cu_seqlens, b_name, b);
  check_dtypes(a, b_name, b, initial_state);
  if (cu_seqlens) check_dtype("cu_seqlens", *cu_seqlens, kIndexDtypes);
  check_shapes(a, b_name, b, initial_state, cu_seqlens);
}

bool is_broadcast(const Tensor& a, const Tensor& b) {
  return a.numel() != b.numel();
}

bool is_broadcast_in_time(const Tensor& a, const Tensor& b) {
  const int64_t steps = a.dim() == 0 ? 1 : a.size(a.dim() - 1);
  return steps != b.size(b.dim() - 1);
}

std::vector<int64_t> broadcast_dims(const Tensor& a, const Tensor& b) {
  std::vector<int64_t> dims;
  const int64_t missing = b.dim() - a.dim();
  for (int64_t dim = 0; dim < b.dim(); ++dim) {
    const int64_t size = dim < missing ? 1 : a.size(dim - missing);
    if (size != b.size(dim)) dims.push_back(dim);
  }
  return dims;
}

RowLayout::RowLayout(const Tensor& shape, DiagonalScanParams& params) : params_(params) {
  const auto sizes = shape.sizes();
  sizes_.assign(sizes.begin(), sizes.end() - 1);
  params.seqlen = sizes[sizes.size() - 1];
  params.rows = 1;
  for (int64_t size : sizes_) params.rows *= size;
}

RowLayout::Entry& RowLayout::add(DiagonalArray& array, const Tensor& tensor,
                                 int64_t row_dims_of_tensor) {
  // Inputs are only read; outputs are freshly allocated, so writing to them is safe.
  array.data = const_cast<void*>(tensor.const_data_ptr());
  array.dtype = component_dtype(tensor);
  array.imag = components(tensor) - 1;
  Entry entry{&array, std::vector<int64_t>(sizes_.size(), 0)};
  const int64_t missing = static_cast<int64_t>(sizes_.size()) - row_dims_of_tensor;
  for (int64_t dim = 0; dim < row_dims_of_tensor; ++dim) {
    if (tensor.size(dim) == 1) continue;
    entry.strides[missing + dim] = tensor.stride(dim) * components(tensor);
  }
  entries_.push_back(std::move(entry));
  return entries_.back();
}

void RowLayout::add_steps(DiagonalArray& array, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  add(array, tensor, std::max<int64_t>(last, 0));
  array.step = last < 0 || tensor.size(last) == 1 ? 0 : tensor.stride(last) * components(tensor);
}

void RowLayout::add_rows(DiagonalArray& array, const Tensor& tensor) {
  Entry& entry = add(array, tensor, tensor.dim());
  if (!params_.packed.present()) return;
  entry.strides[0] = 0;
  array.step = tensor.stride(0) * components(tensor);
}

bool RowLayout::finish() {
  std::vector<size_t> kept;  // the last of each run of merged dimensions
  std::vector<int64_t> merged_sizes;
  for (size_t dim = 0; dim < sizes_.size(); ++dim) {
    if (sizes_[dim] == 1) continue;
    const bool merges =
        !kept.empty() && std::all_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
          return entry.strides[kept.back()] == sizes_[dim] * entry.strides[dim];
        });
    if (merges) {
      kept.back() = dim;
      merged_sizes.back() *= sizes_[dim];
    } else {
      kept.push_back(dim);
      merged_sizes.push_back(sizes_[dim]);
    }
  }
  if (kept.size() > kMaxRowDims) return false;
  params_.row_dims = static_cast<int>(kept.size());
  std::copy(merged_sizes.begin(), merged_sizes.end(), params_.row_sizes);
  for (const Entry& entry : entries_) {
    for (size_t i = 0; i < kept.size(); ++i) entry.array->row[i] = entry.strides[kept[i]];
  }
  return true;
}

DiagonalArray reversed(DiagonalArray array, int64_t seqlen) {
  array.data =
      static_cast<char*>(array.data) + (seqlen - 1) * array.step * element_size(array.dtype);
  array.step = -array.step;
  return array;
}

}  // namespace selective_scan::op
