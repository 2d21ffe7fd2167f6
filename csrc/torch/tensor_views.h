// Tensor utilities of the ops besides checks: component types, views, allocation, and calls of
// PyTorch's ops.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "../core/element.h"
#include "../core/params.h"
#include "allocation.h"
#include "huge_pages.h"

namespace selective_scan::op {

using OptionalTensor = std::optional<Tensor>;

/// Returns the number of real components per element.
inline int64_t components(const Tensor& tensor) {
  return is_complex_dtype(dtype_of(tensor)) ? 2 : 1;
}

inline DType component_dtype(const Tensor& tensor) {
  switch (dtype_of(tensor)) {
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

/// A view with the strides of a tensor's dimensions, in their order; kNone assigns no dimension.
template <class... Strides>
ArrayView view_of(const Tensor& tensor, Strides... strides) {
  ArrayView view;
  // Inputs are only read; other viewed tensors may be written to.
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.dtype = component_dtype(tensor);
  const int64_t per_element = components(tensor);
  view.imag = per_element - 1;
  int64_t dim = 0;
  [[maybe_unused]] const auto take = [&](int64_t ArrayView::* stride) {
    if (stride != nullptr) view.*stride = tensor.stride(dim++) * per_element;
  };
  (take(strides), ...);
  return view;
}

constexpr int64_t ArrayView::* kNone = nullptr;

// Views of checked tensors, by the dimensions that operators share.

/// (dim,)
inline ArrayView channel_view(const Tensor& tensor) {
  return view_of(tensor, &ArrayView::channel);
}
/// (dim, dstate)
inline ArrayView pole_view(const Tensor& tensor) {
  return view_of(tensor, &ArrayView::channel, &ArrayView::state);
}
/// (sequences, dim, dstate)
inline ArrayView state_view(const Tensor& tensor) {
  return view_of(tensor, &ArrayView::batch, &ArrayView::channel, &ArrayView::state);
}
/// (batch, dim, seqlen), or (dim, seqlen)
inline ArrayView sequence_view(const Tensor& tensor) {
  const auto batch = tensor.dim() == 3 ? &ArrayView::batch : kNone;
  return view_of(tensor, batch, &ArrayView::channel, &ArrayView::step);
}

/// Returns a view that starts at the last step and has a negative step stride.
template <class View>
View reversed(View view, int64_t seqlen) {
  if (seqlen == 0) return view;
  view.data = element_at(view, (seqlen - 1) * view.step);
  view.step = -view.step;
  return view;
}
/// Adjusts a view of B or C with steps: if the state is complex, real tensors interleave (re, im)
/// along time.
inline ArrayView with_parts(ArrayView view, const Tensor& projection, bool is_complex) {
  if (!is_complex || components(projection) == 2) return view;
  view.imag = view.step;
  view.step *= 2;
  return view;
}

inline IntHeaderOnlyArrayRef sizes_of(const std::vector<int64_t>& sizes) {
  return {sizes.data(), sizes.size()};
}

/// Returns a view with these sizes and strides that begins `offset` elements after the tensor's
/// first.
inline Tensor view_as(const Tensor& tensor, IntHeaderOnlyArrayRef sizes,
                      IntHeaderOnlyArrayRef strides, int64_t offset = 0) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), offset, &handle));
  return Tensor(handle);
}
inline Tensor view_as(const Tensor& tensor, std::initializer_list<int64_t> sizes,
                      std::initializer_list<int64_t> strides, int64_t offset = 0) {
  return view_as(tensor, IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()),
                 IntHeaderOnlyArrayRef(strides.begin(), strides.size()), offset);
}

// New, uninitialized tensors. They come from the C interface if possible: the functions of
// torch::stable call the dispatcher by name, which takes several times as long as the allocation
// itself.

/// Returns the tensor itself. Asks for huge pages if it is a CPU tensor.
inline Tensor with_huge_pages(Tensor tensor) {
  if (tensor.is_cpu()) {
    int64_t storage_bytes;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &storage_bytes));
    advise_huge_pages(tensor.mutable_data_ptr(), storage_bytes);
  }
  return tensor;
}

