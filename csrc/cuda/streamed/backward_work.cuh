// Code that the streamed backward kernels share: the work of a lane, the states at the start of a
// chunk, and the final results.
#pragma once

#include "../kit/bulk_copy.cuh"
#include "../kit/shuffle.cuh"
#include "../kit/states.cuh"
#include "backward_rows.cuh"
#include "block_order.cuh"
#include "constant_sweeps.cuh"
#include "group_finish.cuh"

namespace selective_scan::cuda::streamed {

/// The work of a lane, with which all kernels begin.
template <class Shape, class T, int kSize, Method kMethod>
struct LaneWork {
  static constexpr int kStates = Shape::kStates;
  WorkItem item;
  int lane, warp;
  int slices;  // of the states, one per warp
  int team;    // number of the team: the warps with the same channels
  int slice;
  int channel_in_warp, part;
  int first_state;
  int channels;           // of the warp, existing ones
  int64_t first_channel;  // of the warp
  int64_t channel;
  bool exists;
  int steps;            // of the segment
  int chunks;           // of the segment
  int64_t channel_row;  // of (segment, batch, channel) arrays
  int64_t segment_row;  // of (segment, batch, channel, padded state) arrays

  __device__ __forceinline__ LaneWork(const BackwardArgs& args, const WorkItem& block_item,
                                      int slices = 1)
      : item(block_item),
        lane(threadIdx.x % kWarpSize),
        warp(warp_index()),
        slices(slices),
        team(warp / slices),
        slice(warp % slices),
        channel_in_warp(lane & (Shape::kChannels - 1)),
        part(lane >> Shape::kChannelBits),
        first_state(slice * Shape::kPadded + part * kStates) {
    const int left = item.channels - team * Shape::kChannels;
    channels = left < 0 ? 0 : left < Shape::kChannels ? left : Shape::kChannels;
    first_channel = item.first_channel + team * Shape::kChannels;
    channel = first_channel + channel_in_warp;
    exists = channel_in_warp < channels;
    steps = static_cast<int>(item.end - item.begin);
    chunks = ceil_div(steps, kChunk);
    channel_row = (item.segment * args.params.batch + item.batch) * args.params.dim + channel;
    segment_row = channel_row * (slices * Shape::kPadded) + first_state;
  }

  /// Drops the chunks that packed sequences do not have, given their total `count`, but keeps the
  /// first one, so that there are sums to store.
  __device__ __forceinline__ void trim(int64_t count) {
    const int64_t left = count - item.begin / kChunk;
    if (chunks > 0 && left < chunks) chunks = left < 1 ? 1 : static_cast<int>(left);
    steps = chunks * kChunk;
  }
  /// Returns the item with a packed sequence's number as its batch, which is its index in arrays of
  /// states.
  __device__ __forceinline__ WorkItem item_of(int sequence) const {
    WorkItem result = item;
    result.batch = sequence;
    return result;
  }

  /// Loads the lane's entries of a (channel, state) array.
  __device__ __forceinline__ Pack<T, kStates> load_parameters(const ArrayView& view,
                                                              int64_t dstate) const {
    Pack<T, kStates> states{};
    if (exists) {
      states = load_states<T, kStates>(view, channel * view.channel, first_state, dstate);
    }
    return states;
  }
  __device__ __forceinline__ LanePoles<T, kStates, kSize, kMethod> load_poles(
      const ScanParams& params) const {
    LanePoles<T, kStates, kSize, kMethod> poles{};
    const auto series = series_of<float>(params.method);
    const Pack<T, kStates> A = load_parameters(params.A, params.dstate);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      T pole = A.v[s];
      if constexpr (kGoesByIncrements<kMethod>) pole = ScanMath::invertible(pole);
      poles.A[s] = pole_scale<kMethod, T> * pole;
      poles.constants[s] = Formula<kMethod>::template constants<ScanMathFor<kSize>>(pole, series);
    }
    return poles;
  }
  __device__ __forceinline__ ConstantProjections<kStates> load_projections(
      const BackwardParams& params) const {
    return {load_parameters(params.B, params.dstate), load_parameters(params.C, params.dstate),
            params.dlast_state.present()};
  }

