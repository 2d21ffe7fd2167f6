// Waiting for an mbarrier in shared memory.
#pragma once

#include <cstdint>

namespace selective_scan::cuda {

// A wait that the hardware may suspend; -DSELECTIVE_SCAN_NO_BULK_COPY makes Hopper poll as others
// do.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(SELECTIVE_SCAN_NO_BULK_COPY)
constexpr bool kHasSuspendedWait = true;
#else
constexpr bool kHasSuspendedWait = false;
#endif

/// `barrier` is its address in shared memory. Phases count from 0; a wait names the parity of its
/// phase.
__device__ __forceinline__ void wait_for_phase(uint32_t barrier, int parity) {
  uint32_t done;
  do {
    if constexpr (kHasSuspendedWait) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    }
  } while (done == 0);
}

}  // namespace selective_scan::cuda
