// The streamed backward scan.
//
// Mapping. A warp owns kWarpSize / lanes channels of one group and walks backward through time, in
// chunks of kChunk steps. A lane holds 16 bytes of states of one of these channels. A block
// consists of up to kMaxWarps such warps. They share B and C, which come in fp32 from packed_bc.cu
// through a ring of chunks (bulk_copy.cuh), and the sums of dB and dC (channel_sums.cuh). Apart
// from these two, warps run independently.
//
// For each chunk, a warp turns u, delta, z and dout into rows of Δ, Δ·u, dy, ... in shared memory,
// computed once per (channel, step). From the state saved before the chunk, every lane sweeps
// forward, keeping the state before each block of kBlockSteps steps. Then, last block first, it
// computes the block's states again in registers and sweeps backward through them
// (backward_sweeps.cuh). A lane's parts of du, ddelta and y go to planes in shared memory and are
// added over the channel's lanes every kSweepSteps steps. The gradients replace rows that are no
// longer needed and are stored at the end of the chunk. Meanwhile, the next chunk's rows are copied
// to shared memory, in place of states that are no longer needed (row_copies.cuh).
//
// Constant B and C have separate sweeps (constant_sweeps.cuh).
//
// add_gradients() then sums over tiles, batch entries and segments of time. Every sum has a fixed
// order.
//
// Shared memory: backward_shape.h. Bound by: issue slots and, nearly as much, the data path of
// shared memory.
#pragma once

#include "../kit/launch_tools.h"
#include "backward_work.cuh"

namespace selective_scan::cuda::streamed {

/// kPacked: the chunks are those of packed sequences, so states and gradients are replaced at the
/// chunks that begin or end a sequence. kOwnInputSteps: the input has a separate step size
/// (input_delta).
template <class T, int kLaneBits, Elements kElements, bool kVariable, Method kMethod, LaneMap kMap,
          bool kPacked, bool kOwnInputSteps>
__global__ void __launch_bounds__(kMaxThreads, 1)
    streamed_backward_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using Shape = StreamedShape<T, kLaneBits, kVariable, kOwnInputSteps>;
  constexpr int kSize = size_of(kElements);
  constexpr int kStates = Shape::kStates;
  using States = Pack<T, kStates>;
  using Sums = ChannelSums<Shape, needs_all_digits(kElements), !kGoesByIncrements<kMethod>>;
  const BackwardParams& params = args.params;
  const BlockOrder order(args);
  [[maybe_unused]] const PackedChunks packed_chunks = args.packed_chunks();
  LaneWork<Shape, T, kSize, kMethod> own_work(
      args, kPacked && args.geometry.segments > 1
                ? in_segment(order.item(),
                             packed_chunks.segment(order.item().segment, params.seqlen / kChunk))
                : order.item());
  if constexpr (kPacked) own_work.trim(packed_chunks.count());
  const LaneWork<Shape, T, kSize, kMethod>& work = own_work;
  const WorkItem& item = work.item;
  if (work.chunks <= 0) {  // the tile's other part has them all, or there is no tile
    if constexpr (kPacked) store_no_sums(args, work);
    return;
  }
  const int first_added = order.wait(item);
  const int warps = blockDim.x / kWarpSize;
  const BackwardLayout layout = BackwardLayout::make<Shape>(warps, kVariable);
  const int own = layout.warps + work.warp * Shape::kWarpBytes;
  const bool has_z = args.row(Row::kZ).present();

