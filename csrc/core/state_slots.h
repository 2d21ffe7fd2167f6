// States of sequences that lie in slots of a pool between the calls, and where a call has them.
#pragma once

#include <cstdint>

#include "index_array.h"
#include "params.h"

namespace selective_scan {

/// Bools, one for each sequence. The stride counts elements.
struct FlagArray {
  const bool* data = nullptr;  // null: all are false
  int64_t stride = 0;

  SELECTIVE_SCAN_HD bool at(int64_t index) const { return data != nullptr && data[index * stride]; }
};

/// The states are (channel, state) of each slot, real or complex, of any dtype. A sequence whose
/// index is padding has none: nothing is read or written for it.
struct StateSlots : SlotRule {
  int64_t sequences = 0;
  int64_t slots = 0;
  int64_t channels = 0;
  int64_t dstate = 0;
  bool is_complex = false;
  bool is_double = false;  // the arrays of a call are fp64, else fp32 or less
  int64_t pad_slot_id = -1;

  ArrayView pool;       // (slot, channel, state): ArrayView::batch is the stride of slots
  IndexArray indices;   // (sequence), optional: else sequence i has slot i
  FlagArray has_state;  // (sequence): whether it goes on from its slot, else it begins with 0

  SELECTIVE_SCAN_HD int64_t slot_of(int64_t index) const { return named_slot(index, *this); }
  SELECTIVE_SCAN_HD int64_t of(int64_t sequence) const {
    return indices.present() ? slot_of(indices.at(sequence)) : sequence;
  }

  /// Returns the slot where a sequence begins; kNoSlot means that it begins with 0.
  SELECTIVE_SCAN_HD int64_t source(int64_t sequence) const {
    return has_state.at(sequence) ? of(sequence) : kNoSlot;
  }
};

}  // namespace selective_scan
