// The arguments that assign a call's sequences to slots of a pool.
#pragma once

#include "../core/state_slots.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// Fills in these arguments. `pool` is (slots, channels, states). The caller still sets whether
/// states are complex or double.
inline StateSlots state_slots(const Tensor& pool, int64_t sequences,
                              const OptionalTensor& cache_indices,
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

/// Refuses the index of a slot that does not exist. `Pool` has `slots`, and may have a pad_slot_id.
template <class Pool>
void check_slot(const char* name, int64_t index, const Pool& pool) {
  if (index < pool.slots) return;
  if constexpr (requires { pool.pad_slot_id; }) {
    if (index == pool.pad_slot_id) return;
  }
  fail(name, " must be less than slots = ", pool.slots, ", got ", index);
}
/// Checks `count` indices, if they are given. Reads them, so they must be in host memory.
template <class Pool>
void check_slots(const char* name, const IndexArray& indices, int64_t count, const Pool& pool) {
  if (!indices.present()) return;
  for (int64_t i = 0; i < count; ++i) check_slot(name, indices.at(i), pool);
}
/// Checks the slots of all sequences.
inline void check_slots(const StateSlots& slots) {
  check_slots("cache_indices", slots.indices, slots.sequences, slots);
}

}  // namespace selective_scan::op
