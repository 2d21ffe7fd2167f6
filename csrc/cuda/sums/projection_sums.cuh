// The gradients of variable B and C: sums over tiles.
#pragma once

#include "../kit/config.h"
#include "../kit/states.cuh"
#include "sums.h"

namespace selective_scan::cuda {

constexpr int kSumThreads = 256;
constexpr int kSumBatch = 4;        // loads that a thread has in flight at a time
constexpr int kMostSumStates = 16;  // per block
constexpr int kMostSumWays = 8;

/// ProjectionSums divided into work items of one block each. The numbers of a block's steps, states
/// and ways are powers of two.
struct ProjectionWork : ProjectionSums {
  int way_bits = 0;    // log2 of the ways among which the block divides the tiles
  int state_bits = 0;  // log2 of the block's states of a step
  int step_bits = 0;   // log2 of the block's steps at a time
  int item_steps = 1;
  int64_t tile_stride = 0;
  int64_t slice_stride = 0;
  int64_t step_items = 1;  // of one (batch, group)
  int64_t state_items = 1;
  int64_t items = 0;
};

/// Loads values that are not read again.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_once(const T* source) {
  if constexpr (sizeof(T) * kCount == sizeof(float4)) {
    return bit_cast<Pack<T, kCount>>(__ldcs(reinterpret_cast<const float4*>(source)));
  } else {
    return load_pack<T, kCount>(source);
  }
}

/// A block processes some steps and states of one (batch, group) at a time. A thread sums kVector
/// contiguous values of a step. If there are few work items with many tiles each, the block's
/// threads divide the tiles among several ways: way w of W has the tiles w, w + W, w + 2W and so
/// on. The ways' sums are added in order and written along steps, through shared memory.
///
/// Bound by memory, provided that enough loads are in flight. So loads come in batches: of tiles
/// or, with a single tile, of that many times the block's steps, which then make up a work item.
/// The loads of a whole batch have no branch or predicate between them; otherwise the compiler
/// would make each wait for the previous one.
template <class T, int kVector>
struct ProjectionItem {
  using Terms = Pack<T, kVector>;
  /// (way, B | C, state, step), with one more step in memory to avoid bank conflicts.
  using Results = T[kSumThreads * kVector + kMostSumWays * 2 * kMostSumStates];

  /// Divides sums into work items.
  static ProjectionWork divide(const ProjectionSums& sums) {
    ProjectionWork work{sums};
    if (sums.parts == nullptr) return work;
    const int64_t sequences = sums.batch * sums.groups;
    work.tile_stride = sequences * sums.steps * 2 * sums.slice_states;
    work.slice_stride = sums.tiles * work.tile_stride;
    while (work.state_bits < kMostStateBits && 1 << work.state_bits < sums.slice_states) {
      ++work.state_bits;
    }
    work.state_items = ceil_div(sums.states, 1 << work.state_bits);
    const auto set_ways = [&](int bits) {
      work.way_bits = bits;
      work.step_bits = kValueBits - bits - work.state_bits - 1;
      work.item_steps = (sums.tiles == 1 ? kSumBatch : 1) << work.step_bits;
      work.step_items = ceil_div(sums.steps, work.item_steps);
      work.items = sequences * work.step_items * work.state_items;
    };
    // With more items than this, the device is busy without more ways, each of which needs a batch.
    constexpr int64_t kManyItems = 512;
    set_ways(0);
    while (1 << work.way_bits < kMostSumWays && work.items < kManyItems &&
           sums.tiles >= int64_t{2 * kSumBatch} << work.way_bits) {
      set_ways(work.way_bits + 1);
    }
    return work;
  }

  /// The values that a thread sums; `value` is the first of (B | C, state).
  struct Place {
    int way;
    int value;
    int t;

    __device__ Place(const ProjectionWork& work, int thread) {
      const int way_threads = kSumThreads >> work.way_bits;
      way = thread / way_threads;
      const int position = (thread & (way_threads - 1)) * kVector;
      value = position & ((2 << work.state_bits) - 1);
      t = position >> (work.state_bits + 1);
    }
  };

  const ProjectionWork& work;
  Results& results;
  int64_t sequence;  // batch · groups + group
  int first_state;
  int64_t first_step;
  int steps;  // of those that exist
  int states;

  __device__ ProjectionItem(const ProjectionWork& work, Results& results, int64_t item)
      : work(work), results(results) {
    const int64_t block = item / work.step_items;
    sequence = block / work.state_items;
    first_state = static_cast<int>(block % work.state_items) << work.state_bits;
    first_step = item % work.step_items * work.item_steps;
    const int64_t all = work.chunks.present() ? int64_t{work.chunks.count()} * kChunk : work.steps;
    const int64_t left = all - first_step;
    steps = left < work.item_steps ? static_cast<int>(left) : work.item_steps;
    states = static_cast<int>(work.states) - first_state;
  }

