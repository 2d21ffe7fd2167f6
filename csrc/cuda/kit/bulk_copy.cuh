// A ring of slots in shared memory through which a block's warps read a long array chunk by chunk.
//
// From Hopper on a chunk arrives as one bulk copy, and warps wait for nothing but the chunk they
// read (its "full" barrier) while one thread, before it starts a copy, waits for the slot's readers
// (its "empty" barrier). Elsewhere all threads copy with cp.async and meet at one barrier a chunk;
// -DSELECTIVE_SCAN_NO_BULK_COPY makes Hopper do the same.
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
  /// The slots, 16-byte aligned, lie one after another from `slots` on. Chunk k is the
  /// `chunk_bytes` (a multiple of 16) at source + k·stride. To be called by all threads of the
  /// block.
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
      // Chunk index - 2 has been left by most warps now; its slot takes the one kSlots further on.
      if (is_producer_ && static_cast<unsigned>(index_ - 2) < static_cast<unsigned>(refills_)) {
        const int behind = slot_ >= 2 ? slot_ - 2 : slot_ - 2 + kSlots;
        empty(behind).wait(slot_ >= 2 ? parity_ : parity_ ^ 1);
        copy(index_ - 2 + kSlots, behind);
      }
      __syncwarp();
      full(slot_).wait(parity_);
    } else {
      // One group of copies a chunk; those of the last kSlots - 3 may be on their way still.
      __pipeline_wait_prior(kSlots - 3);
      __syncthreads();
      const int ahead = slot_ >= 2 ? slot_ - 2 : slot_ - 2 + kSlots;
      copy_together(index_ + kSlots - 2, ahead);
    }
    return slots_ + slot_ * chunk_bytes_;
  }

  /// The warp has read what it needs of the chunk.
  __device__ __forceinline__ void release() {
    if constexpr (kHasBulkCopy) {
      // Every lane for itself: that its reads come before the next copy shows in the barrier alone.
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
  int refills_;  // copies behind the first kSlots
  bool is_producer_;
  int index_ = 0;
  int slot_ = 0;
  int parity_ = 0;
};

}  // namespace selective_scan::cuda
