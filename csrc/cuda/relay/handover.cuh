// How a warp of the relay hands a state to another one, which may be in another block of its
// cluster.
#pragma once

#include <cstdint>

#include "../config.cuh"
#include "../elements.cuh"

namespace selective_scan::cuda::relay {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

// A wait that the hardware may suspend; -DSELECTIVE_SCAN_NO_BULK_COPY makes Hopper poll as others
// do.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(SELECTIVE_SCAN_NO_BULK_COPY)
constexpr bool kHasSuspendedWait = true;
#else
constexpr bool kHasSuspendedWait = false;
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

template <int kCount>
__device__ __forceinline__ void store_in_cluster(uint32_t address,
                                                 const Pack<float, kCount>& values) {
  if constexpr (kHasClusters) {
    static_assert(kCount == 4);
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "f"(values.v[0]), "f"(values.v[1]), "f"(values.v[2]), "f"(values.v[3])
                 : "memory");
  }
}

/// Meets all threads of the cluster.
__device__ __forceinline__ void sync_cluster() {
  if constexpr (kHasClusters) {
    asm volatile(
        "barrier.cluster.arrive.aligned;\n"
        "barrier.cluster.wait.aligned;" ::
            : "memory");
  }
}

/// An mbarrier at which all lanes of a warp arrive, each for what it has written itself: that takes
/// less time than to gather at one lane first. Phases count from 0; a wait names the parity of its
/// phase.
class Baton {
 public:
  __device__ __forceinline__ void initialize() {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(kWarpSize)
                 : "memory");
  }
  /// To be called by all lanes.
  __device__ __forceinline__ void pass_on() {
    asm volatile(
        "{\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n"
        "}" ::"r"(shared_address(this))
        : "memory");
  }
  /// The same for the baton that lies there in another block of the cluster.
  static __device__ __forceinline__ void pass_on_in_cluster(uint32_t address) {
    if constexpr (kHasClusters) {
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address)
                   : "memory");
    }
  }
  template <bool kFromCluster = false>
  __device__ __forceinline__ void wait(int parity) {
    uint32_t done;
    do {
      if constexpr (kFromCluster && kHasClusters) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(this)), "r"(parity)
            : "memory");
      } else if constexpr (kHasSuspendedWait) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(this)), "r"(parity)
            : "memory");
      } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(this)), "r"(parity)
            : "memory");
      }
    } while (done == 0);
  }

 private:
  uint64_t state_;
};

}  // namespace selective_scan::cuda::relay