  /// Returns the offset of the item's (batch, group, state).
  __device__ int64_t target(const ArrayView& view) const {
    return sequence / work.groups * view.batch + sequence % work.groups * view.group +
           first_state * view.state;
  }

  __device__ int state_of(int value) const { return value & ((1 << work.state_bits) - 1); }

  /// Sums the item. All threads of the block call this together, and also write().
  __device__ void add() {
    const Place place(work, threadIdx.x);
    const bool has_terms = state_of(place.value) < states && place.t < steps;
    const T* source =
        static_cast<const T*>(work.parts) + first_state / work.slice_states * work.slice_stride +
        place.way * work.tile_stride +
        ((sequence * work.steps + first_step + place.t) * 2 + (place.value >> work.state_bits)) *
            work.slice_states +
        first_state % work.slice_states + state_of(place.value);
    const int block_steps = 1 << work.step_bits;
    if (work.tiles == 1) {
      const int distance = 2 * work.slice_states << work.step_bits;
      const int64_t dB = target(work.dB), dC = target(work.dC);
      Terms terms[kSumBatch] = {};
#pragma unroll
      for (int k = 0; k < kSumBatch; ++k) {
        const bool exists = k == 0 || place.t + k * block_steps < steps;
        if (has_terms && exists) terms[k] = load_once<T, kVector>(source + k * distance);
      }
#pragma unroll
      for (int k = 0; k < kSumBatch; ++k) {
        if (k * block_steps < steps) write(terms[k], k * block_steps, dB, dC);
      }
      return;
    }
    Terms sum = {};
    const int64_t distance = work.tile_stride << work.way_bits;
    const auto add_batch = [&](int count) {
      Terms terms[kSumBatch] = {};
#pragma unroll
      for (int k = 0; k < kSumBatch; ++k) {
        if (k < count) terms[k] = load_once<T, kVector>(source);
        source += distance;
      }
#pragma unroll
      for (int k = 0; k < kSumBatch; ++k) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) sum.v[v] += terms[k].v[v];
      }
    };
    if (has_terms) {
      const int ways = 1 << work.way_bits;
      int left = (static_cast<int>(work.tiles) - place.way + ways - 1) >> work.way_bits;
#pragma unroll 1
      for (; left >= kSumBatch; left -= kSumBatch) add_batch(kSumBatch);
      add_batch(left);
    }
    write(sum, 0, target(work.dB), target(work.dC));
  }

  /// Stores the ways' sums for the block's steps, from the item's step `first` on.
  __device__ void write(const Terms& sum, int first, int64_t dB, int64_t dC) {
    const int thread = opaque(threadIdx.x);  // keeps derived values out of registers until here
    const Place place(work, thread);
    const int values = 2 << work.state_bits;
    const int stride = (1 << work.step_bits) + 1;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      results[(place.way * values + place.value + v) * stride + place.t] = sum.v[v];
    }
    __syncthreads();
    const int t = thread & ((1 << work.step_bits) - 1);
    int64_t step = first_step + first + t;
    bool exists = first + t < steps;
    if (exists && work.chunks.present()) {
      const PackedChunk chunk = work.chunks[step / kChunk];
      const int of_chunk = static_cast<int>(step % kChunk);
      step = chunk.first_step + of_chunk;
      exists = of_chunk < chunk.steps;
    }
    if (exists) {
      for (int v = thread >> work.step_bits; v < values; v += kSumThreads >> work.step_bits) {
        const bool is_C = v >> work.state_bits != 0;
        const ArrayView& view = is_C ? work.dC : work.dB;
        if (state_of(v) >= states || !view.present()) continue;
        T total = results[v * stride + t];
#pragma unroll 1
        for (int other = 1; other < 1 << work.way_bits; ++other) {
          total += results[(other * values + v) * stride + t];
        }
        store_component(view, (is_C ? dC : dB) + step * view.step + state_of(v) * view.state,
                        total);
      }
    }
    __syncthreads();
  }

 private:
  static constexpr int kMostStateBits = 4;
  static_assert(1 << kMostStateBits == kMostSumStates);
  static constexpr int log2(int number) { return number == 1 ? 0 : 1 + log2(number / 2); }
  static constexpr int kValueBits = log2(kSumThreads * kVector);  // that a block sums at a time
};

}  // namespace selective_scan::cuda
