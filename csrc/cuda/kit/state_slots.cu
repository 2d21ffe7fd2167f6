#include "state_slots.h"

#include "launch_tools.h"
#include "slot_rows.cuh"

namespace selective_scan::cuda {
namespace {

struct SlotArgs {
  StateSlots slots;
  SlotRows rows;
  ArrayView states;  // (sequence, channel, state)
  PackedSequences packed;
  ArrayView out;
};

__global__ void __launch_bounds__(kSlotThreads)
    load_slots_kernel(const __grid_constant__ SlotArgs args) {
  for_each_state(args.rows, [&](int64_t sequence, int64_t channel, int64_t state) {
    args.slots.load(sequence, args.states, channel, state);
  });
}

/// Together the blocks of a sequence that is padding write its steps' zeros.
__device__ void clear_steps(const SlotArgs& args, int64_t sequence, int64_t part) {
  const int64_t begin = args.packed.begin(sequence);
  const int64_t steps = args.packed.end(sequence) - begin;
  const int64_t count = args.slots.channels * steps;
  for (int64_t i = part * kSlotThreads + threadIdx.x; i < count;
       i += args.rows.blocks * kSlotThreads) {
    const int64_t at = i / steps * args.out.channel + (begin + i % steps) * args.out.step;
    store_element(args.out.data, args.out.dtype, at, 0.0f);
  }
}

__global__ void __launch_bounds__(kSlotThreads)
    store_slots_kernel(const __grid_constant__ SlotArgs args) {
  for_each_block(args.rows, [&](int64_t sequence, int64_t part) {
    if (args.slots.of(sequence) == StateSlots::kNone) clear_steps(args, sequence, part);
  });
  for_each_state(args.rows, [&](int64_t sequence, int64_t channel, int64_t state) {
    const int64_t slot = args.slots.of(sequence);
    if (slot != StateSlots::kNone) args.slots.store(args.states, sequence, slot, channel, state);
  });
}

}  // namespace

cudaError_t load_slots(const StateSlots& slots, const ArrayView& to, cudaStream_t stream) {
  const SlotRows rows(slots, slots.sequences);
  if (rows.rows == 0) return cudaSuccess;
  return launch_kernel(load_slots_kernel, rows.shape(), stream, {slots, rows, to, {}, {}});
}

cudaError_t store_slots(const StateSlots& slots, const ArrayView& from,
                        const PackedSequences& packed, const ArrayView& out, cudaStream_t stream) {
  const SlotRows rows(slots, slots.sequences);
  if (rows.rows == 0) return cudaSuccess;
  return launch_kernel(store_slots_kernel, rows.shape(), stream, {slots, rows, from, packed, out});
}

}  // namespace selective_scan::cuda
