// The ring through which weights come to a block, in the order in which it multiplies with them.
//
// One warp fetches, as far ahead as there are stages, across products and layers: weights depend on
// nothing that is computed. From Hopper on every row of a stage is a bulk copy, before that the
// warp's lanes copy 16 bytes each at a time.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/barriers.cuh"
#include "plan.h"

namespace selective_scan::cuda::step {

/// Rows of a matrix, or of two parts of one, that a block multiplies with.
struct MatrixRows {
  const char* first;
  const char* second;
  int first_count;
  int count;    // of both
  int columns;  // of a row
};

/// Of a product's rows those that are accumulated side by side: with one pass over the activations.
template <class W>
constexpr int kTilesTogether = sizeof(W) == 2 ? 6 : 1;

/// Calls visit(group, tile, column, columns) for the stages of a product: groups of tiles, in a
/// group columns as a stage has them, and of these the tiles of the group.
template <class W, class Visit>
__device__ __forceinline__ void for_each_stage(const MatrixRows& rows, const Visit& visit) {
  constexpr int kColumns = kRowBytes / static_cast<int>(sizeof(W));
  const int tiles = ceil_div(rows.count, kTileRows);
  for (int first = 0; first < tiles; first += kTilesTogether<W>) {
    const int end = min(first + kTilesTogether<W>, tiles);
    for (int column = 0; column < rows.columns; column += kColumns) {
      const int columns = min(kColumns, rows.columns - column);
      for (int tile = first; tile < end; ++tile) visit(first, tile, column, columns);
    }
  }
}

class WeightRing {
 public:
  __device__ __forceinline__ WeightRing(char* shared, const StepPlan& plan)
      : barriers_(shared_address(shared + plan.shared.barriers)),
        stages_(shared + plan.shared.stages),
        count_(plan.stages) {}

  /// By one thread, before blocks' threads meet.
  __device__ __forceinline__ void initialize() const {
    for (int stage = 0; stage < count_; ++stage) {
      full(stage).initialize(kHasBulkCopy ? 1 : kWarpSize);
      empty(stage).initialize(kComputeThreads);
    }
    SharedBarrier::publish_in_cluster();
    if constexpr (kHasBulkCopy) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  /// The next stage, by threads that compute.
  __device__ __forceinline__ const char* acquire() {
    full(stage_).wait(parity_);
    return stages_ + stage_ * kStageBytes;
  }
  __device__ __forceinline__ void release() {
    empty(stage_).signal();
    advance();
  }

  /// Fetches a stage: of `tile` the columns from `column` on. By all lanes of the warp that
  /// fetches.
  template <class W>
  __device__ __forceinline__ void fetch(const MatrixRows& rows, int tile, int column, int columns) {
    const int lane = threadIdx.x % kWarpSize;
    const int first = tile * kTileRows;
    const int count = min(kTileRows, rows.count - first);
    const int bytes = columns * static_cast<int>(sizeof(W));
    const int64_t pitch = int64_t{rows.columns} * static_cast<int64_t>(sizeof(W));
    const auto source_of = [&](int row) {
      const char* part = row < rows.first_count ? rows.first + row * pitch
                                                : rows.second + (row - rows.first_count) * pitch;
      return part + column * static_cast<int>(sizeof(W));
    };
    empty(stage_).wait(parity_ ^ 1);  // at first the phase before the first one counts as complete
    char* const target = stages_ + stage_ * kStageBytes;
    if constexpr (kHasBulkCopy) {
      if (lane == 0) full(stage_).expect(count * bytes);
      __syncwarp();
      if (lane < count) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(shared_address(target + lane * kRowPitch)),
            "l"(source_of(first + lane)), "r"(bytes), "r"(full(stage_).address)
            : "memory");
      }
    } else {
      constexpr int kAccess = 16;
      for (int row = 0; row < count; ++row) {
        const char* const source = source_of(first + row);
        for (int at = lane * kAccess; at < bytes; at += kWarpSize * kAccess) {
          __pipeline_memcpy_async(target + row * kRowPitch + at, source + at, kAccess);
        }
      }
      asm volatile(
          "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full(stage_).address)
          : "memory");
    }
    advance();
  }

 private:
  __device__ __forceinline__ SharedBarrier full(int stage) const {
    return SharedBarrier(barriers_ + stage * static_cast<uint32_t>(sizeof(BarrierState)));
  }
  __device__ __forceinline__ SharedBarrier empty(int stage) const {
    return full(kMostStages + stage);
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ == count_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  uint32_t barriers_;
  char* stages_;
  int count_;
  int stage_ = 0;
  int parity_ = 0;
};

}  // namespace selective_scan::cuda::step
