// Sums of partial results in scratch memory: the last launch of a backward pass. Each sum has a
// fixed order that follows from its sizes alone.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"
#include "../kit/packed_chunks.cuh"

namespace selective_scan::cuda {

/// The gradients of variable B and C: sums over tiles of channels, in the compute type. There are
/// many sums, of few parts each.
struct ProjectionSums {
  /// (slice of the states, tile, batch, group, step, B | C, state), aligned to 256 bytes; null if
  /// there are no sums.
  const void* parts = nullptr;
  int64_t tiles = 1;
  int slice_states = 1;  // 1, for real fp32 states, or a multiple of 16 bytes
  int64_t batch = 0;
  int64_t groups = 0;
  int64_t steps = 0;
  int64_t states = 0;  // wanted states of all slices
  ArrayView dB, dC;    // absent: not wanted
  /// If present, the steps are those of these chunks.
  PackedChunks chunks{nullptr};
};

/// A gradient (row, column) of an array without steps, such as A: sums over parts, in fp64. There
/// are few sums, but each may have very many parts.
struct ParameterSums {
  const void* parts = nullptr;  // (part, row, column, term); without parts the sum is 0
  bool is_real = true;          // possible even if the compute type is complex
  int64_t count = 0;            // of parts
  int64_t part_stride = 0;
  int64_t row_stride = 0;
  int terms = 1;  // adjacent values of a part that belong to the same sum
  int64_t rows = 0;
  int64_t columns = 0;
  ArrayView target;
  int64_t target_row = 0;  // stride
  int64_t target_column = 0;
};

/// The sums of a call's parameters.
struct ParameterList {
  ParameterSums sums[5];
  int count = 0;

  void add(const ParameterSums& added) { sums[count++] = added; }
};

struct Sums {
  bool is_complex = false;  // the compute type
  bool is_double = false;
  ProjectionSums projections;
  ParameterList parameters;
};

/// Computes all sums in one launch, which may begin before the previous kernel is complete.
cudaError_t add_up(const Sums& sums, cudaStream_t stream);

}  // namespace selective_scan::cuda
