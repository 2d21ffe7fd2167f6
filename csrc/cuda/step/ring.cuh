// The ring through which weights come to a block, in the order in which it multiplies with them.
//
// One warp fetches as far ahead as there are stages, across products and layers, because weights do
// not depend on anything computed. From Hopper on every row of a stage is a bulk copy; before
// Hopper the warp's lanes copy 16 bytes each at a time.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "../kit/barriers.cuh"
#include "matrices.cuh"

namespace selective_scan::cuda::step {

class WeightRing {
 public:
  __device__ __forceinline__ explicit WeightRing(const StepPlan& plan)
      : barriers_(shared_address(shared_memory() + plan.shared.barriers)),
        stages_(shared_memory() + plan.shared.stages),
        count_(plan.stages) {}

  /// One thread calls this before the block's threads meet.
  __device__ __forceinline__ void initialize() const {
    for (int stage = 0; stage < count_; ++stage) {
      full(stage).initialize(kHasBulkCopy ? 1 : kWarpSize);
      empty(stage).initialize(kProductWarps * kWarpSize);
    }
    SharedBarrier::publish();
  }

  /// Waits for the next stage and returns it. The warps that multiply call this.
  __device__ __forceinline__ const char* acquire() {
    full(stage_).wait(parity_);
    return stages_ + stage_ * kStageBytes;
  }
  __device__ __forceinline__ void release() {
    empty(stage_).signal();
    advance();
  }

  /// Fetches a stage: the columns of `tile` from `column` on. All lanes of the fetching warp call
  /// this.
  template <class W>
  __device__ __forceinline__ void fetch(const MatrixRows& rows, int tile, int column, int columns) {
    const int lane = threadIdx.x % kWarpSize;
    const int first = tile * kTileRows;
    const int count = min(kTileRows, rows.count - first);
    const int bytes = columns * static_cast<int>(sizeof(W));
    const int64_t pitch = int64_t{rows.columns} * static_cast<int64_t>(sizeof(W));
    const auto source_of = [&](int row) {
      return rows.first + row * pitch + column * static_cast<int>(sizeof(W));
    };
    empty(stage_).wait(parity_ ^ 1);  // in the first round the phase before it counts as complete
    char* const target = stages_ + stage_ * kStageBytes;
    if constexpr (kHasBulkCopy) {
      if (lane == 0) full(stage_).expect(count * bytes);
      __syncwarp();
      if (lane < count) {
        full(stage_).copy(shared_address(target + lane * kRowPitch), source_of(first + lane),
                          bytes);
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

/// Runs the warp that fetches weights.
template <class W>
__device__ __forceinline__ void fetch_weights(const BlockMatrices<W>& matrices, WeightRing& ring) {
  for_each_product(matrices.args.params, [&](Product product, int layer) {
    const MatrixRows rows = matrices.of(product, layer);
    for_each_tile(rows, [&](int tile) {
      for_each_stage<W>(
          rows, [&](int column, int columns) { ring.fetch<W>(rows, tile, column, columns); });
    });
  });
}

}  // namespace selective_scan::cuda::step
