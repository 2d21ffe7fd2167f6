#include "state_slots.h"

#include "elements.cuh"
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

template <class T>
__global__ void __launch_bounds__(kSlotThreads)
    load_slots_kernel(const __grid_constant__ SlotArgs args) {
  const ArrayView& pool = args.slots.pool;
  for_each_state(args.rows, [&](int64_t sequence, int64_t channel, int64_t state) {
    const int64_t slot = args.slots.source(sequence);
    const T value = slot == StateSlots::kNoSlot
                        ? T{}
                        : load_component<T>(pool, state_offset(pool, slot, channel, state));
    store_component(args.states, state_offset(args.states, sequence, channel, state), value);
  });
}

/// Writes zeros for the steps of a sequence that is padding; its blocks share the work.
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

template <class T>
__global__ void __launch_bounds__(kSlotThreads)
    store_slots_kernel(const __grid_constant__ SlotArgs args) {
  const ArrayView& pool = args.slots.pool;
  for_each_block(args.rows, [&](int64_t sequence, int64_t part) {
    if (args.slots.of(sequence) == StateSlots::kNoSlot) clear_steps(args, sequence, part);
  });
  for_each_state(args.rows, [&](int64_t sequence, int64_t channel, int64_t state) {
    const int64_t slot = args.slots.of(sequence);
    if (slot == StateSlots::kNoSlot) return;
    store_component(
        pool, state_offset(pool, slot, channel, state),
        load_component<T>(args.states, state_offset(args.states, sequence, channel, state)));
  });
}

}  // namespace

cudaError_t load_slots(const StateSlots& slots, const ArrayView& to, cudaStream_t stream) {
  const SlotArgs args{slots, SlotRows(slots, slots.sequences), to, {}, {}};
  if (args.rows.rows == 0) return cudaSuccess;
  return with_state_type(slots, [&]<class T>(T*) {
    return launch_kernel(load_slots_kernel<T>, args.rows.shape(), stream, args);
  });
}

cudaError_t store_slots(const StateSlots& slots, const ArrayView& from,
                        const PackedSequences& packed, const ArrayView& out, cudaStream_t stream) {
  const SlotArgs args{slots, SlotRows(slots, slots.sequences), from, packed, out};
  if (args.rows.rows == 0) return cudaSuccess;
  return with_state_type(slots, [&]<class T>(T*) {
    return launch_kernel(store_slots_kernel<T>, args.rows.shape(), stream, args);
  });
}

}  // namespace selective_scan::cuda
