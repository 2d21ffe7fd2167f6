#include "state_slots.h"

namespace selective_scan::op {

StateSlots state_slots(const Tensor& pool, int64_t sequences, const OptionalTensor& cache_indices,
                       const OptionalTensor& has_initial_state, int64_t pad_slot_id) {
  StateSlots slots;
  slots.pool = state_view(pool);
  slots.slots = pool.size(0);
  slots.channels = pool.size(1);
  slots.dstate = pool.size(2);
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
  check_slots("cache_indices", slots.indices, slots.sequences, slots);
}

}  // namespace selective_scan::op
