// The parameters of chunked prefill: a forward scan of packed sequences that begin and end in slots
// of a pool and store intermediate states in further slots.
//
// A sequence may be split over several calls, each with a chunk of its steps. Positions count its
// steps from the first one of all calls. The state after every position that is a multiple of
// checkpoint_every is kept: the state after position (j + 1)·checkpoint_every goes to the slot in
// column j, however the sequence is split.
//
// As in params.h the caller has validated everything but the values of indices, positions and
// boundaries. `initial_state` and `last_state` are scratch arrays of the compute type, (sequence,
// channel, state), whose contents the kernels overwrite.
#pragma once

#include "state_slots.h"

namespace selective_scan {

/// The state after `steps` of a sequence's steps in this call goes to `slot`.
struct Checkpoint {
  int64_t sequence;
  int64_t steps;
  int64_t slot;  // StateSlots::kNoSlot: the checkpoint does not exist or is not kept
};

struct PrefillParams : ForwardParams {
  StateSlots slots;
  int64_t checkpoint_every = 0;  // 0: never
  int64_t columns = 0;           // of checkpoint_slots
  IndexArray first_positions;    // (sequence), optional: without them every sequence begins in this
                                 // call
  IndexArray checkpoint_slots;   // (sequence, column)

  /// Returns the number of the sequence's steps in all calls before this one.
  SELECTIVE_SCAN_HD int64_t first_position(int64_t sequence) const {
    const int64_t position = first_positions.present() ? first_positions.at(sequence) : 0;
    return position < 0 ? 0 : position;
  }

  /// Returns checkpoint `index` of a sequence, counted from the first one of this call.
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
  /// Returns the number of this call's steps before a checkpoint, which may exceed the sequence's
  /// length.
  SELECTIVE_SCAN_HD int64_t steps_before(int64_t sequence, int64_t index) const {
    const int64_t first = first_position(sequence) % checkpoint_every;
    return checkpoint_every - first + index * checkpoint_every;
  }
  SELECTIVE_SCAN_HD int64_t column_of(int64_t sequence, int64_t index) const {
    return first_position(sequence) / checkpoint_every + index;
  }

  /// Returns an upper bound on the number of checkpoints of all sequences together, whatever their
  /// boundaries and positions.
  SELECTIVE_SCAN_HD int64_t checkpoint_candidates() const {
    return checkpoint_every == 0 ? 0 : packed.total / checkpoint_every + packed.count;
  }
  /// Returns one of the candidates, which include every checkpoint of every sequence.
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
  /// A sequence of n steps has at most ceil(n / checkpoint_every) checkpoints, which is at most the
  /// difference between the next sequence's first candidate and its own.
  SELECTIVE_SCAN_HD int64_t first_candidate(int64_t sequence) const {
    return packed.begin(sequence) / checkpoint_every + sequence;
  }
};

}  // namespace selective_scan
