// A ring of slots in shared memory through which a block's warps read a long array chunk by chunk.
//
// From Hopper on, each chunk arrives as one bulk copy. Warps wait only for the chunk that they read
// (its "full" barrier). One thread starts the copies; before each one it waits for the slot's
// readers (the "empty" barrier). On earlier architectures, and with -DSELECTIVE_SCAN_NO_BULK_COPY,
// all threads copy with cp.async and meet at one barrier per chunk.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "barriers.cuh"
#include "dependent_launch.cuh"

namespace selective_scan::cuda {

/// Every warp of the block visits chunks 0, 1, ... `chunks - 1`, each between acquire() and
/// release(). All threads of a warp call these together.
template <int kSlots>
class ChunkRing {
  static_assert(kSlots >= 3, "a chunk is refilled two visits after it was read");

 public:
  /// The slots begin at `slots`, aligned to 16 bytes, and lie one after another. Chunk k is the
  /// `chunk_bytes` (a multiple of 16) at source + k·stride. All threads of the block call this.
  __device__ ChunkRing(RingBarriers<kSlots>& barriers, char* slots, const void* source,
                       int64_t stride, int chunk_bytes, int chunks)
      : barriers_(shared_address(&barriers)),
        slots_(slots),
        source_(static_cast<const char*>(source)),
        stride_(stride),
        chunk_bytes_(chunk_bytes),
        chunks_(chunks),
        refills_(chunks > kSlots ? chunks - kSlots : 0),
        is_producer_(threadIdx.x == 0) {
    if constexpr (kHasBulkCopy) {
      if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) {
          full(slot).initialize(1);
          empty(slot).initialize(static_cast<int>(blockDim.x));
        }
        SharedBarrier::publish();
      }
      __syncthreads();
    }
  }

  /// Starts the first copies. The source must be complete: see wait_for_primary().
  __device__ __forceinline__ void start() {
    if constexpr (kHasBulkCopy) {
      if (is_producer_) {
        const int first = chunks_ < kSlots ? chunks_ : kSlots;
        for (int k = 0; k < first; ++k) copy(k, k);
      }
    } else {
      for (int k = 0; k < kSlots - 2; ++k) copy_together(k, k);
    }
  }

  /// Waits for the next chunk to visit and returns its slot.
  __device__ __forceinline__ const char* acquire() {
    if constexpr (kHasBulkCopy) {
      // Most warps have left chunk index - 2 by now. Its slot receives the chunk kSlots after it.
      if (is_producer_ && static_cast<unsigned>(index_ - 2) < static_cast<unsigned>(refills_)) {
        const int behind = slot_ >= 2 ? slot_ - 2 : slot_ - 2 + kSlots;
        empty(behind).wait(slot_ >= 2 ? parity_ : parity_ ^ 1);
        copy(index_ - 2 + kSlots, behind);
      }
      __syncwarp();
      full(slot_).wait(parity_);
    } else {
      // There is one group of copies per chunk; the last kSlots - 3 may still be in flight.
      __pipeline_wait_prior(kSlots - 3);
      __syncthreads();
      const int ahead = slot_ >= 2 ? slot_ - 2 : slot_ - 2 + kSlots;
      copy_together(index_ + kSlots - 2, ahead);
    }
    return slots_ + slot_ * chunk_bytes_;
  }

  /// Releases the chunk: the warp has read what it needs.
  __device__ __forceinline__ void release() {
    if constexpr (kHasBulkCopy) {
      // Every lane signals for itself: only the barrier orders its reads before the next copy.
      empty(slot_).signal();
      __syncwarp();
    }
    ++index_;
    if (++slot_ == kSlots) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ SharedBarrier full(int slot) const {
    return SharedBarrier(barriers_ + slot * static_cast<uint32_t>(sizeof(BarrierState)));
  }
  __device__ __forceinline__ SharedBarrier empty(int slot) const { return full(kSlots + slot); }
  __device__ __forceinline__ void copy(int chunk, int slot) {
    const uint32_t target = shared_address(slots_) + slot * chunk_bytes_;
    const char* const source = source_ + chunk * stride_;
    full(slot).expect(chunk_bytes_);
    full(slot).copy(target, source, chunk_bytes_);
  }
  __device__ __forceinline__ void copy_together(int chunk, int slot) {
    constexpr int kAccess = 16;
    if (chunk < chunks_) {
      const char* source = source_ + chunk * stride_;
      char* target = slots_ + slot * chunk_bytes_;
      for (int at = threadIdx.x * kAccess; at < chunk_bytes_; at += blockDim.x * kAccess) {
        __pipeline_memcpy_async(target + at, source + at, kAccess);
      }
    }
    __pipeline_commit();
  }

  uint32_t barriers_;
  char* slots_;
  const char* source_;
  int64_t stride_;
  int chunk_bytes_;
  int chunks_;
  int refills_;  // copies after the first kSlots
  bool is_producer_;
  int index_ = 0;
  int slot_ = 0;
  int parity_ = 0;
};

}  // namespace selective_scan::cuda