/// Allocates a tensor on the device of `like`.
inline Tensor allocate(const Tensor& like, IntHeaderOnlyArrayRef sizes,
                       IntHeaderOnlyArrayRef strides, ScalarType dtype) {
  using torch::stable::detail::from, torch::stable::detail::to;
  const Place place = place_of(like);
  return with_huge_pages(allocating(like, sizes, dtype, [&] {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                 to<int32_t>(from(dtype)), place.type, place.index, &handle));
    return Tensor(handle);
  }));
}

/// Allocates a contiguous tensor.
inline Tensor allocate(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  constexpr size_t kMostDims = 64;  // of PyTorch's tensors
  std::array<int64_t, kMostDims> strides;
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return allocate(like, sizes, {strides.data(), sizes.size()}, dtype);
}

/// Does the same as torch.empty_like.
inline Tensor allocate_like(const Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    return with_huge_pages(allocating(tensor, [&] { return torch::stable::empty_like(tensor); }));
  }
  return allocate(tensor, tensor.sizes(), tensor.strides(), dtype_of(tensor));
}
/// Returns an undefined tensor if there is no `tensor`.
inline Tensor allocate_like(const OptionalTensor& tensor) {
  return tensor ? allocate_like(*tensor) : Tensor();
}

/// Calls an op that returns one tensor, by PyTorch's dispatcher. Every argument must be passed,
/// defaults included.
template <class... Arguments>
Tensor call(const char* op, const char* overload, const Arguments&... arguments) {
  using torch::stable::detail::from, torch::stable::detail::to;
  std::array<StableIValue, sizeof...(Arguments)> stack{from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

/// Does the same as torch.empty_like with a dtype, an argument that torch::stable's function lacks.
inline Tensor empty_like(const Tensor& tensor, ScalarType dtype) {
  return allocating(tensor, tensor.sizes(), dtype, [&] {
    return call("aten::empty_like", "", tensor, std::optional<ScalarType>(dtype), std::nullopt,
                std::nullopt, std::nullopt, std::nullopt);
  });
}

inline Tensor as_contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  return allocating(tensor, [&] { return torch::stable::contiguous(tensor); });
}
/// Copies with a cast if the dtypes differ. Returns the target.
inline Tensor copy(const Tensor& target, const Tensor& source) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(target.get(), source.get(), 0));
  return target;
}
/// Returns the tensor itself if it already has this dtype.
inline Tensor cast(const Tensor& tensor, ScalarType dtype) {
  if (dtype_of(tensor) == dtype) return tensor;
  const Tensor result = tensor.is_contiguous()
                            ? allocate(tensor, tensor.sizes(), tensor.strides(), dtype)
                            : empty_like(tensor, dtype);
  return copy(result, tensor);
}
/// Fills the defined tensors with zeros.
template <class... Tensors>
void fill_with_zeros(const std::tuple<Tensors...>& tensors) {
  const auto fill = [](Tensor tensor) {
    if (tensor.defined()) torch::stable::zero_(tensor);
  };
  std::apply([&](const auto&... all) { (fill(all), ...); }, tensors);
}
/// Returns a view if these sizes allow one, else a copy.
inline Tensor reshaped(const Tensor& tensor, IntHeaderOnlyArrayRef sizes) {
  return allocating(tensor, [&] { return torch::stable::reshape(tensor, sizes); });
}
/// Sums over `dims`. With `keepdim` they remain as dimensions of size 1.
inline Tensor sum_over(const Tensor& tensor, const std::vector<int64_t>& dims,
                       bool keepdim = false) {
  std::vector<int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
  for (const int64_t dim : dims) sizes[dim] = 1;
  return allocating(tensor, sizes_of(sizes), dtype_of(tensor),
                    [&] { return torch::stable::sum(tensor, sizes_of(dims), keepdim); });
}

}  // namespace selective_scan::op
