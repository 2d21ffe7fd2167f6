// States of sequences that lie in slots of a pool between calls, and the slots that a call uses.
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

/// The states in each slot are (channel, state), real or complex, of any dtype. A sequence whose
/// index is padding has no slot: nothing is read or written for it.
struct StateSlots : SlotRule {
  int64_t sequences = 0;
  int64_t slots = 0;
  int64_t channels = 0;
  int64_t dstate = 0;
  bool is_complex = false;
  bool is_double = false;  // the call's arrays are fp64, else fp32 or narrower
  int64_t pad_slot_id = -1;

  ArrayView pool;       // (slot, channel, state): ArrayView::batch is the stride of slots
  IndexArray indices;   // (sequence), optional: without them sequence i has slot i
  FlagArray has_state;  // (sequence): true if it continues from its slot, else it begins with 0

  SELECTIVE_SCAN_HD int64_t slot_of(int64_t index) const { return named_slot(index, *this); }
  SELECTIVE_SCAN_HD int64_t of(int64_t sequence) const {
    return indices.present() ? slot_of(indices.at(sequence)) : sequence;
  }

  /// Returns the slot whose state a sequence begins with; kNoSlot means that it begins with 0.
  SELECTIVE_SCAN_HD int64_t source(int64_t sequence) const {
    return has_state.at(sequence) ? of(sequence) : kNoSlot;
  }
};

}  // namespace selective_scan
