// What the kernels of chunked prefill are given: a forward scan of packed sequences that begin and
// end in slots of a pool, and on the way leave their states in further slots.
//
// A sequence may come in several calls, each with a chunk of its steps. Positions count its steps
// from the first one of all calls on. After every position that is a multiple of checkpoint_every
// the state is kept: that after position (j + 1)·checkpoint_every in the slot of column j, however
// the sequence is cut.
//
// As in params.h the caller has validated everything but the values of indices, positions and
// boundaries. `initial_state` and `last_state` are arrays of the compute type, (sequence, channel,
// state), for the kernels to use: what is in them before does not matter.
#pragma once

#include "state_slots.h"

namespace selective_scan {

/// The state after `steps` of a sequence's steps in this call goes to `slot`.
struct Checkpoint {
  int64_t sequence;
  int64_t steps;
  int64_t slot;  // StateSlots::kNoSlot: there is no such checkpoint, or it is kept nowhere
};

struct PrefillParams : ForwardParams {
  PrefillParams() = default;
  explicit PrefillParams(const ScanParams& inputs) : ForwardParams(inputs) {}

  StateSlots slots;
  int64_t checkpoint_every = 0;  // 0: never
  int64_t columns = 0;           // of checkpoint_slots
  IndexArray first_positions;    // (sequence), optional: else every sequence begins here
  IndexArray checkpoint_slots;   // (sequence, column)

  /// The steps of all calls before this one.
  SELECTIVE_SCAN_HD int64_t first_position(int64_t sequence) const {
    const int64_t position = first_positions.present() ? first_positions.at(sequence) : 0;
    return position < 0 ? 0 : position;
  }

  /// Checkpoint `index` of a sequence, counted from the first one of this call.
  SELECTIVE_SCAN_HD Checkpoint checkpoint(int64_t sequence, int64_t index) const {
    const int64_t length = packed.end(sequence) - packed.begin(sequence);
    if (index > length / checkpoint_every) return {sequence, length, StateSlots::kNoSlot};
    const int64_t steps = steps_before(sequence, index);
    const int64_t column = column_of(sequence, index);
    const bool exists = steps <= length && column < columns;
    const bool is_kept = exists && slots.of(sequence) != StateSlots::kNoSlot;
    const int64_t slot =
        is_kept ? slots.slot_of(checkpoint_slots.at(sequence, column)) : StateSlots::kNoSlot;
    return {sequence, steps, slot};
  }
  /// The steps of this call before it, perhaps more than the sequence has.
  SELECTIVE_SCAN_HD int64_t steps_before(int64_t sequence, int64_t index) const {
    const int64_t first = first_position(sequence) % checkpoint_every;
    return checkpoint_every - first + index * checkpoint_every;
  }
  SELECTIVE_SCAN_HD int64_t column_of(int64_t sequence, int64_t index) const {
    return first_position(sequence) / checkpoint_every + index;
  }

  /// These are as many as there can be in all sequences, whatever their boundaries and positions
  /// are.
  SELECTIVE_SCAN_HD int64_t checkpoint_candidates() const {
    return checkpoint_every == 0 ? 0 : packed.total / checkpoint_every + packed.count;
  }
  /// Every checkpoint of every sequence is one of the candidates.
  SELECTIVE_SCAN_HD Checkpoint candidate(int64_t index) const {
    int64_t low = 0, high = packed.count - 1;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (first_candidate(middle) <= index) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t of_sequence = index - first_candidate(low);
    if (of_sequence < 0) return {low, 0, StateSlots::kNoSlot};
    return checkpoint(low, of_sequence);
  }

 private:
  /// A sequence of n steps has at most ceil(n / checkpoint_every) checkpoints, which is no more
  /// than lies between this and that of the next one.
  SELECTIVE_SCAN_HD int64_t first_candidate(int64_t sequence) const {
    return packed.begin(sequence) / checkpoint_every + sequence;
  }
};

}  // namespace selective_scan
