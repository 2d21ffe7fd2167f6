// States of packed sequences from and to their slots of a pool.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/state_slots.h"

namespace selective_scan::cuda {

/// What the sequences begin with goes to `to`, (sequence, channel, state).
cudaError_t load_slots(const StateSlots& slots, const ArrayView& to, cudaStream_t stream);

/// What is behind the sequences, in `from`, goes to their slots; for those that have none zeros go
/// to `out`, (channel, step).
cudaError_t store_slots(const StateSlots& slots, const ArrayView& from,
                        const PackedSequences& packed, const ArrayView& out, cudaStream_t stream);

}  // namespace selective_scan::cuda
