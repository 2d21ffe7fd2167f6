#include "packed_sequences.h"

namespace selective_scan::op {

IndexArray index_view(const Tensor& tensor) {
  IndexArray view;
  view.data = tensor.const_data_ptr();
  view.is_wide = dtype_of(tensor) == ScalarType::Long;
  const int64_t last = tensor.dim() - 1;
  if (last == 1) view.batch = tensor.stride(0);
  view.step = tensor.stride(last);
  return view;
}

PackedSequences packed_sequences(const Tensor& cu_seqlens, int64_t total) {
  return {index_view(cu_seqlens), cu_seqlens.size(0) - 1, total};
}

PackedSequences packed_sequences(const Tensor& cu_seqlens, const char* name, const Tensor& packed) {
  check_shape("cu_seqlens", cu_seqlens, {{"sequences+1"}});
  if (cu_seqlens.size(0) == 0) {
    fail("cu_seqlens must have sequences+1 of at least 1, got ", shape_text(cu_seqlens));
  }
  if (packed.size(0) != 1) {
    fail(name, " must have batch of 1 where cu_seqlens is given, got ", shape_text(packed));
  }
  return packed_sequences(cu_seqlens, packed.size(packed.dim() - 1));
}

void check_boundaries(const PackedSequences& packed) {
  if (!packed.present()) return;
  int64_t before = 0;
  for (int64_t i = 0; i <= packed.count; ++i) {
    const int64_t boundary = packed.boundaries.at(i);
    if (boundary < before || boundary > packed.total) {
      fail("cu_seqlens must rise from 0 to at most seqlen = ", packed.total, ", got ", boundary,
           " behind ", before);
    }
    before = boundary;
  }
}

}  // namespace selective_scan::op
