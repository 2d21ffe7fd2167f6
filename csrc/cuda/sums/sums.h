// Sums of what blocks have left in scratch memory, each in a fixed order, which follows from its
// sizes alone: the last launch of a backward pass.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/params.h"
#include "../kit/packed_chunks.cuh"

namespace selective_scan::cuda {

/// The gradients of variable B and C: sums over tiles of channels, in the compute type. There are
/// many of them, of few parts each.
struct ProjectionSums {
  /// (slice of the states, tile, batch, group, step, B | C, state), aligned to 256 bytes; null:
  /// there are none.
  const void* parts = nullptr;
  int64_t tiles = 1;
  int slice_states = 1;  // one, of real states in fp32, or a multiple of 16 bytes
  int64_t batch = 0;
  int64_t groups = 0;
  int64_t steps = 0;
  int64_t states = 0;  // of all slices that are wanted
  ArrayView dB, dC;    // absent: not wanted
  /// Where present, the steps are those of these chunks.
  PackedChunks chunks{nullptr};
};

/// The gradient (row, column) of something without steps, such as A: sums over parts, in fp64.
/// There are few of them, which may be of very many parts.
struct ParameterSums {
  const void* parts = nullptr;  // (part, row, column, term); of no parts the sum is zero
  bool is_real = true;          // also where the compute type is complex
  int64_t count = 0;            // of parts
  int64_t part_stride = 0;
  int64_t row_stride = 0;
  int terms = 1;  // side by side, that a part has of each sum
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

/// Adds up all of them in one launch, which may begin before the kernel in front of it is complete.
cudaError_t add_up(const Sums& sums, cudaStream_t stream);

}  // namespace selective_scan::cuda
