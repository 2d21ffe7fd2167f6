// The shared memory of barriers (barriers.cuh).
#pragma once

#include <cstdint>

namespace selective_scan::cuda {

/// The storage of an mbarrier in shared memory.
using BarrierState = uint64_t;

/// The barriers of a ring of kSlots slots (bulk_copy.cuh), which lie before the slots.
template <int kSlots>
struct alignas(16) RingBarriers {
  BarrierState full[kSlots];
  BarrierState empty[kSlots];
};

}  // namespace selective_scan::cuda
