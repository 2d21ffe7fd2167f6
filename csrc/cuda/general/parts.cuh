// The sequences that a work item has to do with.
#pragma once

#include "../kit/geometry.cuh"

namespace selective_scan::cuda::general {

/// The steps of one sequence that a work item has. Chunks are counted from the sequence's first
/// step on, and belong to the segment of time in which they begin.
struct Part {
  int64_t first_step;
  int64_t end_step;
  int64_t sequence;
  int64_t begin;  // of the sequence
  int64_t end;
  int64_t saved;  // the row of its first saved state

  __device__ bool exists() const { return first_step < end_step; }
  __device__ bool is_first() const { return first_step == begin; }
  __device__ bool is_last() const { return end_step == end; }
  /// Whether the state behind the chunk that begins with `step` is saved, and in which row.
  __device__ bool is_saved(int64_t step) const {
    return (step - begin) / kChunk < num_saved_states(end - begin);
  }
  __device__ int64_t saved_behind(int64_t step) const { return saved + (step - begin) / kChunk; }

  /// A work item of these steps alone.
  __device__ WorkItem steps_of(WorkItem item) const {
    item.begin = first_step;
    item.end = end_step;
    return item;
  }
  /// A work item that stands where the sequence does in arrays of states.
  __device__ WorkItem states_of(WorkItem item) const {
    item.batch = sequence;
    return item;
  }
};

/// All parts of a work item, in the order of the scan. Without packed sequences that is one.
class Parts {
 public:
  __device__ Parts(const ScanParams& params, const WorkItem& item) : params_(params), item_(item) {
    if (!params.packed.present()) return;
    const PackedSequences& packed = params.packed;
    first_ = count_up_to([&](int64_t sequence) { return packed.end(sequence) <= item.begin; });
    behind_ = count_up_to([&](int64_t sequence) { return packed.begin(sequence) < item.end; });
  }

  __device__ int64_t first() const { return first_; }
  __device__ int64_t behind() const { return behind_; }

  /// It may be empty.
  __device__ Part operator[](int64_t index) const {
    if (!params_.packed.present()) {
      const int64_t saved = item_.batch * num_saved_states(params_.seqlen);
      return {item_.begin, item_.end, item_.batch, 0, params_.seqlen, saved};
    }
    const int64_t sequence = in_order(index);
    const int64_t begin = params_.packed.begin(sequence);
    const int64_t end = params_.packed.end(sequence);
    const int64_t last = begin + chunks_before(item_.end, begin);
    return {begin + chunks_before(item_.begin, begin),
            last < end ? last : end,
            sequence,
            begin,
            end,
            first_saved_state(begin)};
  }

  /// The last part, or the first one, that is not empty; negative where there is none.
  __device__ int64_t last_one() const {
    int64_t index = behind_ - 1;
    while (index >= first_ && !(*this)[index].exists()) --index;
    return index < first_ ? -1 : index;
  }
  __device__ int64_t first_one() const {
    int64_t index = first_;
    while (index < behind_ && !(*this)[index].exists()) ++index;
    return index < behind_ ? index : -1;
  }

 private:
  __device__ int64_t in_order(int64_t index) const {
    return params_.packed.reversed ? params_.packed.count - 1 - index : index;
  }

  /// How many sequences fulfil a condition that the first ones do and the others do not.
  template <class Condition>
  __device__ int64_t count_up_to(const Condition& condition) const {
    int64_t low = 0, high = params_.packed.count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (condition(in_order(middle))) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  /// The steps from `begin` on of the chunks that begin before `limit`.
  static __device__ int64_t chunks_before(int64_t limit, int64_t begin) {
    return limit <= begin ? 0 : round_up(limit - begin, int64_t{kChunk});
  }

  const ScanParams& params_;
  const WorkItem& item_;
  int64_t first_ = 0;
  int64_t behind_ = 1;
};

}  // namespace selective_scan::cuda::general
