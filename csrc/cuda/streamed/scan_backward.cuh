// The streamed backward scan.
//
// Mapping. A warp owns kWarpSize / lanes channels of one group and walks backwards through time, in
// chunks of kChunk steps; a lane holds 16 bytes of states of one of these channels. A block is up
// to kMaxWarps such warps. These share B and C, which come in fp32 from projections.cu through a
// ring of chunks (bulk_copy.cuh), and the sums for dB and dC (channel_sums.cuh); but for these two,
// warps run alone.
//
// A warp and chunk: u, delta, z and dout become rows of Δ, Δ·u, dy, ... in shared memory, once per
// (channel, step). From the state saved before the chunk every lane sweeps forward, keeping the
// state before each block of kBlockSteps steps; then, last block first, it computes the block's
// states again in registers and sweeps backwards through them (backward_sweeps.cuh). The parts of
// du, ddelta and y that a lane holds go to planes in shared memory and are added over the channel's
// lanes every kGroupSteps steps; the gradients replace rows that are not needed any more and are
// stored at the end of the chunk. The next chunk is brought to the L2 cache while this one is
// worked on, and loaded into registers before this one's gradients are stored.
//
// Sums over tiles, batches and segments of time follow in reduce.cu. Every sum has a fixed order.
//
// Shared memory: backward_shape.h. Bound by: issue slots, and nearly as much by the data path of
// shared memory.
#pragma once

#include "../launch_tools.h"
#include "../scan_common.cuh"
#include "backward_rows.cuh"

namespace selective_scan::cuda::streamed {

/// What both kernels begin with.
template <class Shape, class T, int kSize, Method kMethod>
struct LaneWork {
  static constexpr int kStates = Shape::kStates;
  WorkItem item;
  int lane, warp;
  int slices;  // of the states, each with a warp of its own
  int team;    // of the warps with the same channels
  int slice;
  int channel_in_warp, part;
  int first_state;
  int channels;           // of the warp, that exist
  int64_t first_channel;  // of the warp
  int64_t channel;
  bool exists;
  int steps;            // of the segment
  int chunks;           // likewise
  int64_t channel_row;  // of (segment, batch, channel) arrays
  int64_t segment_row;  // of (segment, batch, channel, padded state) arrays

  __device__ __forceinline__ LaneWork(const BackwardArgs& args, const WorkItem& block_item,
                                      int slices = 1)
      : item(block_item),
        lane(threadIdx.x % kWarpSize),
        warp(__shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0)),
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
    chunks = (steps + kChunk - 1) / kChunk;
    channel_row = (item.segment * args.params.batch + item.batch) * args.params.dim + channel;
    segment_row = channel_row * (slices * Shape::kPadded) + first_state;
  }

  __device__ __forceinline__ LanePoles<T, kStates, kSize, kMethod> load_poles(
      const ScanParams& params) const {
    LanePoles<T, kStates, kSize, kMethod> poles{};
    const auto load = [&](const ArrayView& view) {
      Pack<T, kStates> states{};
      if (exists) {
        states = load_states<T, kStates>(view, channel * view.channel, first_state, params.dstate);
      }
      return states;
    };
    const Pack<T, kStates> A = load(params.A);
    if (!params.variable_B) poles.B = load(params.B);
    if (!params.variable_C) poles.C = load(params.C);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      T pole = A.v[s];
      if constexpr (kHasIncrements<Shape, kMethod>) pole = ScanMath::invertible(pole);
      poles.A[s] = pole_scale<kMethod, T> * pole;
      poles.constants[s] = Formula<kMethod>::template constants<ScanMathFor<kSize>>(pole);
    }
    return poles;
  }

  /// The largest step that a chunk must have for ExactIncrements to serve all of the lane's poles.
  /// A pole that is no number has no say in it: it spoils its own channel either way.
  __device__ __forceinline__ float least_increment(
      const LanePoles<T, kStates, kSize, kMethod>& poles, int64_t dstate) const {
    float least = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (exists && first_state + s < dstate && is_finite(poles.A[s])) {
        least = fmaxf(least, ScanMathFor<kSize>::least_increment(poles.constants[s]));
      }
    }
    return least;
  }
  /// The largest |Δ| of the lane's channel in a chunk. `row` is the channel's row.
  __device__ __forceinline__ float largest_step(int row) const {
    constexpr int kHeld = kChunk / Shape::kParts;
    constexpr int kVector = kHeld < 4 ? kHeld : 4;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kHeld; i += kVector) {
      const auto delta = shared_load<float, kVector>(row + Shape::kDelta + (part * kHeld + i) * 4);
      for (const float value : delta.v) largest = fmaxf(largest, fabsf(value));
    }
