// The forward and backward ops of the general diagonal scan on one backend.
//
// A Backend (backend.h) has for these besides:
//
//   int64_t num_segments(const DiagonalScanParams& params) const
//       Into how many segments of time the kernels split every row.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "backend.h"
#include "diagonal_arguments.h"

namespace selective_scan::op {

/// A contiguous copy of `tensor`, broadcast to the shape of `shape`.
inline Tensor expanded_copy(const Tensor& tensor, const Tensor& shape) {
  return copy(allocate(tensor, shape.sizes(), dtype_of(tensor)), tensor);
}

/// `values` with the strides that a result like `like` has.
inline Tensor laid_out_like(const Tensor& like, const Tensor& values) {
  return copy(empty_like(like, values.scalar_type()), values);
}

inline void set_types(DiagonalScanParams& params, const Tensor& a, const Tensor& b,
                      const OptionalTensor& initial_state) {
  params.is_complex = is_complex_dtype(a.scalar_type()) || is_complex_dtype(b.scalar_type());
  params.is_double = is_double_dtype(a.scalar_type()) || is_double_dtype(b.scalar_type()) ||
                     (initial_state && is_double_dtype(initial_state->scalar_type()));
}

/// b's dtype, its complex counterpart where the scan is complex.
inline ScalarType result_dtype(const DiagonalScanParams& params, const Tensor& b) {
  return params.is_complex ? float_dtype(is_double_dtype(b.scalar_type()), true) : b.scalar_type();
}

template <class Backend>
Tensor diagonal_scan_fwd(const Tensor& a, const Tensor& b, const OptionalTensor& initial_state,
                         bool reverse, const OptionalTensor& cu_seqlens) {
  check_diagonal_scan(a, "b", b, initial_state, cu_seqlens);
  const Backend backend(b);

  DiagonalForwardParams params;
  set_types(params, a, b, initial_state);
  if (cu_seqlens) params.packed = packed_sequences(*cu_seqlens, "b", b);
  params.packed.reversed = reverse;
  backend.check(params.packed);
  // Rows of more dimensions than kernels take are copied: those of contiguous copies are one
  // dimension.
  for (const bool compact : {false, true}) {
    const Tensor a_rows = compact ? expanded_copy(a, b) : a;
    const Tensor b_rows = compact ? as_contiguous(b) : b;
    Tensor h = empty_like(b_rows, result_dtype(params, b));
    if (h.numel() == 0) return h;
    if (cu_seqlens) torch::stable::zero_(h);  // steps of no sequence

    RowLayout layout(b, params);
    layout.add_steps(params.a, a_rows);
    layout.add_steps(params.b, b_rows);
    layout.add_steps(params.h, h);
    Tensor initial_rows;
    if (initial_state) {
      initial_rows = compact ? as_contiguous(*initial_state) : *initial_state;
      layout.add_rows(params.initial_state, initial_rows);
    }
    if (!layout.finish()) continue;

    if (reverse) {
      for (DiagonalArray* array : {&params.a, &params.b, &params.h}) {
        *array = reversed(*array, params.seqlen);
      }
    }
    launch_with_workspace(backend, b, params);
    return compact ? laid_out_like(b, h) : h;
  }
  fail("the rows of b could not be laid out");
}

inline void check_dh(const Tensor& dh, const Tensor& h) {
  check_dense("dh", dh);
  check_same_device("dh", dh, "h", h);
  check_dtype("dh", dh, {h.scalar_type()});
  check_shape_of("dh", dh, "h", h);
}

/// What the kernel writes of da: da itself, or, where a is broadcast, values still to be summed
/// over broadcast_dims(): one for each step, or one for each segment of time.
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

/// `complex_b`: whether b, whose gradient is asked for, was complex; that does not follow from h.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> diagonal_scan_bwd(const Tensor& dh, const Tensor& a,
                                                     const Tensor& h,
                                                     const OptionalTensor& initial_state,
                                                     bool reverse, const OptionalTensor& cu_seqlens,
                                                     bool complex_b) {
  check_diagonal_scan(a, "h", h, initial_state, cu_seqlens);
  check_dh(dh, h);
  const Backend backend(h);

  DiagonalBackwardParams params;
  set_types(params, a, h, initial_state);
  if (cu_seqlens) params.packed = packed_sequences(*cu_seqlens, "h", h);
  params.packed.reversed = !reverse;
  backend.check(params.packed);
  if (!params.is_complex && complex_b)
    fail("h must be complex where b is, got ", dtype_name(h.scalar_type()));
  const ScalarType db_dtype = params.is_complex && !complex_b
                                  ? float_dtype(is_double_dtype(h.scalar_type()), false)
                                  : h.scalar_type();
  const bool sums_da = is_broadcast(a, h);
  // The sum over time is left to PyTorch where sequences are packed.
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

    RowLayout layout(h, params);
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
    if (cu_seqlens) {  // steps of no sequence
      torch::stable::zero_(da_values);
      torch::stable::zero_(db);
    }
    layout.add_steps(params.da, da_values);
    if (!layout.finish()) continue;

    if (!reverse) {
      for (DiagonalArray* array : {&params.a, &params.dh, &params.h_previous, &params.db}) {
        *array = reversed(*array, params.seqlen);
      }
      if (!params.sum_da) params.da = reversed(params.da, params.seqlen);
    }
    DiagonalArray& previous = params.h_previous;
    previous.data =
        static_cast<char*>(previous.data) + previous.step * element_size(previous.dtype);

    launch_with_workspace(backend, h, params);
    Tensor da = sums_da ? summed_to(a, h, da_values) : da_values;
    if (!compact) return {da, db, dinitial_state};
    // a may lack leading dims of h.
    return {laid_out_like(a, reshaped(da, a.sizes())), laid_out_like(h, db),
            initial_state ? laid_out_like(*initial_state, dinitial_state) : dinitial_state};
  }
  fail("the rows of h could not be laid out");
}

/// Registers the ops of a backend.
template <class Backend>
void implement_diagonal_scan(auto& library) {
  library.impl("diagonal_scan_fwd", TORCH_BOX(&diagonal_scan_fwd<Backend>));
  library.impl("diagonal_scan_bwd", TORCH_BOX(&diagonal_scan_bwd<Backend>));
}

}  // namespace selective_scan::op
