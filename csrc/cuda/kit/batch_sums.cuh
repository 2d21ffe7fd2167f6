// The gradients without steps: sums of partial results over segments and batches, in a fixed order.
#pragma once

#include "elements.cuh"
#include "gradient_sums.h"

namespace selective_scan::cuda {

constexpr int kReduceThreads = 256;
constexpr int kBatchSums = kWarpSize;  // of one work item
constexpr int kRowSlices = kReduceThreads / kBatchSums;

/// Adds `length` consecutive values of each of `rows` rows, the first at `offset`. A warp takes
/// every kRowSlices-th row, and the first warp, whose lanes get the results, adds what the warps
/// have; in fp64, since there may be very many rows. All threads of the block call this together.
template <class T>
__device__ T sum_rows(const void* partial, int64_t rows, int64_t row_stride, int64_t offset,
                      int length, bool exists) {
  using R = real_t<T>;
  __shared__ double2 slices[kRowSlices][kBatchSums];
  const int lane = threadIdx.x % kBatchSums;
  const int slice = threadIdx.x / kBatchSums;
  double2 sum{0, 0};
  const auto add = [&](T value) {
    if constexpr (is_complex_v<T>) {
      sum.x += value.re;
      sum.y += value.im;
    } else {
      sum.x += value;
    }
  };
  if (exists) {
#pragma unroll 4
    for (int64_t row = slice; row < rows; row += kRowSlices) {
      const T* source = static_cast<const T*>(partial) + row * row_stride + offset;
#pragma unroll 1
      for (int i = 0; i < length; ++i) add(source[i]);
    }
  }
  slices[slice][lane] = sum;
  __syncthreads();
  if (slice == 0) {
    for (int other = 1; other < kRowSlices; ++other) {
      sum.x += slices[other][lane].x;
      sum.y += slices[other][lane].y;
    }
  }
  __syncthreads();
  if constexpr (is_complex_v<T>) {
    return {static_cast<R>(sum.x), static_cast<R>(sum.y)};
  } else {
    return static_cast<R>(sum.x);
  }
}

/// How the sums are cut into work items of a block each: the first `state_blocks` are kBatchSums
/// (channel, state) pairs each, those behind them as many channels.
struct BatchSums {
  int64_t rows;  // of partial results
  int64_t state_blocks;
  int64_t channel_blocks;

  BatchSums(const BackwardParams& params, const BackwardWorkspace& workspace, int64_t rows)
      : rows(rows) {
    const bool has_channel_sums = workspace.dD != nullptr || workspace.ddelta_bias != nullptr;
    state_blocks = ceil_div(params.dim * params.dstate, kBatchSums);
    channel_blocks = has_channel_sums ? ceil_div(params.dim, kBatchSums) : 0;
  }

  SELECTIVE_SCAN_HD int64_t work_items() const { return state_blocks + channel_blocks; }
};

/// dA, dD, ddelta_bias and the gradients of constant B and C, as much as a work item has of them.
/// All kReduceThreads threads of a block call this together. Bound by latency.
template <class T>
__device__ void sum_batches(const BackwardParams& params, const BackwardWorkspace& workspace,
                            int padded_states, const BatchSums& sums, int64_t index) {
  using R = real_t<T>;
  const bool is_first_warp = threadIdx.x < kBatchSums;
  const bool of_states = index < sums.state_blocks;
  const int64_t i =
      (of_states ? index : index - sums.state_blocks) * kBatchSums + threadIdx.x % kBatchSums;
  if (of_states) {
    const int64_t channel = i / params.dstate;
    const int64_t state = i % params.dstate;
    const bool exists = channel < params.dim;
    const auto reduce = [&](const void* partial, const ArrayView& view) {
      if (partial == nullptr) return;
      const T sum = sum_rows<T>(partial, sums.rows, params.dim * padded_states,
                                channel * padded_states + state, 1, exists);
      if (exists && is_first_warp) {
        store_component(view, channel * view.channel + state * view.state, sum);
      }
    };
    reduce(workspace.dA, params.dA);
    reduce(workspace.dB, params.dB);
    reduce(workspace.dC, params.dC);
  } else {
    const bool exists = i < params.dim;
    const auto reduce = [&](const void* partial, const ArrayView& view) {
      if (partial == nullptr) return;
      const int parts = workspace.channel_parts;
      const R sum = sum_rows<R>(partial, sums.rows, params.dim * parts, i * parts, parts, exists);
      if (exists && is_first_warp) store_component(view, i * view.channel, sum);
    };
    reduce(workspace.dD, params.dD);
    reduce(workspace.ddelta_bias, params.ddelta_bias);
  }
}

}  // namespace selective_scan::cuda