#pragma unroll
    for (int mask = Shape::kChannels; mask < kWarpSize; mask *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, mask));
    }
    return largest;
  }

  /// The ring through which the segment's chunks come, last one first.
  __device__ __forceinline__ ChunkRing<kBackwardRingSlots> ring(const BackwardArgs& args,
                                                                const BackwardLayout& layout,
                                                                bool variable) const {
    return ring(args, layout.ring, variable);
  }
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

/// A block's part of a tile, where tiles do not fill the multiprocessors evenly.
///
/// With s multiprocessors and more than s tiles, the first s of these, the split ones, are worked
/// on in two parts: of tile k the last k/s of its steps, by block k, and the others by one of the
/// last s blocks. Between these blocks come the whole tiles. Multiprocessors take blocks in order:
/// first a part, the longer the later it ends; the first to end it take whole tiles, and the
/// longest of the rests that are left goes to who is free first. Thus all end at the same time.
///
/// The second part of a tile is handed the states' gradients and the sums so far by the first,
/// which has begun long before; blocks wait for blocks with lower numbers only.
struct Handover {
  const BackwardArgs& args;

  __device__ __forceinline__ bool is_used() const { return args.handed_on != nullptr; }
  __device__ __forceinline__ WorkItem item() const {
    if (!is_used()) return work_item(args.params, args.geometry, blockIdx.x);
    const int split = args.split_tiles;
    const int tiles = static_cast<int>(args.geometry.work_items);
    const int index = static_cast<int>(blockIdx.x);
    const int tile = index < tiles ? index : index - tiles;
    WorkItem item = work_item(args.params, args.geometry, tile);
    if (tile < split) {
      const int64_t chunks = (args.params.seqlen + kChunk - 1) / kChunk;
      const int64_t cut = (chunks - chunks * tile / split) * kChunk;
      if (index < tiles) {
        item.begin = cut;
      } else if (cut < item.end) {
        item.end = cut;
      }
    }
    return item;
  }
  __device__ __forceinline__ bool is_second(const WorkItem& item) const {
    return is_used() && item.end < args.params.seqlen;
  }
  __device__ __forceinline__ bool is_first(const WorkItem& item) const {
    return is_used() && item.begin > 0;
  }

  /// Called by all threads of the block: the one before it reads what it is handed, the other after
  /// it has written what it hands on.
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) {
      const int* const flag = args.handed_on + (blockIdx.x - args.geometry.work_items);
      int done;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(flag) : "memory");
      } while (done == 0);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void hand_on() const {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(args.handed_on + blockIdx.x), "r"(1)
                   : "memory");
    }
  }
};

/// A lane's states of its channel from those saved at the end of a chunk, of which `first_channel`
/// are those of the warp's first channel. One by one: a branch for whole vectors would have the
/// compiler wait, where its ways meet, for loads that a chunk's work is to hide.
template <class Shape, class T, int kSize, Method kMethod>
__device__ __forceinline__ Pack<T, Shape::kStates> load_saved_states(
    const LaneWork<Shape, T, kSize, kMethod>& work, const ScanParams& params,
    const char* first_channel) {
  const int dstate = static_cast<int>(params.dstate);
  const int left = work.exists ? dstate - work.first_state : 0;
  const T* const states =
      reinterpret_cast<const T*>(first_channel) + work.channel_in_warp * dstate + work.first_state;
  Pack<T, Shape::kStates> result{};
#pragma unroll
  for (int s = 0; s < Shape::kStates; ++s) {
    if (s < left) result.v[s] = states[s];
  }
  return result;
}

/// Stores what a lane has of its channel's states at the end: the gradient of those before the
/// first step, or what the second part of a tile is handed, and its sums over the steps.
template <class Shape, class T, int kSize, Method kMethod>
__device__ __forceinline__ void store_results(
    const BackwardArgs& args, const Handover& handover,
    const LaneWork<Shape, T, kSize, kMethod>& work,
    const LanePoles<T, Shape::kStates, kSize, kMethod>& poles, const Pack<T, Shape::kStates>& carry,
    const LaneSums<T, Shape::kStates>& lane_sums) {
  constexpr int kStates = Shape::kStates;
  if (!work.exists) return;
  const BackwardParams& params = args.params;
  const WorkItem& item = work.item;
  if (handover.is_first(item)) {
    store_pack(static_cast<T*>(args.workspace.segments.offsets) + work.segment_row, carry);
  } else if (item.begin == 0 && params.dinitial_state.present()) {
    store_channel_states(params.dinitial_state, item, work.channel, work.first_state, params.dstate,
                         carry);
  }
  const bool is_second = handover.is_second(item);
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
    if constexpr (kHasIncrements<Shape, kMethod>) {
      dA.v[s] = dA.v[s] * conj(reciprocal(poles.A[s]));
    }
  }
  store(args.workspace.dA, dA);
  store(args.workspace.dB, lane_sums.dB);
  store(args.workspace.dC, lane_sums.dC);
}

