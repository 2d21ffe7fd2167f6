// How a warp of the relay hands a state to another one, which may be in another block of its
// cluster.
#pragma once

#include <cstdint>

#include "../kit/config.h"
#include "../kit/elements.cuh"
#include "../kit/mbarrier.cuh"

namespace selective_scan::cuda::relay {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// The address, in block `rank` of the cluster, of what lies at `address` in this block.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t address, int rank) {
  uint32_t result = address;
  if constexpr (kHasClusters) {
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  }
  return result;
}

/// Stores without waiting; the barrier at address `barrier` of the same block counts the bytes that
/// have arrived. An ordinary store would need a fence before the other block may be told of it.
template <int kCount>
__device__ __forceinline__ void send_in_cluster(uint32_t address, const Pack<float, kCount>& values,
                                                uint32_t barrier) {
  if constexpr (kHasClusters) {
    if constexpr (kCount == 2) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
              "r"(address),
          "f"(values.v[0]), "f"(values.v[1]), "r"(barrier)
          : "memory");
    } else {
      static_assert(kCount == 4);
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
          "{%1, %2, %3, %4}, [%5];" ::"r"(address),
          "f"(values.v[0]), "f"(values.v[1]), "f"(values.v[2]), "f"(values.v[3]), "r"(barrier)
          : "memory");
    }
  }
}

/// Meets all threads of the cluster, at once or by two calls. Nothing but barriers that have been
/// published is promised to be seen by other blocks: that would take a fence for all of the GPU.
__device__ __forceinline__ void arrive_at_cluster() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

/// An mbarrier at which all lanes of a warp arrive, each for what it has written itself: that takes
/// less time than to gather at one lane first. Phases count from 0; a wait names the parity of its
/// phase.
class SharedBarrier {
 public:
  __device__ __forceinline__ void initialize(int arrivals = kWarpSize) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals)
                 : "memory");
  }
  /// To be called by who has called initialize(), before arrive_at_cluster().
  static __device__ __forceinline__ void publish_in_cluster() {
    if constexpr (kHasClusters) {
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  /// Arrives, and has the phase wait for so many bytes of send_in_cluster() too.
  __device__ __forceinline__ void expect(int bytes) {
    if constexpr (kHasClusters) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                   "r"(bytes)
                   : "memory");
    }
  }
  /// To be called by all lanes.
  __device__ __forceinline__ void signal() {
    asm volatile(
        "{\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n"
        "}" ::"r"(shared_address(this))
        : "memory");
  }
  __device__ __forceinline__ void wait(int parity) { wait_for_phase(shared_address(this), parity); }

 private:
  uint64_t state_;
};

}  // namespace selective_scan::cuda::relay