  /// Returns the ring through which the segment's chunks come, last chunk first. Its slots begin at
  /// byte `at` of shared memory.
  __device__ __forceinline__ ChunkRing<kBackwardRingSlots> ring(const BackwardArgs& args, int at,
                                                                bool variable) const {
    const int chunk_bytes = slices * Shape::kChunkBytes;
    const char* const first = args.projections +
                              (item.batch * args.params.groups + item.group) * args.sequence_bytes +
                              item.begin / kChunk * chunk_bytes;
    return {*reinterpret_cast<RingBarriers<kBackwardRingSlots>*>(shared_memory()),
            shared_memory() + at,
            first + static_cast<int64_t>(chunks - 1) * chunk_bytes,
            -chunk_bytes,
            chunk_bytes,
            variable ? chunks : 0};
  }
};

/// Loads a lane's states from those saved at the end of a chunk; `first_channel` points to the
/// states of the warp's first channel. Returns zeros unless `wanted`. States are loaded one by one:
/// with a branch, for whole vectors or around all loads, the compiler would wait where the branch's
/// paths join, although a chunk's work is meant to hide the latency of the loads.
template <class Shape, class T, int kSize, Method kMethod>
__device__ __forceinline__ Pack<T, Shape::kStates> load_saved_states(
    const LaneWork<Shape, T, kSize, kMethod>& work, const ScanParams& params,
    const char* first_channel, bool wanted) {
  const int dstate = static_cast<int>(params.dstate);
  const int left = work.exists && wanted ? dstate - work.first_state : 0;
  const T* const states =
      reinterpret_cast<const T*>(first_channel) + work.channel_in_warp * dstate + work.first_state;
  Pack<T, Shape::kStates> result{};
#pragma unroll
  for (int s = 0; s < Shape::kStates; ++s) {
    if (s < left) result.v[s] = states[s];
  }
  return result;
}

/// Loads the states before a chunk of packed sequences, which may be the initial states of one.
template <class Shape, class T, int kSize, Method kMethod>
__device__ __forceinline__ Pack<T, Shape::kStates> load_packed_states(
    const LaneWork<Shape, T, kSize, kMethod>& work, const ScanParams& params,
    const PackedChunk& chunk, const char* first_channel) {
  const ArrayView& initial = params.initial_state;
  const T* states = reinterpret_cast<const T*>(first_channel) +
                    work.channel_in_warp * static_cast<int>(params.dstate);
  int64_t stride = 1;
  bool wanted = chunk.steps > 0;
  if (chunk.is_first) {
    states = static_cast<const T*>(initial.data) + chunk.sequence * initial.batch +
             work.channel * initial.channel;
    stride = initial.state;
    wanted = initial.present();
  }
  const int left = work.exists && wanted ? static_cast<int>(params.dstate) - work.first_state : 0;
  Pack<T, Shape::kStates> result{};
#pragma unroll
  for (int s = 0; s < Shape::kStates; ++s) {
    if (s < left) result.v[s] = states[(work.first_state + s) * stride];
  }
  return result;
}

/// Converts the sums of sweeps over h/B and g/C to those over h and g and, at the first step of the
/// sequence, `carry` to the gradient of the state before it: see constant_sweeps.cuh.
template <class Shape, int kSize, Method kMethod>
__device__ __forceinline__ void finish_constant_sums(
    const BackwardArgs& args, const LaneWork<Shape, float, kSize, kMethod>& work, bool is_second,
    Pack<float, Shape::kStates>& carry, LaneSums<float, Shape::kStates>& lane_sums) {
  using States = Pack<float, Shape::kStates>;
  const BackwardParams& params = args.params;
  const auto [B, C] = work.load_projections(params);
  const bool is_start = work.item.begin == 0;
  const bool has_dC = params.dlast_state.present();
  const bool has_rest = is_start && params.initial_state.present();
  States initial{};
  if (has_rest) {
    initial =
        load_channel_states<float, Shape::kStates>(params.initial_state, work.item, work.channel,
                                                   work.exists, work.first_state, params.dstate);
  }
#pragma unroll
  for (int s = 0; s < Shape::kStates; ++s) {
    lane_sums.dC.v[s] = B.v[s] * lane_sums.dB.v[s];
    if (has_rest) lane_sums.dC.v[s] += carry.v[s] * initial.v[s];
    lane_sums.dB.v[s] *= C.v[s];
    lane_sums.dA.v[s] *= B.v[s] * C.v[s];
    if (is_start) carry.v[s] *= C.v[s];
  }
  if (has_dC) {
    lane_sums.dC = States{};
    // For the second part of a tile, the sum in memory already covers both parts, and zero is added
    // to it.
    if (work.exists && !is_second) {
      lane_sums.dC = load_pack<float, Shape::kStates>(static_cast<const float*>(args.workspace.dC) +
                                                      work.segment_row);
    }
  }
}