template <class T, int kLaneBits, int kSize, bool kVariable, Method kMethod, LaneMap kMap>
__global__ void __launch_bounds__(kMaxThreads, 1)
    streamed_backward_kernel(const __grid_constant__ BackwardArgs args) {
  using Shape = BackwardShape<T, kLaneBits>;
  constexpr int kStates = Shape::kStates;
  constexpr bool kExact = kSize == 4;
  using States = Pack<T, kStates>;
  using Sums = ChannelSums<Shape, kExact, !kHasIncrements<Shape, kMethod>>;
  const BackwardParams& params = args.params;
  const Handover handover{args};
  const LaneWork<Shape, T, kSize, kMethod> work(args, handover.item());
  const WorkItem& item = work.item;
  if (work.chunks <= 0) return;
  const int warps = blockDim.x / kWarpSize;
  const BackwardLayout layout = BackwardLayout::make<Shape>(warps, kVariable);
  const int own = layout.warps + work.warp * Shape::kWarpBytes;
  const bool has_z = args.row(Row::kZ).present();

  auto ring = work.ring(args, layout, kVariable);
  if constexpr (kVariable) {
    // Of what is read here the kernel in front of this one writes B and C alone; those before it
    // are complete.
    if (!kHasBulkCopy || threadIdx.x == 0) wait_for_primary();
    ring.start();
  }
  constexpr int kStepFloats = Shape::kRow / 4;
  const int64_t target_row =
      ((item.tile * params.batch + item.batch) * params.groups + item.group) * params.seqlen +
      item.begin;
  Sums channel_sums(
      *reinterpret_cast<SumBarriers*>(shared_memory() + sizeof(RingBarriers<kBackwardRingSlots>)),
      layout.sums, work.warp, warps,
      static_cast<float*>(args.workspace.projections) + target_row * kStepFloats, work.steps,
      has_z);
  // Parts of steps behind the last one are added up, if not used, and have to be numbers.
  for (int at = own + Shape::kPlanes + work.lane * 16; at < own + Shape::kChannelValues;
       at += kWarpSize * 16) {
    shared_store(at, Pack<float, 4>{});
  }
  WarpRows<Shape, kSize, kMap> rows(args, own, work.lane, work.channels, item.batch,
                                    work.first_channel, item.begin / kChunk + work.chunks - 1);
  const float D = rows.D(work.channel_in_warp);
  const auto poles = work.load_poles(params);

  States carry{};
  if (args.geometry.segments == 1 && !handover.is_second(item)) {
    carry = load_channel_states<T, kStates>(params.dlast_state, item, work.channel, work.exists,
                                            work.first_state, params.dstate);
  } else {
    if (handover.is_second(item)) handover.wait();
    if (work.exists) {
      carry = load_pack<T, kStates>(static_cast<const T*>(args.workspace.segments.offsets) +
                                    work.segment_row);
    }
  }
  [[maybe_unused]] float least_increment = 0;
  if constexpr (kHasIncrements<Shape, kMethod>) {
    least_increment = work.least_increment(poles, params.dstate);
  }
  LaneSums<T, kStates> lane_sums;
  const GroupPlanes<Shape> planes(own + Shape::kPlanes, work.lane);
  GroupFinish<T, Shape, kMethod> group_finish(own + Shape::kPlanes, work.lane, D, has_z);

  // The state before the chunk that the rows fetch next; the first one starts from the initial
  // state.
  const auto fetch_start = [&](int chunk) {
    if (item.begin > 0 || chunk > 0) return load_saved_states(work, params, rows.saved_states());
    return load_channel_states<T, kStates>(params.initial_state, item, work.channel, work.exists,
                                           work.first_state, params.dstate);
  };

  int steps = work.steps - (work.chunks - 1) * kChunk;
  rows.template fetch<true>(steps);
  States start = fetch_start(work.chunks - 1);
  __syncwarp();
  for (int chunk = work.chunks - 1; chunk >= 0; --chunk) {
    rows.step_back();
    rows.template to_shared<true>(steps);
    __syncwarp();
    if (chunk > 0) rows.prefetch();
    int slot = 0;
    if constexpr (kVariable) slot = static_cast<int>(ring.acquire() - shared_memory());
    const int groups = static_cast<int>((steps + kGroupSteps - 1u) / kGroupSteps);
    const int last_block = groups * kGroupBlocks - 1;
    LaneRows at{own + work.channel_in_warp * kRowStride * 4, slot + work.part * 16,
                own + Shape::kCheckpoints + work.lane * 16};
    const auto scan = [&]<bool kIncrements>(std::bool_constant<kIncrements>) {
      States before = start;
      if constexpr (kIncrements) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) before.v[s] = poles.A[s] * before.v[s];
      }
      sweep_forward<Shape, kMethod, kVariable, kIncrements>(at, last_block, poles, before);

      at.row += last_block * kBlockSteps * 4;
      at.projection += last_block * kBlockSteps * Shape::kRow;
      at.checkpoint += (last_block - 1) * Shape::kCheckpoint;
      BlockInputs<T, kStates> inputs;
      load_block<Shape, kVariable, kIncrements>(at, poles.B, inputs);
      const auto work_on_block = [&]<int kBlock>(int group) {
        typename Sums::Block block_sums;
        const BlockParts parts = sweep_block_backward<Shape, kMethod, kVariable, kIncrements>(
            at.projection, inputs, poles, before, carry, lane_sums, channel_sums, block_sums);
        const int row = at.row;
        at.row -= kBlockSteps * 4;
        at.projection -= kBlockSteps * Shape::kRow;
        if (kBlock > 0 || group > 0) {
          before = shared_load<T, kStates>(at.checkpoint);
          at.checkpoint -= Shape::kCheckpoint;
          load_block<Shape, kVariable, kIncrements>(at, poles.B, inputs);
        }
        planes.template put<kBlock>(parts, has_z);
        if constexpr (kVariable) {
          channel_sums.template put<kBlock>(
              block_sums, chunk * kChunk + group * kGroupSteps + kBlock * kBlockSteps);
        }
        if (kBlock == 0) {
          if (!kVariable) __syncwarp();
          group_finish.template run<kIncrements>(row);
        }
      };
      static_assert(kGroupBlocks == 2);
#pragma unroll 1
      for (int group = groups - 1; group >= 0; --group) {
        work_on_block.template operator()<1>(group);
        work_on_block.template operator()<0>(group);
        __syncwarp();
      }
    };
    if constexpr (kHasIncrements<Shape, kMethod>) {
      if (__all_sync(kFullMask, work.largest_step(at.row) >= least_increment)) {
        scan(std::true_type{});
      } else {
        scan(std::false_type{});
      }
    } else {
      scan(std::false_type{});
    }
    if constexpr (kVariable) ring.release();
    const int stored_steps = steps;
    steps = kChunk;
    if (chunk > 0) {
      rows.template fetch<true>(steps);
      start = fetch_start(chunk - 1);
    }
    rows.store(stored_steps);
    __syncwarp();
  }
  if constexpr (kVariable) channel_sums.finish(0);

  store_results(args, handover, work, poles, carry, lane_sums);