  // Parts of steps past the last one enter sums that are never used, and must be finite.
  for (int at = own + Shape::kPlanes + work.lane * 16; at < own + Shape::kChannelValues;
       at += kWarpSize * 16) {
    shared_store(at, Pack<float, 4>{});
  }
  __syncwarp();
  // Rows take long to arrive. Meanwhile, barriers are set up, at a hundred cycles each.
  int steps = work.steps - (work.chunks - 1) * kChunk;
  // Loaded anew whenever it is needed, since the sweeps need the registers.
  [[maybe_unused]] const auto packed_chunk = [&](int chunk) {
    return packed_chunks[item.begin / kChunk + opaque(chunk)];
  };
  const auto last_chunk = [&] {
    if constexpr (kPacked) {
      return packed_chunk(work.chunks - 1);
    } else {
      return item.begin / kChunk + work.chunks - 1;
    }
  }();
  if constexpr (kPacked) steps = last_chunk.steps;
  WarpRows<Shape, kElements, kMap, true, kPacked> rows(
      args, own, work.lane, work.channels, item.batch, work.first_channel, last_chunk, steps);
  // Loads the state before the chunk that the rows fetch next, if there is one. The first chunk
  // starts from the initial state.
  const auto fetch_start = [&](int chunk) {
    if constexpr (kPacked) {
      const PackedChunk wanted = chunk < 0 ? PackedChunk{} : packed_chunk(chunk);
      return load_packed_states(work, params, wanted, rows.saved_states());
    }
    if (item.begin > 0 || chunk != 0) {
      return load_saved_states(work, params, rows.saved_states(), chunk >= 0);
    }
    return load_channel_states<T, kStates>(params.initial_state, item, work.channel, work.exists,
                                           work.first_state, params.dstate);
  };

  auto ring = work.ring(args, layout.ring, kVariable);
  if constexpr (kVariable) {
    // Of the data that this kernel reads, the previous kernel writes only B and C; earlier kernels
    // are complete.
    if (!kHasBulkCopy || threadIdx.x == 0) wait_for_primary();
    ring.start();
  }
  constexpr int kStepFloats = Shape::kRow / 4;
  const int64_t target_row =
      ((item.sum_index * params.batch + item.batch) * params.groups + item.group) * params.seqlen +
      item.begin;
  Sums channel_sums(
      *reinterpret_cast<SumBarriers*>(shared_memory() + sizeof(RingBarriers<kBackwardRingSlots>)),
      layout.sums, work.warp, warps,
      static_cast<float*>(args.workspace.dBC_partials) + target_row * kStepFloats, work.steps,
      first_added, has_z);
  rows.keep_channel_values();
  States start = fetch_start(work.chunks - 1);
  const float D = rows.D(work.channel_in_warp);
  const auto poles = work.load_poles(params);

