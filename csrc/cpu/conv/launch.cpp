// The causal convolution on the CPU: its division into tasks, and the sums of the tasks' results.

#include "../launch.h"

#include <algorithm>

#include "../capability.h"
#include "../state_slots.h"
#include "../tasks.h"

namespace selective_scan::cpu {
namespace {

/// The most steps times channels of a task. A pass is divided into at least kWantedTasks tasks as
/// long as segments keep kMinSegment steps.
constexpr int64_t kTaskElements = 32768;
constexpr int64_t kWantedTasks = 32;
constexpr int64_t kMinSegment = 64;
/// An update of fewer values than this finishes before another thread has woken up.
constexpr int64_t kSmallUpdate = 16384;

const ConvKernels& kernels_for(const ConvParams& params) {
  return chosen_kernels(params.is_double).conv;
}

ConvSplit split_of(const ConvParams& params) {
  const ConvKernels& kernels = kernels_for(params);
  const int64_t width = kernels.vector_channels;
  ConvSplit split;
  const bool is_wide = params.x.channel == 1;
  const int64_t most = is_wide ? kernels.max_block_channels : width;
  split.blocks = ceil_div(params.dim, most);
  split.block_channels = round_up(ceil_div(params.dim, split.blocks), width);
  split.blocks = ceil_div(params.dim, split.block_channels);
  split.tile_steps = kernels.tile_elements / split.block_channels;

  const int64_t rows = params.batch * split.blocks;
  const int64_t wanted = ceil_div(params.seqlen, ceil_div(kWantedTasks, rows));
  split.segment_steps =
      std::min(std::max(wanted, kMinSegment), kTaskElements / split.block_channels);
  split.segments = ceil_div(params.seqlen, split.segment_steps);
  return split;
}

/// Adjacent blocks, which may share memory pages, are adjacent in the order of the tasks.
template <class Body>
void for_each_task(const ConvParams& params, const ConvSplit& split, const ThreadPool& pool,
                   const Body& body) {
  parallel_for(pool, params.batch * split.segments * split.blocks, [&](int64_t index) {
    const int64_t outer = index / split.blocks;
    body(ConvTask{outer / split.segments, outer % split.segments, index % split.blocks});
  });
}

template <class Params>
void for_each_end(const Params& params, const ConvSplit& split, const ThreadPool& pool,
                  void (*kernel)(const Params&, const ConvSplit&, int64_t, int64_t)) {
  parallel_for(pool, params.sequences * split.blocks, [&](int64_t index) {
    kernel(params, split, index / split.blocks, index % split.blocks);
  });
}

int64_t part_values(const ConvParams& params) {
  return (params.width + 1) * params.dim;
}
int64_t part_bytes(const ConvParams& params) {
  return part_values(params) * (params.is_double ? 8 : 4);
}

/// Sums the tasks' parts in a fixed order.
template <class T>
void add_parts(const ConvBackwardParams& params, const void* parts, int64_t num_parts,
               const ThreadPool& pool) {
  constexpr int64_t kChannels = 64;
  const int64_t chunks = ceil_div(params.dim, kChannels);
  parallel_for(pool, (params.width + 1) * chunks, [&](int64_t index) {
    const int64_t tap = index / chunks, first = index % chunks * kChannels;
    const int64_t channels = std::min(kChannels, params.dim - first);
    const ArrayView& array = tap < params.width ? params.dweight : params.dbias;
    if (!array.present()) return;
    double sums[kChannels] = {};
    for (int64_t part = 0; part < num_parts; ++part) {
      const T* values =
          static_cast<const T*>(parts) + part * part_values(params) + tap * params.dim + first;
      for (int64_t i = 0; i < channels; ++i) sums[i] += values[i];
    }
    const int64_t offset = tap < params.width ? tap * array.step : 0;
    for (int64_t i = 0; i < channels; ++i) {
      store_element(array.data, array.dtype, offset + (first + i) * array.channel, sums[i]);
    }
  });
}

}  // namespace

int64_t workspace_bytes(const ConvBackwardParams& params, const ThreadPool&) {
  return params.batch * split_of(params).segments * part_bytes(params);
}

void launch(const ConvForwardParams& params, void*, const ThreadPool& pool) {
  const ConvKernels& kernels = kernels_for(params);
  const ConvSplit split = split_of(params);
  for_each_task(params, split, pool,
                [&](const ConvTask& task) { kernels.forward(params, split, task); });
  if (params.final_states.present()) for_each_end(params, split, pool, kernels.end_forward);
}

void launch(const ConvPrefillParams& params, void* workspace, const ThreadPool& pool) {
  const StateSlots& slots = params.slots;
  for (int64_t i = 0; i < slots.sequences; ++i)
    load_slot(slots, i, params.as_states(params.initial_states));
  launch(static_cast<const ConvForwardParams&>(params), workspace, pool);
  for (int64_t i = 0; i < slots.sequences; ++i) {
    const int64_t slot = slots.of(i);
    if (slot == StateSlots::kNoSlot) {
      clear_sequence(slots, params.packed(), i, params.out);
    } else {
      store_slot(slots, params.as_states(params.final_states), i, slot);
    }
  }
}

void launch(const ConvBackwardParams& params, void* workspace, const ThreadPool& pool) {
  const ConvKernels& kernels = kernels_for(params);
  const ConvSplit split = split_of(params);
  for_each_task(params, split, pool, [&](const ConvTask& task) {
    const int64_t index = task.batch * split.segments + task.segment;
    kernels.backward(params, split, task,
                     static_cast<char*>(workspace) + index * part_bytes(params));
  });
  const auto add = params.is_double ? &add_parts<double> : &add_parts<float>;
  add(params, workspace, params.batch * split.segments, pool);
  if (params.dinitial_states.present()) for_each_end(params, split, pool, kernels.end_backward);
}

void launch(const ConvUpdateParams& params, void*, const ThreadPool& pool) {
  const ConvKernels& kernels = kernels_for(params);
  const ConvSplit split = split_of(params);
  const bool is_small = params.batch * params.dim * params.seqlen < kSmallUpdate;
  parallel_for(is_small ? pool.one_thread() : pool, params.batch * split.blocks,
               [&](int64_t index) {
                 kernels.update(params, split, index / split.blocks, index % split.blocks);
               });
}

}  // namespace selective_scan::cpu
