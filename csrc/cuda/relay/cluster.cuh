// How a warp of the relay hands a state to another one, which may be in another block of its
// cluster.
#pragma once

#include <cstdint>

#include "../kit/barriers.cuh"
#include "../kit/elements.cuh"

namespace selective_scan::cuda::relay {

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
__device__ __forceinline__ void send_in_cluster(uint32_t address, const Pack<float, 4>& values,
                                                uint32_t barrier) {
  if constexpr (kHasClusters) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
        "{%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(values.v[0]), "f"(values.v[1]), "f"(values.v[2]), "f"(values.v[3]), "r"(barrier)
        : "memory");
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

}  // namespace selective_scan::cuda::relay