  States carry{};
  if (!kPacked && args.geometry.segments == 1 && !order.is_second(item)) {
    carry = load_channel_states<T, kStates>(params.dlast_state, item, work.channel, work.exists,
                                            work.first_state, params.dstate);
  } else if (work.exists && (!kPacked || args.geometry.segments > 1 || order.is_second(item))) {
    carry = load_pack<T, kStates>(static_cast<const T*>(args.workspace.segments.offsets) +
                                  work.segment_row);
  }
  [[maybe_unused]] const auto weights = [&] {
    if constexpr (kVariable) {
      return 0;
    } else {
      const auto projections = work.load_projections(params);
      if (params.dlast_state.present() && !order.is_second(item)) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) carry.v[s] *= reciprocal(projections.C.v[s]);
        if (work.exists) {
          store_pack(static_cast<T*>(args.workspace.dC) + work.segment_row, States{});
        }
      }
      return ConstantWeights<kStates>(projections, poles);
    }
  }();
  LaneSums<T, kStates> lane_sums;
  const GroupPlanes<Shape> planes(own + Shape::kPlanes, work.lane);
  GroupFinish<T, Shape, kMethod> group_finish(own + Shape::kPlanes, work.lane, D, has_z);

  __syncwarp();
  for (int chunk = work.chunks - 1; chunk >= 0; --chunk) {
    if constexpr (kPacked) {
      const PackedChunk now = packed_chunk(chunk);
      const PackedChunk before = chunk > 0 ? packed_chunk(chunk - 1) : now;
      const int behind =
          chunk + 1 < work.chunks ? packed_chunk(chunk + 1).first_step : now.first_step + kChunk;
      rows.step_back(now.first_step - before.first_step, behind - now.first_step,
                     now.saved - before.saved);
      if (now.is_last) {
        carry = load_channel_states<T, kStates>(params.dlast_state, work.item_of(now.sequence),
                                                work.channel, work.exists, work.first_state,
                                                params.dstate);
      }
    } else {
      rows.step_back();
    }
    rows.to_shared(steps);
    __syncwarp();
    int slot = 0;
    if constexpr (kVariable) slot = static_cast<int>(ring.acquire() - shared_memory());
    // Sums over channels rely on consecutive step groups: only the last chunk may have fewer.
    const int groups = kPacked
                           ? kChunk / kSweepSteps
                           : static_cast<int>(ceil_div(static_cast<unsigned>(steps), kSweepSteps));
    const int last_block = groups * kSweepBlocks - 1;
    // The step group after which the next chunk is fetched; -1 if there is no next chunk.
    const int fetch_behind = chunk == 0 ? -1 : groups > Shape::kStageGroup ? Shape::kStageGroup : 0;
    const int first_row = own + work.channel_in_warp * kRowStride * 4;
    if constexpr (kVariable) {
      LaneRows at{first_row, slot + work.part * 16, own + Shape::kCheckpoints + work.lane * 16};
      States before = start;
      if constexpr (kGoesByIncrements<kMethod>) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) before.v[s] = poles.A[s] * before.v[s];
      }
      sweep_forward<Shape, kMethod>(at, last_block, poles, before);

      at.row += last_block * kBlockSteps * 4;
      at.projection += last_block * kBlockSteps * Shape::kRow;
      at.checkpoint += (last_block - 1) * Shape::kCheckpoint;
      BlockInputs<T, kStates> inputs;
      load_block<Shape, kMethod, true>(at, inputs);
      const auto work_on_block = [&]<int kBlock>(int group) {
        typename Sums::Block block_sums;
        const BlockParts parts = sweep_block_backward<Shape, kMethod>(
            at.projection, inputs, poles, before, carry, lane_sums, channel_sums, block_sums);
        const int row = at.row;
        at.row -= kBlockSteps * 4;
        at.projection -= kBlockSteps * Shape::kRow;
        if (kBlock > 0 || group > 0) {
          before = shared_load<T, kStates>(at.checkpoint);
          at.checkpoint -= Shape::kCheckpoint;
          load_block<Shape, kMethod, true>(at, inputs);
        }
        planes.template put<kBlock>(parts, has_z);
        channel_sums.template put<kBlock>(
            block_sums, chunk * kChunk + group * kSweepSteps + kBlock * kBlockSteps);
        if (kBlock == 0) group_finish.run(row);
      };
      static_assert(kSweepBlocks == 2);
