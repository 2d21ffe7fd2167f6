// Barriers in shared memory (mbarriers), by which warps wait for one another and for copies.
#pragma once

#include <cstdint>

#include "barrier_state.h"
#include "config.h"

namespace selective_scan::cuda {

// With -DSELECTIVE_SCAN_NO_BULK_COPY, Hopper uses no bulk copies and no suspended waits, as earlier
// architectures.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(SELECTIVE_SCAN_NO_BULK_COPY)
constexpr bool kHasBulkCopy = true;
#else
constexpr bool kHasBulkCopy = false;
#endif

/// Architectures before Ampere have neither mbarriers nor asynchronous copies. Kernels that need
/// them are empty there: they return at once, and no plan chooses them. See
/// Device::has_async_copies().
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasAsyncCopies = false;
#else
constexpr bool kHasAsyncCopies = true;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// meet() waits until this many warps of the block have called meet() or arrive() with the same
/// barrier; arrive() does not wait. Barrier 0 is the one of __syncthreads(), which all threads must
/// reach at the same place.
__device__ __forceinline__ void meet(int barrier, int warps) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * kWarpSize) : "memory");
}
__device__ __forceinline__ void arrive(int barrier, int warps) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(warps * kWarpSize) : "memory");
}

/// An mbarrier, known by its address in shared memory. All lanes of a warp arrive at it, each for
/// its own writes: that is faster than first gathering them at one lane. Phases count from 0; a
/// wait names the parity of its phase.
struct SharedBarrier {
  uint32_t address;

  __device__ __forceinline__ explicit SharedBarrier(uint32_t address) : address(address) {}
  __device__ __forceinline__ explicit SharedBarrier(const BarrierState& state)
      : address(shared_address(&state)) {}

  __device__ __forceinline__ void initialize(int arrivals = kWarpSize) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals)
                 : "memory");
  }
  /// Makes the barriers visible to bulk copies. The thread that called initialize() calls this
  /// before the block synchronizes.
  static __device__ __forceinline__ void publish() {
    if constexpr (kHasBulkCopy) {
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
  }
  /// Arrives.
  __device__ __forceinline__ void signal() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  /// Arrives, and makes the phase wait for `bytes` bytes of bulk copies too.
  __device__ __forceinline__ void expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
  }
  /// Starts a bulk copy of `bytes`, a multiple of 16, to shared memory. The phase waits for it.
  __device__ __forceinline__ void copy(uint32_t target, const void* source, int bytes) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target),
        "l"(source), "r"(bytes), "r"(address)
        : "memory");
  }
  /// Waits for a phase. Hopper may suspend the warp; other architectures poll.
  __device__ __forceinline__ void wait(int parity) const {
    uint32_t done;
    do {
      if constexpr (kHasBulkCopy) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(address), "r"(parity)
            : "memory");
      } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(address), "r"(parity)
            : "memory");
      }
    } while (done == 0);
  }
};

}  // namespace selective_scan::cuda
