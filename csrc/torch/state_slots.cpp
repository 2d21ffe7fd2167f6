#include "state_slots.h"

namespace selective_scan::op {

StateSlots state_slots(int64_t sequences, const OptionalTensor& cache_indices,
                       const OptionalTensor& has_initial_state, int64_t pad_slot_id) {
  StateSlots slots;
  slots.sequences = sequences;
  slots.pad_slot_id = pad_slot_id;
  if (cache_indices) slots.indices = index_view(*cache_indices);
  if (has_initial_state) {
    const auto* data = static_cast<const bool*>(has_initial_state->const_data_ptr());
    slots.has_state = {data, has_initial_state->stride(0)};
  }
  return slots;
}

void check_slots(const StateSlots& slots) {
  if (!slots.indices.present()) return;
  for (int64_t i = 0; i < slots.sequences; ++i) {
    check_slot("cache_indices", slots.indices.at(i), slots);
  }
}

}  // namespace selective_scan::op