#pragma unroll 1
      for (int group = groups - 1; group >= 0; --group) {
        work_on_block.template operator()<1>(group);
        work_on_block.template operator()<0>(group);
        __syncwarp();
        if (group == fetch_behind) rows.fetch(kPacked ? packed_chunk(chunk - 1).steps : kChunk);
      }
    } else {
      int row = first_row;
      int record = own + Shape::kRecords + work.lane * 16;
      ConstantInputs<kStates> inputs;
      States& before = inputs.before;
#pragma unroll
      for (int s = 0; s < kStates; ++s) before.v[s] = weights.inverse_B.v[s] * start.v[s];
      if constexpr (kGoesByIncrements<kMethod>) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) before.v[s] *= poles.A[s];
      }
      States sums{};
      if (params.dlast_state.present()) {
        // Loaded before the sweep, which hides the latency; nothing after it would.
        float* const target = static_cast<float*>(args.workspace.dC) + work.segment_row;
        auto dC = work.exists ? load_pack<float, kStates>(target) : States{};
        sweep_constant_forward<Shape, kMethod, true>(row, record, groups, poles, before, sums);
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          dC.v[s] += reciprocal(weights.inverse_B.v[s]) * sums.v[s];
        }
        if (work.exists) store_pack(target, dC);
      } else {
        sweep_constant_forward<Shape, kMethod, false>(row, record, groups, poles, before, sums);
      }

      row += last_block * kBlockSteps * 4;
      record += (groups - 1) * Shape::kRecord;
      load_constant_rows<Shape, kMethod>(row, inputs);
      const auto sweep_back = [&]<int kBlock>() {
        return sweep_constant_backward<Shape, kMethod, kBlock>(inputs, poles, weights, carry,
                                                               lane_sums);
      };
      const auto load_first = [&] {
        row -= kBlockSteps * 4;
        load_constant_rows<Shape, kMethod>(row, inputs);
        load_record<Shape, kMethod, 0>(record, inputs);
        record -= Shape::kRecord;
      };
      const auto load_last = [&] {
        row -= kBlockSteps * 4;
        load_constant_rows<Shape, kMethod>(row, inputs);
        load_record<Shape, kMethod, 1>(record, inputs);
      };
      // A step group is finished during the next one's first sweep, so that neither has to wait for
      // the other. Lanes along channels have no registers left for that.
      constexpr bool kOverlaps = kMap == LaneMap::kSteps;
      BlockParts last;
      if constexpr (kOverlaps) {
        last = sweep_back.template operator()<1>();
        load_first();
      }
      int group = groups - 1;
#pragma unroll 1
      while (true) {
        if constexpr (!kOverlaps) {
          last = sweep_back.template operator()<1>();
          load_first();
        }
        __syncwarp();
        planes.template put<1>(last, has_z);
        const BlockParts first = sweep_back.template operator()<0>();
        const int group_row = row;
        if (group > 0) load_last();
        planes.template put<0>(first, has_z);
        __syncwarp();
        if constexpr (!kOverlaps) {
          group_finish.run(group_row);
          __syncwarp();
        }
        if (group == fetch_behind) rows.fetch(kChunk);
        if (group == 0) break;
        if constexpr (kOverlaps) {
          last = sweep_back.template operator()<1>();
          load_first();
          group_finish.run(group_row);
        }
        --group;
      }
      if constexpr (kOverlaps) {
        group_finish.run(first_row);
        __syncwarp();
      }
    }
    if constexpr (kVariable) ring.release();
    const int stored_steps = steps;
    steps = kChunk;
    if constexpr (kPacked) {
      const PackedChunk now = packed_chunk(chunk);
      if (now.is_first && work.exists && params.dinitial_state.present()) {
        store_channel_states(params.dinitial_state, work.item_of(now.sequence), work.channel,
                             work.first_state, params.dstate, carry);
      }
      if (chunk > 0) steps = packed_chunk(chunk - 1).steps;
    }
    // With variable B and C there is no branch: where its paths join, the compiler would wait for
    // the loads. With registers to spare it does not wait, and the branch is better.
    if (kVariable || chunk > 0) {
      rows.fetch_late(chunk > 0 ? steps : 0);
      start = fetch_start(chunk - 1);
    }
    rows.store(stored_steps);
    __syncwarp();
  }
  if constexpr (kVariable) {
    channel_sums.finish(0);
  } else {
    finish_constant_sums(args, work, order.is_second(item), carry, lane_sums);
  }

  store_results<kPacked>(args, order, work, poles, carry, lane_sums);
