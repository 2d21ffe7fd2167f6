// Chunked prefill: every sequence is scanned in pieces that end at its checkpoints.
#include <algorithm>
#include <utility>

#include "../calls.h"
#include "../launch.h"
#include "../state_slots.h"
#include "packed.h"

namespace selective_scan::cpu {
namespace {

/// One of the packed sequences.
struct Sequence : ForwardParams {
  const PrefillParams* all;
  int64_t index;

  explicit Sequence(const PrefillParams& params) : ForwardParams(params), all(&params), index(0) {}

  static Sequence of(const Sequence& packed, int64_t index) {
    Sequence sequence = packed;
    static_cast<ForwardParams&>(sequence) = params_of(packed, index);
    sequence.index = index;
    return sequence;
  }

  int64_t slot() const { return all->slots.of(index); }

  /// Calls visit(begin, end, slot) for each piece: its steps, and the slot for the state after it.
  template <class Visit>
  void for_each_piece(const Visit& visit) const {
    int64_t begin = 0;
    for (int64_t i = 0; all->checkpoint_every > 0 && all->steps_before(index, i) <= seqlen; ++i) {
      const Checkpoint checkpoint = all->checkpoint(index, i);
      if (checkpoint.slot == StateSlots::kNoSlot) continue;
      visit(begin, checkpoint.steps, checkpoint.slot);
      begin = checkpoint.steps;
    }
    visit(begin, seqlen, slot());
  }
};

int64_t bytes_of_sequence(const Sequence& sequence, const ThreadPool& pool) {
  if (sequence.slot() == StateSlots::kNoSlot) return 0;
  int64_t bytes = 0;
  sequence.for_each_piece([&](int64_t begin, int64_t end, int64_t) {
    bytes = std::max(bytes, workspace_bytes(steps_of(sequence, begin, end - begin), pool));
  });
  return bytes;
}

void scan_sequence(const Sequence& sequence, void* workspace, const ThreadPool& pool) {
  const PrefillParams& all = *sequence.all;
  const StateSlots& slots = all.slots;
  if (sequence.slot() == StateSlots::kNoSlot) {
    return clear_sequence(slots, all.packed, sequence.index, all.out);
  }
  load_slot(slots, sequence.index, all.initial_state);
  // The state after a piece is the state before the next one.
  ArrayView before = sequence.initial_state, behind = sequence.last_state;
  sequence.for_each_piece([&](int64_t begin, int64_t end, int64_t slot) {
    ForwardParams piece = steps_of(sequence, begin, end - begin);
    piece.initial_state = before;
    piece.last_state = behind;
    launch(piece, workspace, pool);
    store_slot(slots, behind, 0, slot);
    std::swap(before, behind);
  });
}

Calls<Sequence> calls_of(const Sequence& packed, const ThreadPool& pool) {
  return {packed, &Sequence::of, true, pool};
}

}  // namespace

int64_t workspace_bytes(const PrefillParams& params, const ThreadPool& pool) {
  const Sequence packed(params);
  return calls_of(packed, pool).workspace_bytes(bytes_of_sequence);
}

void launch(const PrefillParams& params, void* workspace, const ThreadPool& pool) {
  const Sequence packed(params);
  const Calls<Sequence> calls = calls_of(packed, pool);
  calls.run(workspace, calls.workspace_bytes(bytes_of_sequence),
            [](int64_t, const Sequence& sequence, void* memory, const ThreadPool& threads) {
              scan_sequence(sequence, memory, threads);
            });
  clear_padding(params);
}

}  // namespace selective_scan::cpu
