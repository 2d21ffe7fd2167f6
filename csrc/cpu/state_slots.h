// States of packed sequences from and to their slots of a pool. Nothing here depends on the
// instruction set.
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

/// What a sequence begins with goes to its row of `to`, (sequence, channel, state).
inline void load_slot(const StateSlots& slots, int64_t sequence, const ArrayView& to) {
  for_each_state(slots,
                 [&](int64_t channel, int64_t state) { slots.load(sequence, to, channel, state); });
}

/// Row `row` of `from` goes to a slot that there is.
inline void store_slot(const StateSlots& slots, const ArrayView& from, int64_t row, int64_t slot) {
  for_each_state(
      slots, [&](int64_t channel, int64_t state) { slots.store(from, row, slot, channel, state); });
}

/// Writes zeros to the steps of a sequence in `out`, (channel, step).
inline void clear_sequence(const StateSlots& slots, const PackedSequences& packed, int64_t sequence,
                           const ArrayView& out) {
  for (int64_t channel = 0; channel < slots.channels; ++channel) {
    for (int64_t step = packed.begin(sequence); step < packed.end(sequence); ++step) {
      store_element(out.data, out.dtype, channel * out.channel + step * out.step, 0.0f);
    }
  }
}

}  // namespace selective_scan::cpu
