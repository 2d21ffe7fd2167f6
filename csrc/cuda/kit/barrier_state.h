// What barriers (barriers.cuh) take of shared memory.
#pragma once

#include <cstdint>

namespace selective_scan::cuda {

/// An mbarrier's place in shared memory.
using BarrierState = uint64_t;

/// What a ring of kSlots (bulk_copy.cuh) has in shared memory before its slots.
template <int kSlots>
struct alignas(16) RingBarriers {
  BarrierState full[kSlots];
  BarrierState empty[kSlots];
};

}  // namespace selective_scan::cuda
