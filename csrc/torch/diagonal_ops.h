// The forward and backward ops of the general diagonal scan on one backend.
//
// A Backend (backend.h) also has for these:
//
//   int64_t num_segments(const DiagonalScanParams& params) const
//       The number of time segments into which the kernels split every row.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/diagonal_params.h"
#include "argument_tables.h"
#include "backend.h"
#include "checked_call.h"
#include "packed_sequences.h"

namespace selective_scan::op {

/// The arguments of the forward op, and those of the backward op besides gradients, in which h
/// takes the place of b.
using DiagonalArguments = tables::DiagonalScanArguments;
using DiagonalBackwardArguments = tables::DiagonalScanBackwardArguments;

inline void check_diagonal_shapes(const Tensor& a, const char* b_name, const Tensor& b,
                                  const OptionalTensor& initial_state,
                                  const OptionalTensor& cu_seqlens) {
  if (b.dim() == 0) fail(b_name, " must be (..., seqlen), got ", shape_text(b));
  const bool is_packed = cu_seqlens.has_value();
  if (is_packed && b.dim() == 1) {
    fail(b_name, " must be (1, ..., seqlen) where cu_seqlens is given, got ", shape_text(b));
  }
  std::vector<int64_t> wanted(b.sizes().begin(), b.sizes().end() - 1);
  if (is_packed) {
    check_shape("cu_seqlens", *cu_seqlens, {{"sequences+1"}});
    if (cu_seqlens->size(0) == 0) {
      fail("cu_seqlens must have sequences+1 of at least 1, got ", shape_text(*cu_seqlens));
    }
    if (b.size(0) != 1) {
      fail(b_name, " must have batch of 1 where cu_seqlens is given, got ", shape_text(b));
    }
    wanted.front() = cu_seqlens->size(0) - 1;
  }
  if (initial_state && !has_sizes(*initial_state, wanted)) {
    fail("initial_state must be ", is_packed ? "(sequences, ...)" : "(...)", " = ",
         sizes_text(wanted), ", got ", shape_text(*initial_state));
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

/// Refuses invalid and unsupported calls; fills in the types, and the sequences if they are packed.
void set_scan(DiagonalScanParams& params, const auto& table, const auto& args, const char* b_name,
              const Tensor& b) {
  const CheckedCall call(table, {}, args.tensors());
  check_diagonal_shapes(args.a, b_name, b, args.initial_state, args.cu_seqlens);
  params.is_complex = call.is_complex();
  params.is_double = call.is_double();
  if (args.cu_seqlens) params.packed = packed_sequences(*args.cu_seqlens, b.size(b.dim() - 1));
}

/// Return whether a is broadcast to b in any dimension, and in time.
inline bool is_broadcast(const Tensor& a, const Tensor& b) {
  return a.numel() != b.numel();
}

inline bool is_broadcast_in_time(const Tensor& a, const Tensor& b) {
  const int64_t steps = a.dim() == 0 ? 1 : a.size(a.dim() - 1);
  return steps != b.size(b.dim() - 1);
}

/// The dimensions over which the gradient of a is summed.
inline std::vector<int64_t> broadcast_dims(const Tensor& a, const Tensor& b) {
  std::vector<int64_t> dims;
  const int64_t missing = b.dim() - a.dim();
  for (int64_t dim = 0; dim < b.dim(); ++dim) {
    const int64_t size = dim < missing ? 1 : a.size(dim - missing);
    if (size != b.size(dim)) dims.push_back(dim);
  }
  return dims;
}

/// Collects the arrays of a call. finish() merges those row dimensions that can be merged in every
/// array.
class RowLayout {
 public:
  /// The last dimension of `shape` is time, which is not one of the row dimensions. If `reverse`,
  /// arrays begin at their last step.
  RowLayout(const Tensor& shape, DiagonalScanParams& params, bool reverse)
      : params_(params), reverse_(reverse) {
    const auto sizes = shape.sizes();
    sizes_.assign(sizes.begin(), sizes.end() - 1);
    params.seqlen = sizes[sizes.size() - 1];
    params.rows = 1;
    for (int64_t size : sizes_) params.rows *= size;
  }

  /// Adds an array of shape (..., seqlen), or one that broadcasts to it, or of shape (...,
  /// segments).
  void add_steps(DiagonalArray& array, const Tensor& tensor, bool are_segments = false) {
    const int64_t last = tensor.dim() - 1;
    add(array, tensor, std::max<int64_t>(last, 0));
    array.step = last < 0 || tensor.size(last) == 1 ? 0 : tensor.stride(last) * components(tensor);
    if (reverse_ && !are_segments) array = reversed(array, params_.seqlen);
  }
  /// Adds an array of shape (...). With packed sequences its shape is (sequences, ...): they
  /// replace the batch of 1.
  void add_rows(DiagonalArray& array, const Tensor& tensor) {
    Entry& entry = add(array, tensor, tensor.dim());
    if (!params_.packed.present()) return;
    entry.strides[0] = 0;
    array.step = tensor.stride(0) * components(tensor);
  }

  /// Returns false if more than kMaxRowDims row dimensions remain.
  [[nodiscard]] bool finish() {
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

 private:
  struct Entry {
    DiagonalArray* array;
    std::vector<int64_t> strides;
  };

  Entry& add(DiagonalArray& array, const Tensor& tensor, int64_t row_dims_of_tensor) {
    // Inputs are only read. Outputs are freshly allocated, so writing to them is safe.
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

  DiagonalScanParams& params_;
  bool reverse_;
  std::vector<int64_t> sizes_;
  std::vector<Entry> entries_;
};

/// Returns a contiguous copy of `tensor`, broadcast to the shape of `shape`.
inline Tensor expanded_copy(const Tensor& tensor, const Tensor& shape) {
  return copy(allocate(tensor, shape.sizes(), dtype_of(tensor)), tensor);
}

/// Returns `values` with the strides of a result like `like`.
inline Tensor laid_out_like(const Tensor& like, const Tensor& values) {
  return copy(empty_like(like, values.scalar_type()), values);
}

/// Returns b's dtype, or its complex counterpart if the scan is complex.
inline ScalarType result_dtype(const DiagonalScanParams& params, const Tensor& b) {
  return params.is_complex ? float_dtype(is_double_dtype(b.scalar_type()), true) : b.scalar_type();
}

template <class Backend>
Tensor diagonal_scan_fwd(const DiagonalArguments& args) {
  const auto& [a, b, initial_state, reverse, cu_seqlens] = args;
  DiagonalForwardParams params;
  set_scan(params, tables::kDiagonalScan, args, "b", b);
  params.packed.reversed = reverse;
  const Backend backend(b);
  backend.check(params.packed);
  // Rows with more dimensions than the kernels support are copied: in contiguous copies they merge
  // into one dimension.
  for (const bool compact : {false, true}) {
    const Tensor a_rows = compact ? expanded_copy(a, b) : a;
    const Tensor b_rows = compact ? as_contiguous(b) : b;
    Tensor h = empty_like(b_rows, result_dtype(params, b));
    if (h.numel() == 0) return h;
    if (cu_seqlens) torch::stable::zero_(h);  // for steps outside all sequences

    RowLayout layout(b, params, reverse);
    layout.add_steps(params.a, a_rows);
    layout.add_steps(params.b, b_rows);
    layout.add_steps(params.h, h);
    Tensor initial_rows;
    if (initial_state) {
      initial_rows = compact ? as_contiguous(*initial_state) : *initial_state;
      layout.add_rows(params.initial_state, initial_rows);
    }
    if (!layout.finish()) continue;
    launch_with_workspace(backend, b, params);
    return compact ? laid_out_like(b, h) : h;
  }
  fail("the rows of b could not be laid out");
}

/// Returns the tensor that the kernel writes for da: da itself or, if a is broadcast, values still
/// to be summed over broadcast_dims(): one per step, or one per time segment.
inline Tensor new_da_values(const DiagonalScanParams& params, const Tensor& a, const Tensor& h,
                            bool in_time, int64_t segments) {
  const auto sizes = h.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  if (in_time) shape.back() = segments;
  const ScalarType dtype = float_dtype(params.is_double, is_complex_dtype(a.scalar_type()));
  return allocate(h, sizes_of(shape), dtype);
}

inline Tensor summed_to(const Tensor& a, const Tensor& h, const Tensor& values) {
  const Tensor sum = sum_over(values, broadcast_dims(a, h), /*keepdim=*/true);
  return copy(allocate_like(a), reshaped(sum, a.sizes()));
}

/// `complex_b` says whether b, whose gradient is wanted, was complex; h does not tell.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> diagonal_scan_bwd(const Tensor& dh, const Tensor& a,
                                                     const Tensor& h,
                                                     const OptionalTensor& initial_state,
                                                     bool reverse, const OptionalTensor& cu_seqlens,
                                                     bool complex_b) {
  DiagonalBackwardParams params;
  const DiagonalBackwardArguments args{a, h, initial_state, cu_seqlens};
  set_scan(params, tables::kDiagonalScanBackward, args, "h", h);
  params.packed.reversed = !reverse;
  check_like("dh", dh, "h", h);
  const Backend backend(h);
  backend.check(params.packed);
  if (!params.is_complex && complex_b)
    fail("h must be complex where b is, got ", dtype_name(h.scalar_type()));
  const ScalarType db_dtype = params.is_complex && !complex_b
                                  ? float_dtype(is_double_dtype(h.scalar_type()), false)
                                  : h.scalar_type();
  const bool sums_da = is_broadcast(a, h);
  // With packed sequences, PyTorch computes the sum over time.
  params.sum_da = is_broadcast_in_time(a, h) && !cu_seqlens;

  for (const bool compact : {false, true}) {
    const auto rows_of = [&](const Tensor& tensor) {
      return compact ? as_contiguous(tensor) : tensor;
    };
    const Tensor a_rows = compact ? expanded_copy(a, h) : a;
    const Tensor h_rows = rows_of(h);
    const Tensor dh_rows = rows_of(dh);
    Tensor db = empty_like(h_rows, db_dtype);
    Tensor initial_rows;
    Tensor dinitial_state;
    if (initial_state) {
      initial_rows = rows_of(*initial_state);
      dinitial_state = allocate_like(initial_rows);
    }
    if (h.numel() == 0) {
      Tensor da = allocate_like(a);
      if (initial_state) torch::stable::zero_(dinitial_state);
      return {torch::stable::zero_(da), db, dinitial_state};
    }

    RowLayout layout(h, params, !reverse);
    layout.add_steps(params.a, a_rows);
    layout.add_steps(params.dh, dh_rows);
    layout.add_steps(params.h_previous, h_rows);
    layout.add_steps(params.db, db);
    if (initial_state) {
      layout.add_rows(params.initial_state, initial_rows);
      layout.add_rows(params.dinitial_state, dinitial_state);
    }
    Tensor da_values =
        sums_da ? new_da_values(params, a, h, params.sum_da, backend.num_segments(params))
                : allocate_like(a_rows);
    if (cu_seqlens) {  // steps outside all sequences
      torch::stable::zero_(da_values);
      torch::stable::zero_(db);
    }
    layout.add_steps(params.da, da_values, params.sum_da);
    if (!layout.finish()) continue;
    DiagonalArray& previous = params.h_previous;
    previous.data = element_at(previous, previous.step);

    launch_with_workspace(backend, h, params);
    Tensor da = sums_da ? summed_to(a, h, da_values) : da_values;
    if (!compact) return {da, db, dinitial_state};
    // a may have fewer leading dimensions than h.
    return {laid_out_like(a, reshaped(da, a.sizes())), laid_out_like(h, db),
            initial_state ? laid_out_like(*initial_state, dinitial_state) : dinitial_state};
  }
  fail("the rows of h could not be laid out");
}

/// Registers the ops of a backend.
template <class Backend>
void implement_diagonal_scan(auto& library) {
  library.impl("diagonal_scan_fwd",
               TORCH_BOX(&DiagonalArguments::one_by_one<&diagonal_scan_fwd<Backend>>));
  library.impl("diagonal_scan_bwd", TORCH_BOX(&diagonal_scan_bwd<Backend>));
}

}  // namespace selective_scan::op
