// Assigns threads to rows of states that have the size of a slot: adjacent threads have adjacent
// states.
#pragma once

#include <algorithm>

#include "../../core/state_slots.h"
#include "launch_shape.h"

namespace selective_scan::cuda {

constexpr int kSlotThreads = 128;

struct SlotRows {
  int64_t rows;
  int64_t blocks;  // per row
  int64_t channels;
  int64_t dstate;

  SlotRows(const StateSlots& slots, int64_t rows)
      : rows(rows),
        blocks(std::max<int64_t>(1, ceil_div(slots.channels * slots.dstate, kSlotThreads))),
        channels(slots.channels),
        dstate(slots.dstate) {}

  LaunchShape shape() const { return {std::min(rows * blocks, kMaxBlocks), kSlotThreads}; }
};

/// Returns the offset of a state in an array (row, channel, state).
__device__ inline int64_t state_offset(const ArrayView& view, int64_t row, int64_t channel,
                                       int64_t state) {
  return row * view.batch + channel * view.channel + state * view.state;
}

/// Calls visit(row, part) for this block's parts of rows; parts count from 0 to rows.blocks - 1.
template <class Visit>
__device__ void for_each_block(const SlotRows& rows, const Visit& visit) {
  for (int64_t block = blockIdx.x; block < rows.rows * rows.blocks; block += gridDim.x) {
    visit(block / rows.blocks, block % rows.blocks);
  }
}

/// Calls visit(row, channel, state) for the states of this thread.
template <class Visit>
__device__ void for_each_state(const SlotRows& rows, const Visit& visit) {
  for_each_block(rows, [&](int64_t row, int64_t part) {
    const int64_t index = part * kSlotThreads + threadIdx.x;
    if (index < rows.channels * rows.dstate) visit(row, index / rows.dstate, index % rows.dstate);
  });
}

}  // namespace selective_scan::cuda
