// States of packed sequences from and to their slots of a pool. Nothing here depends on the
// instruction set.
#pragma once

#include "../core/state_slots.h"

namespace selective_scan::cpu {

/// What a sequence begins with goes to its row of `to`, (sequence, channel, state).
void load_slot(const StateSlots& slots, int64_t sequence, const ArrayView& to);

/// Row `row` of `from` goes to a slot that there is.
void store_slot(const StateSlots& slots, const ArrayView& from, int64_t row, int64_t slot);

/// Writes zeros to the steps of a sequence in `out`, (channel, step).
void clear_sequence(const StateSlots& slots, const PackedSequences& packed, int64_t sequence,
                    const ArrayView& out);

}  // namespace selective_scan::cpu
