// Arrays of integers: sequence boundaries, slots, lengths.
#pragma once

#include <cstdint>

#include "config.h"

namespace selective_scan {

/// Integers of 32 or 64 bits, indexed by (step) or (batch, step). Strides count elements.
struct IndexArray {
  const void* data = nullptr;  // null: absent
  bool is_wide = false;        // int64, else int32
  int64_t batch = 0;
  int64_t step = 0;

  SELECTIVE_SCAN_HD bool present() const { return data != nullptr; }

  SELECTIVE_SCAN_HD int64_t at(int64_t batch_index, int64_t step_index) const {
    const int64_t offset = batch_index * batch + step_index * step;
    return is_wide ? static_cast<const int64_t*>(data)[offset]
                   : static_cast<const int32_t*>(data)[offset];
  }
  SELECTIVE_SCAN_HD int64_t at(int64_t step_index) const { return at(0, step_index); }
};

/// How an index names a slot of a pool; a base class of the parameters that have such indices.
struct SlotRule {
  /// A slot that does not exist, as for padding: nothing is read or written.
  static constexpr int64_t kNoSlot = -1;

  /// Returns the slot that an index names, or kNoSlot for padding: an index that is negative,
  /// pad_slot_id or past the last slot. `Pool` has the members slots and pad_slot_id.
  template <class Pool>
  static SELECTIVE_SCAN_HD int64_t named_slot(int64_t index, const Pool& pool) {
    return index < 0 || index >= pool.slots || index == pool.pad_slot_id ? kNoSlot : index;
  }
};

/// Sequences packed one after another into `total` steps: sequence i has the steps [boundaries[i],
/// boundaries[i + 1]). Steps before the first boundary or from the last one on belong to no
/// sequence. Boundaries that are out of range or out of order are clamped, so that no function here
/// returns a step or a sequence that does not exist.
///
/// If `reversed`, the scan goes from the last step to the first and counts steps from the last one,
/// as its arrays do. Sequences keep their numbers, so they then come in descending order.
struct PackedSequences {
  static constexpr int64_t kNone = -1;

  IndexArray boundaries;  // (count + 1)
  int64_t count = 0;
  int64_t total = 0;
  bool reversed = false;

  SELECTIVE_SCAN_HD bool present() const { return boundaries.present(); }

  SELECTIVE_SCAN_HD int64_t begin(int64_t sequence) const {
    return reversed ? total - last(sequence) : first(sequence);
  }
  /// At least begin().
  SELECTIVE_SCAN_HD int64_t end(int64_t sequence) const {
    return reversed ? total - first(sequence) : last(sequence);
  }

  /// Return where the first sequence begins and the last one ends, in the order of the scan.
  SELECTIVE_SCAN_HD int64_t first_begin() const {
    return count == 0 ? total : begin(reversed ? count - 1 : 0);
  }
  SELECTIVE_SCAN_HD int64_t last_end() const {
    return count == 0 ? total : end(reversed ? 0 : count - 1);
  }

  /// Returns the sequence that a step belongs to, or kNone. Not for a reversed scan.
  SELECTIVE_SCAN_HD int64_t sequence_of(int64_t step) const {
    int64_t low = 0,
            high = count;  // sequences before `low` end by `step`, those from `high` on later
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (boundaries.at(middle + 1) <= step) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < count && begin(low) <= step ? low : kNone;
  }

 private:
  SELECTIVE_SCAN_HD int64_t first(int64_t sequence) const {
    return clamped(boundaries.at(sequence), 0, total);
  }
  SELECTIVE_SCAN_HD int64_t last(int64_t sequence) const {
    return clamped(boundaries.at(sequence + 1), first(sequence), total);
  }
  static SELECTIVE_SCAN_HD int64_t clamped(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
  }
};

}  // namespace selective_scan
