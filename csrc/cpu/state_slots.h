// States of a sequence from and to its slot. Nothing here depends on the instruction set.
#pragma once

#include "../core/state_slots.h"

namespace selective_scan::cpu {

/// Calls visit(channel, state) for all of a slot's.
template <class Visit>
void for_each_state(const StateSlots& slots, const Visit& visit) {
  for (int64_t channel = 0; channel < slots.channels; ++channel) {
    for (int64_t state = 0; state < slots.dstate; ++state) visit(channel, state);
  }
}

/// What a sequence begins with goes to its row of `to`.
inline void load_slot(const StateSlots& slots, int64_t sequence, const ArrayView& to) {
  for_each_state(slots,
                 [&](int64_t channel, int64_t state) { slots.load(sequence, to, channel, state); });
}

/// Row `row` of `from` goes to a slot that there is.
inline void store_slot(const StateSlots& slots, const ArrayView& from, int64_t row, int64_t slot) {
  for_each_state(
      slots, [&](int64_t channel, int64_t state) { slots.store(from, row, slot, channel, state); });
}

}  // namespace selective_scan::cpu