#pragma unroll
  for (int mask = Shape::kChannels; mask < kWarpSize; mask *= 2) {
    group_finish.dD += __shfl_xor_sync(kFullMask, group_finish.dD, mask);
    group_finish.ddelta_bias += __shfl_xor_sync(kFullMask, group_finish.ddelta_bias, mask);
  }
  const bool is_second = order.is_second(item);
  const auto store_channel = [&](void* array, float value) {
    if (array == nullptr || !work.exists || work.part != 0) return;
    float& target = static_cast<float*>(array)[work.channel_row];
    target = is_second ? target + value : value;
  };
  store_channel(args.workspace.dD, group_finish.dD);
  store_channel(args.workspace.ddelta_bias, group_finish.ddelta_bias);
  order.signal(item);
}

/// Returns the first chunk in [begin, end) that is the last one of a packed sequence, or -1. To be
/// called by all lanes of a warp together.
__device__ __forceinline__ int64_t first_end(const PackedChunks& chunks, int64_t begin,
                                             int64_t end) {
  for (int64_t first = begin; first < end; first += kWarpSize) {
    const int64_t own = first + threadIdx.x % kWarpSize;
    const unsigned ends = __ballot_sync(kFullMask, own < end && chunks[own].is_last);
    if (ends != 0) return first + __ffs(static_cast<int>(ends)) - 1;
  }
  return -1;
}

/// The summary run of a sequence cut into segments: see SegmentStates. Gradients of steps after the
/// end of a packed sequence do not enter that sequence, so a walk begins at the first end of a
/// sequence in the segment. If a sequence begins with the segment, no gradient leaves the segment.
template <class T, int kLaneBits, int kSize, Method kMethod, LaneMap kMap, bool kPacked>
__global__ void __launch_bounds__(kMaxThreads, 2)
    streamed_summary_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using Shape = SummaryShape<T, kLaneBits>;
  constexpr int kStates = Shape::kStates;
  using States = Pack<T, kStates>;
  WorkItem item = work_item(args.params, args.geometry, blockIdx.x);
  [[maybe_unused]] const PackedChunks packed_chunks = args.packed_chunks();
  if constexpr (kPacked) {
    item = in_segment(item,
                      packed_chunks.summarized_segment(item.segment, args.params.seqlen / kChunk));
    const bool is_empty = item.begin == item.end;
    if (is_empty || packed_chunks[item.begin / kChunk].is_first) {
      const LaneWork<Shape, T, kSize, kMethod> work(args, item, args.geometry.state_warps);
      // A sequence may continue before an empty segment, which passes on what enters it.
      const auto factor = is_empty ? ones<T, kStates>() : no_factor<T, kStates>();
      if (work.exists) store_summary(args, work, factor, States{});
      // Even if all blocks end here, the next kernel must not start before B and C are written.
      wait_for_primary();
      return;
    }
    const int64_t found = first_end(packed_chunks, item.begin / kChunk, item.end / kChunk);
    if (found >= 0) item.end = (found + 1) * kChunk;
  }
  const LaneWork<Shape, T, kSize, kMethod> work(args, item, args.geometry.state_warps);
  if (work.item.segment == 0 && !args.summarizes_all) return;  // no segment before it
  const BackwardLayout layout =
      BackwardLayout::make<Shape>(blockDim.x / kWarpSize, true, work.slices);
  const int own = layout.warps + work.warp * Shape::kWarpBytes;
  auto ring = work.ring(args, layout.ring, true);
  if (!kHasBulkCopy || threadIdx.x == 0) wait_for_primary();
  ring.start();
  int steps = work.steps - (work.chunks - 1) * kChunk;
  const int64_t first_chunk = work.item.begin / kChunk;
  const auto last_chunk = [&] {
    if constexpr (kPacked) {
      return packed_chunks[first_chunk + work.chunks - 1];
    } else {
      return first_chunk + work.chunks - 1;
    }
  }();
  if constexpr (kPacked) steps = last_chunk.steps;
  constexpr Elements kElements = kSize == 2 ? Elements::kTwoBytes : Elements::kFloat32;
  WarpRows<Shape, kElements, kMap, false, kPacked> rows(
      args, own, work.lane, work.channels, work.item.batch, work.first_channel, last_chunk, steps);
  rows.keep_channel_values();
  const auto poles = work.load_poles(args.params);
  States carry{};
  States factor = ones<T, kStates>();
  if constexpr (kPacked) {
    if (last_chunk.is_last) {
      factor = no_factor<T, kStates>();
      carry = load_channel_states<T, kStates>(args.params.dlast_state,
                                              work.item_of(last_chunk.sequence), work.channel,
                                              work.exists, work.first_state, args.params.dstate);
    }
  }

  __syncwarp();
  for (int chunk = work.chunks - 1; chunk >= 0; --chunk) {
    int steps_before = kChunk;
    if constexpr (kPacked) {
      const PackedChunk now = packed_chunks[first_chunk + chunk];
      const PackedChunk before = chunk > 0 ? packed_chunks[first_chunk + chunk - 1] : now;
      rows.step_back(now.first_step - before.first_step, 0, 0);
      steps_before = before.steps;
    } else {
      rows.step_back();
    }
    rows.to_shared(steps);
    __syncwarp();
    if (chunk > 0) {
      rows.fetch(steps_before);
      rows.fetch_late(steps_before);
    }
    const int slot = static_cast<int>(ring.acquire() - shared_memory());
    const int blocks = ceil_div(steps, kBlockSteps);
    LaneRows at{own + (work.channel_in_warp * kRowStride + (blocks - 1) * kBlockSteps) * 4,
                slot + work.slice * Shape::kChunkBytes + work.part * 16 +
                    (blocks - 1) * kBlockSteps * Shape::kRow,
                0};
    float span = 0;
#pragma unroll 2
    for (int block = blocks - 1; block >= 0; --block) {
      summarize_block<Shape, kMethod>(at, poles, carry, factor, span);
      at.row -= kBlockSteps * 4;
      at.projection -= kBlockSteps * Shape::kRow;
    }
    take_span<kMethod>(poles, span, factor);
    ring.release();
    __syncwarp();
    steps = steps_before;
  }
  if (work.exists) store_summary(args, work, factor, carry);
}

