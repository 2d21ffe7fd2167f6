// The arguments that say which slots of a pool a call's sequences have.
#pragma once

#include "../core/state_slots.h"
#include "packed_sequences.h"
#include "tensor_views.h"

namespace selective_scan::op {

/// Fills in what these arguments say; `pool` is (slots, channels, states). Whether states are
/// complex or double is still to be said.
StateSlots state_slots(const Tensor& pool, int64_t sequences, const OptionalTensor& cache_indices,
                       const OptionalTensor& has_initial_state, int64_t pad_slot_id);

/// Refuses an index of a slot that there is not; `Pool` has `slots`, and may have a pad_slot_id.
template <class Pool>
void check_slot(const char* name, int64_t index, const Pool& pool) {
  if (index < pool.slots) return;
  if constexpr (requires { pool.pad_slot_id; }) {
    if (index == pool.pad_slot_id) return;
  }
  fail(name, " must be less than slots = ", pool.slots, ", got ", index);
}
/// Checks `count` indices, if there are any; reads them, so that they must be the host's.
template <class Pool>
void check_slots(const char* name, const IndexArray& indices, int64_t count, const Pool& pool) {
  if (!indices.present()) return;
  for (int64_t i = 0; i < count; ++i) check_slot(name, indices.at(i), pool);
}
/// Checks those of all sequences.
void check_slots(const StateSlots& slots);

}  // namespace selective_scan::op
