// This goes from the arguments of the diagonal scan ops to kernel parameters: validation, and the
// layout of rows.
#pragma once

#include <vector>

#include "../core/diagonal_params.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// Refuses whatever no kernel may see. In the backward op h stands where the forward op has b.
void check_diagonal_scan(const Tensor& a, const char* b_name, const Tensor& b,
                         const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens);

/// Whether a is smaller than b in some dimension, and in time.
bool is_broadcast(const Tensor& a, const Tensor& b);
bool is_broadcast_in_time(const Tensor& a, const Tensor& b);

/// The dimensions over which the gradient of a is summed.
std::vector<int64_t> broadcast_dims(const Tensor& a, const Tensor& b);

/// Collects the arrays of a call; finish() merges row dimensions that all of them allow to merge.
class RowLayout {
 public:
  /// `shape` has steps in its last dimension, which is not among the rows.
  RowLayout(const Tensor& shape, DiagonalScanParams& params);

  /// (..., seqlen), or what is broadcast to that.
  void add_steps(DiagonalArray& array, const Tensor& tensor);
  /// (...), or (sequences, ...) in place of a batch of 1 where sequences are packed.
  void add_rows(DiagonalArray& array, const Tensor& tensor);

  /// False if the rows still have more than kMaxRowDims dimensions.
  [[nodiscard]] bool finish();

 private:
  struct Entry {
    DiagonalArray* array;
    std::vector<int64_t> strides;
  };

  Entry& add(DiagonalArray& array, const Tensor& tensor, int64_t row_dims_of_tensor);

  DiagonalScanParams& params_;
  std::vector<int64_t> sizes_;
  std::vector<Entry> entries_;
};

/// Gives the same array from its last step to its first.
DiagonalArray reversed(DiagonalArray array, int64_t seqlen);

}  // namespace selective_scan::op
