// The parameters of the general diagonal scan's kernels. With rows in any number of dimensions,
//
//   forward    h[t] = a[t]·h[t-1] + b[t]             h[-1] = initial_state or 0
//   backward   g[t] = dh[t] + conj(a[t+1])·g[t+1]    g[seqlen] = 0
//              da[t] = g[t]·conj(h[t-1])
//              db[t] = g[t]
//
// The backward pass is the same recurrence from the last step to the first. It carries
//
//   s[t] = conj(a[t])·g[t]
//
// the gradient that arrives at h[t-1]. So g[t] = dh[t] + s[t+1], and s[0] is the gradient of
// initial_state.
//
// As in params.h the caller has validated everything, a dimension that an array lacks has stride 0,
// and a kernel scans from position 0 to seqlen - 1: for a scan in the other direction the array
// points at its last step with a negative step stride.
#pragma once

#include <cstdint>

#include "config.h"
#include "dtype.h"
#include "index_array.h"

namespace selective_scan {

/// The largest number of dimensions that rows may have after adjacent ones were merged.
constexpr int kMaxRowDims = 8;

/// A strided array of rows of steps, or of rows alone, whose "steps" are the sequences. Strides
/// count real components of `dtype`. The imaginary part lies `imag` components after the real part;
/// imag = 0 means that the array is real.
struct DiagonalArray {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kFloat32;
  int64_t step = 0;
  int64_t imag = 0;
  int64_t row[kMaxRowDims] = {};

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }
};

struct DiagonalScanParams {
  int64_t rows = 0;
  int64_t seqlen = 0;
  int row_dims = 0;
  int64_t row_sizes[kMaxRowDims] = {};  // the last one varies fastest

  bool is_complex = false;  // arithmetic and states are complex
  bool is_double = false;   // in fp64, else in fp32

  DiagonalArray a;
  DiagonalArray initial_state;  // without steps, optional

  PackedSequences packed;  // optional: the sequences of each row, in the order of the pass

  /// Returns the offset of a row's first step in `array`, in components from its data.
  SELECTIVE_SCAN_HD int64_t row_offset(const DiagonalArray& array, int64_t row) const {
    int64_t offset = 0;
    for (int dim = row_dims - 1; dim > 0; --dim) {
      offset += row % row_sizes[dim] * array.row[dim];
      row /= row_sizes[dim];
    }
    return offset + row * array.row[0];
  }
};

struct DiagonalForwardParams : DiagonalScanParams {
  DiagonalArray b;
  DiagonalArray h;
};

/// Positions count from the last step of the forward pass: position p is its step seqlen - 1 - p.
struct DiagonalBackwardParams : DiagonalScanParams {
  DiagonalArray dh;
  DiagonalArray h_previous;  // the state before each step; not read at the last position, whose
                             // state is initial_state
  DiagonalArray db;
  DiagonalArray da;
  DiagonalArray dinitial_state;  // optional

  /// For an `a` that is broadcast over time: da then receives the sum over each segment of time,
  /// and its steps are the segments. See num_segments() of the backend.
  bool sum_da = false;
};

}  // namespace selective_scan