#pragma unroll
  for (int mask = Shape::kChannels; mask < kWarpSize; mask *= 2) {
    group_finish.dD += __shfl_xor_sync(kFullMask, group_finish.dD, mask);
    group_finish.ddelta_bias += __shfl_xor_sync(kFullMask, group_finish.ddelta_bias, mask);
  }
  const bool is_second = handover.is_second(item);
  const auto store_channel = [&](void* array, float value) {
    if (array == nullptr || !work.exists || work.part != 0) return;
    float& target = static_cast<float*>(array)[work.channel_row];
    target = is_second ? target + value : value;
  };
  store_channel(args.workspace.dD, group_finish.dD);
  store_channel(args.workspace.ddelta_bias, group_finish.ddelta_bias);
  if (handover.is_first(item)) handover.hand_on();
}

/// The summary run of a sequence cut into segments: see SegmentStates.
template <class T, int kLaneBits, int kSize, bool kVariable, Method kMethod, LaneMap kMap>
__global__ void __launch_bounds__(kMaxThreads, 2)
    streamed_summary_kernel(const __grid_constant__ BackwardArgs args) {
  using Shape = SummaryShape<T, kLaneBits>;
  constexpr int kStates = Shape::kStates;
  using States = Pack<T, kStates>;
  const LaneWork<Shape, T, kSize, kMethod> work(
      args, work_item(args.params, args.geometry, blockIdx.x), args.geometry.state_warps);
  if (work.item.segment == 0) return;  // nothing comes before it
  const BackwardLayout layout =
      BackwardLayout::make<Shape>(blockDim.x / kWarpSize, kVariable, work.slices);
  const int own = layout.warps + work.warp * Shape::kWarpBytes;
  auto ring = work.ring(args, layout, kVariable);
  if constexpr (kVariable) {
    if (!kHasBulkCopy || threadIdx.x == 0) wait_for_primary();
    ring.start();
  }
  WarpRows<Shape, kSize, kMap> rows(args, own, work.lane, work.channels, work.item.batch,
                                    work.first_channel, work.item.begin / kChunk + work.chunks - 1);
  const auto poles = work.load_poles(args.params);
  States carry{};
  States factor;
#pragma unroll
  for (int s = 0; s < kStates; ++s) factor.v[s] = one<T>();

  int steps = work.steps - (work.chunks - 1) * kChunk;
  rows.template fetch<false>(steps);
  __syncwarp();
  for (int chunk = work.chunks - 1; chunk >= 0; --chunk) {
    rows.step_back();
    rows.template to_shared<false>(steps);
    __syncwarp();
    if (chunk > 0) rows.template fetch<false>(kChunk);
    int slot = 0;
    if constexpr (kVariable) slot = static_cast<int>(ring.acquire() - shared_memory());
    const int blocks = (steps + kBlockSteps - 1) / kBlockSteps;
    LaneRows at{own + (work.channel_in_warp * kRowStride + (blocks - 1) * kBlockSteps) * 4,
                slot + work.slice * Shape::kChunkBytes + work.part * 16 +
                    (blocks - 1) * kBlockSteps * Shape::kRow,
                0};
#pragma unroll 2
    for (int block = blocks - 1; block >= 0; --block) {
      summarize_block<Shape, kMethod, kVariable>(at, poles, carry, factor);
      at.row -= kBlockSteps * 4;
      at.projection -= kBlockSteps * Shape::kRow;
    }
    if constexpr (kVariable) ring.release();
    __syncwarp();
    steps = kChunk;
  }
  if (!work.exists) return;
  const auto store = [&](void* array, const States& states) {
    store_pack(static_cast<T*>(array) + work.segment_row, states);
  };
  store(args.workspace.segments.factors, factor);
  store(args.workspace.segments.offsets, carry);
}

