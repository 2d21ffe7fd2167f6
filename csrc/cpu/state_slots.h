// Copies states of packed sequences from and to their slots of a pool. Nothing here depends on the
// instruction set.
#pragma once

#include "../core/state_slots.h"

namespace selective_scan::cpu {

/// Copies the state that a sequence begins with to its row of `to`, (sequence, channel, state).
void load_slot(const StateSlots& slots, int64_t sequence, const ArrayView& to);

/// Copies row `row` of `from` to an existing slot.
void store_slot(const StateSlots& slots, const ArrayView& from, int64_t row, int64_t slot);

/// Writes zeros to the steps of a sequence in `out`, (channel, step).
void clear_sequence(const StateSlots& slots, const PackedSequences& packed, int64_t sequence,
                    const ArrayView& out);

}  // namespace selective_scan::cpu
