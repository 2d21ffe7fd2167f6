// cu_seqlens: the boundaries of sequences that are packed one after another.
#pragma once

#include "../core/index_array.h"
#include "tensor_checks.h"

namespace selective_scan::op {

/// A view of (batch, seqlen), or of one index per sequence.
inline IndexArray index_view(const Tensor& tensor) {
  IndexArray view;
  view.data = tensor.const_data_ptr();
  view.is_wide = dtype_of(tensor) == ScalarType::Long;
  const int64_t last = tensor.dim() - 1;
  if (last == 1) view.batch = tensor.stride(0);
  view.step = tensor.stride(last);
  return view;
}

/// Returns the sequences in `total` steps with the boundaries cu_seqlens, which must have been
/// checked.
inline PackedSequences packed_sequences(const Tensor& cu_seqlens, int64_t total) {
  return {index_view(cu_seqlens), cu_seqlens.size(0) - 1, total};
}
/// Refuses boundaries that decrease or are out of range. Reads them, so they must be in host
/// memory.
inline void check_boundaries(const PackedSequences& packed) {
  if (!packed.present()) return;
  int64_t before = 0;
  for (int64_t i = 0; i <= packed.count; ++i) {
    const int64_t boundary = packed.boundaries.at(i);
    if (boundary < before || boundary > packed.total) {
      fail("cu_seqlens must be non-decreasing, from 0 to seqlen = ", packed.total, ", got ",
           boundary, " after ", before);
    }
    before = boundary;
  }
}

}  // namespace selective_scan::op