template <class T, int kLaneBits, int kSize, bool kVariable, Method kMethod, LaneMap kMap>
int StreamedBackward<T, kLaneBits, kSize, kVariable, kMethod, kMap>::shared_bytes(
    const Geometry& geometry) {
  return BackwardLayout::make<BackwardShape<T, kLaneBits>>(geometry.warps(), kVariable).bytes;
}

/// The first of the kernels that are launched behind the conversion of B and C is its dependent.
inline cudaError_t launch_backward(void (*kernel)(BackwardArgs), const BackwardArgs& args,
                                   unsigned blocks, int bytes, bool is_first, cudaStream_t stream) {
  const cudaError_t error = allow_shared_bytes(kernel, bytes);
  if (error != cudaSuccess) return error;
  const bool is_dependent = is_first && args.projections != nullptr;
  return launch_kernel(kernel, {blocks, args.geometry.threads(), bytes, is_dependent}, stream,
                       args);
}

template <class T, int kLaneBits, int kSize, bool kVariable, Method kMethod, LaneMap kMap>
cudaError_t StreamedBackward<T, kLaneBits, kSize, kVariable, kMethod, kMap>::summarize(
    const BackwardArgs& args, cudaStream_t stream) {
  return launch_backward(streamed_summary_kernel<T, kLaneBits, kSize, kVariable, kMethod, kMap>,
                         args, grid_blocks(args.geometry.work_items),
                         BackwardLayout::make<SummaryShape<T, kLaneBits>>(
                             args.geometry.warps(), kVariable, args.geometry.state_warps)
                             .bytes,
                         true, stream);
}

template <class T, int kLaneBits, int kSize, bool kVariable, Method kMethod, LaneMap kMap>
cudaError_t StreamedBackward<T, kLaneBits, kSize, kVariable, kMethod, kMap>::run(
    const BackwardArgs& args, cudaStream_t stream) {
  return launch_backward(streamed_backward_kernel<T, kLaneBits, kSize, kVariable, kMethod, kMap>,
                         args, grid_blocks(args.geometry.work_items + args.split_tiles),
                         shared_bytes(args.geometry), args.geometry.segments == 1, stream);
}

}  // namespace selective_scan::cuda::streamed