template <class T, int kLaneBits, int kSize, Method kMethod, LaneMap kMap>
cudaError_t StreamedSummary<T, kLaneBits, kSize, kMethod, kMap>::run(const BackwardArgs& args,
                                                                     const LaunchShape& shape,
                                                                     cudaStream_t stream) {
  const auto launch = [&]<bool kPacked>() {
    return launch_kernel(streamed_summary_kernel<T, kLaneBits, kSize, kMethod, kMap, kPacked>,
                         shape, stream, args);
  };
  if constexpr (kIsCommonBackward<T, true> && kMap == LaneMap::kChannels) {
    if (args.params.packed.present()) return launch.template operator()<true>();
  }
  return launch.template operator()<false>();
}

template <class T, int kLaneBits, Elements kElements, bool kVariable, Method kMethod, LaneMap kMap>
cudaError_t StreamedBackward<T, kLaneBits, kElements, kVariable, kMethod, kMap>::run(
    const BackwardArgs& args, const LaunchShape& shape, cudaStream_t stream) {
  const auto launch = [&]<bool kPacked, bool kOwnInputSteps>() {
    return launch_kernel(streamed_backward_kernel<T, kLaneBits, kElements, kVariable, kMethod, kMap,
                                                  kPacked, kOwnInputSteps>,
                         shape, stream, args);
  };
  if constexpr (kIsCommonBackward<T, kVariable> && kMap == LaneMap::kChannels) {
    if (args.params.packed.present()) return launch.template operator()<true, false>();
  }
  if constexpr (kIsCommonBackward<T, kVariable> && has_all_kernels(kMethod)) {
    if (args.row(Row::kInputDelta).present()) return launch.template operator()<false, true>();
  }
  return launch.template operator()<false, false>();
}

}  // namespace selective_scan::cuda::streamed