/// Stores the map of a segment from the gradient that enters it to the one that leaves it.
template <class Shape, class T, int kSize, Method kMethod>
__device__ __forceinline__ void store_summary(const BackwardArgs& args,
                                              const LaneWork<Shape, T, kSize, kMethod>& work,
                                              const Pack<T, Shape::kStates>& factor,
                                              const Pack<T, Shape::kStates>& offset) {
  const auto store = [&](void* array, const Pack<T, Shape::kStates>& states) {
    store_pack(static_cast<T*>(array) + work.segment_row, states);
  };
  store(args.workspace.segments.factors, factor);
  store(args.workspace.segments.offsets, offset);
}

/// Stores zero sums for a segment without steps, since the sums of all segments are added up.
template <class Shape, class T, int kSize, Method kMethod>
__device__ __forceinline__ void store_no_sums(const BackwardArgs& args,
                                              const LaneWork<Shape, T, kSize, kMethod>& work) {
  if (args.geometry.segments == 1 || !work.exists) return;
  store_pack(static_cast<T*>(args.workspace.dA) + work.segment_row, Pack<T, Shape::kStates>{});
  for (void* const sums : {args.workspace.dD, args.workspace.ddelta_bias}) {
    if (sums != nullptr && work.part == 0) static_cast<float*>(sums)[work.channel_row] = 0;
  }
}

/// Stores the final results of a lane: the gradient of the states before the first step, or the
/// gradient that the first part of a tile hands to the second, and the lane's sums over the steps.
/// The gradients of the states before the first steps of packed sequences are stored already.
template <bool kPacked, class Shape, class T, int kSize, Method kMethod>
__device__ __forceinline__ void store_results(
    const BackwardArgs& args, const BlockOrder& order,
    const LaneWork<Shape, T, kSize, kMethod>& work,
    const LanePoles<T, Shape::kStates, kSize, kMethod>& poles, const Pack<T, Shape::kStates>& carry,
    const LaneSums<T, Shape::kStates>& lane_sums) {
  constexpr int kStates = Shape::kStates;
  if (!work.exists) return;
  const BackwardParams& params = args.params;
  const WorkItem& item = work.item;
  if (order.is_first(item)) {
    store_pack(static_cast<T*>(args.workspace.segments.offsets) + work.segment_row, carry);
  } else if (!kPacked && item.begin == 0 && params.dinitial_state.present()) {
    store_channel_states(params.dinitial_state, item, work.channel, work.first_state, params.dstate,
                         carry);
  }
  const bool is_second = order.is_second(item);
  const auto store = [&](void* array, Pack<T, kStates> states) {
    if (array == nullptr) return;
    T* const target = static_cast<T*>(array) + work.segment_row;
    if (is_second) {
      const auto before = load_pack<T, kStates>(target);
#pragma unroll
      for (int s = 0; s < kStates; ++s) states.v[s] += before.v[s];
    }
    store_pack(target, states);
  };
  Pack<T, kStates> dA = lane_sums.dA;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    dA.v[s] = static_cast<float>(Formula<kMethod>::kXScale) * dA.v[s];
    if constexpr (kGoesByIncrements<kMethod>) {
      dA.v[s] = dA.v[s] * conj(reciprocal(poles.A[s]));
    }
  }
  store(args.workspace.dA, dA);
  store(args.workspace.dB, lane_sums.dB);
  store(args.workspace.dC, lane_sums.dC);
}

}  // namespace selective_scan::cuda::streamed
