// Moves states of packed sequences from and to their slots of a pool.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/state_slots.h"

namespace selective_scan::cuda {

/// Loads the initial states of the sequences into `to`, (sequence, channel, state).
cudaError_t load_slots(const StateSlots& slots, const ArrayView& to, cudaStream_t stream);

/// Stores the final states of the sequences, `from`, to their slots. For sequences without a slot,
/// writes zeros to `out`, (channel, step).
cudaError_t store_slots(const StateSlots& slots, const ArrayView& from,
                        const PackedSequences& packed, const ArrayView& out, cudaStream_t stream);

}  // namespace selective_scan::cuda
