// The streamed backward scan of more than 16 real states per channel, by teams of warps.
//
// Mapping. A warp holds 16 states of 8 channels, as in backward.cuh, so that tensor cores sum dB
// and dC over 8 channels. A team consists of as many warps as it takes to hold all states of its
// channels, and a block of as many teams as fit into kMaxWarps warps. The warps of different teams
// that hold the same slice of the states add up their sums of dB and dC.
//
// For each chunk, the warps of a team share the work of filling its rows, two channels at a time,
// and wait for each other. Then each warp sweeps its states as in backward.cuh, and stores the sums
// over its lanes of the parts of du, ddelta and y. When all warps have done so, the warp that has
// filled a row adds these sums over the warps, fills the row again, and stores the gradients.
//
// Shared memory: backward_shape.h. Bound by: issue slots and, nearly as much, the data path of
// shared memory.
#pragma once

#include "backward.cuh"
#include "team_rows.cuh"

namespace selective_scan::cuda::streamed {

template <int kWarps, int kSize, Method kMethod, LaneMap kMap>
__global__ void __launch_bounds__(kMaxThreads, 1)
    team_backward_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using Shape = TeamShape<kWarps>;
  constexpr int kStates = Shape::kStates;
  using States = Pack<float, kStates>;
  using Sums = ChannelSums<Shape, kSize == 4, !kGoesByIncrements<kMethod>>;
  const BackwardParams& params = args.params;
  const BlockOrder order(args);
  const LaneWork<Shape, float, kSize, kMethod> work(args, order.item(), kWarps);
  const WorkItem& item = work.item;
  if (work.chunks <= 0) return;  // the tile's other part has them all, or there is no tile
  const int first_added = order.wait(item);
  const int teams = args.geometry.channel_warps;
  const auto layout = TeamLayout<Shape>::make(teams);
  const int own = layout.warp(work.team, work.slice);
  const bool has_z = args.row(Row::kZ).present();

  const auto* const team_barriers = reinterpret_cast<const TeamBarriers*>(
      shared_memory() + layout.team_barriers + work.team * static_cast<int>(sizeof(TeamBarriers)));
  const SharedBarrier filled(team_barriers->filled);
  const SharedBarrier swept(team_barriers->swept);
  if (work.slice == 0 && work.lane == 0) {
    filled.initialize(kWarps * kWarpSize);
    swept.initialize(kWarps * kWarpSize);
  }
  auto ring = work.ring(args, layout.ring, true);
  // Of the data that this kernel reads, the previous kernel writes only B and C; earlier kernels
  // are complete.
  if (!kHasBulkCopy || threadIdx.x == 0) wait_for_primary();
  ring.start();
  const int64_t target_row =
      (((work.slice * args.geometry.sums_per_group + item.sum_index) * params.batch + item.batch) *
           params.groups +
       item.group) *
          params.seqlen +
      item.begin;
  Sums channel_sums(
      *reinterpret_cast<SumBarriers*>(shared_memory() + layout.sum_barriers +
                                      work.slice * static_cast<int>(sizeof(SumBarriers))),
      layout.sums + work.slice * Shape::kSumSlots * teams * Shape::kSumBytes, work.team, teams,
      static_cast<float*>(args.workspace.dBC_partials) + target_row * Shape::kRow / 4, work.steps,
      first_added, has_z);
  // Parts of steps past the last one enter sums that are never used, and must be finite.
  for (int at = own + Shape::kCheckpoints + work.lane * 16; at < own + Shape::kKept;
       at += kWarpSize * 16) {
    shared_store(at, Pack<float, 4>{});
  }
  TeamRows<Shape, kSize, kMethod, kMap> rows(args, layout, work.team, work.slice, work.lane,
                                             work.channels, item.batch, work.first_channel,
                                             item.begin / kChunk + work.chunks - 1);
  const auto poles = work.load_poles(params);

  States carry{};
  if (args.geometry.segments == 1 && !order.is_second(item)) {
    carry = load_channel_states<float, kStates>(params.dlast_state, item, work.channel, work.exists,
                                                work.first_state, params.dstate);
  } else if (work.exists) {
    carry = load_pack<float, kStates>(static_cast<const float*>(args.workspace.segments.offsets) +
                                      work.segment_row);
  }
  LaneSums<float, kStates> lane_sums;
  const GroupPlanes<Shape> planes(own + Shape::kPlanes, work.lane);
  const GroupSums<Shape> group_sums(own, work.lane, has_z);
  const auto fetch_start = [&](int chunk) {
    if (item.begin > 0 || chunk > 0) {
      return load_saved_states(work, params, rows.saved_states(), true);
    }
    return load_channel_states<float, kStates>(params.initial_state, item, work.channel,
                                               work.exists, work.first_state, params.dstate);
  };

  int steps = work.steps - (work.chunks - 1) * kChunk;
  rows.fetch(steps);
  States start = fetch_start(work.chunks - 1);
  rows.convert(steps);
  rows.put();
  filled.signal();
  __syncwarp();
  rows.step_back();
  __syncwarp();
  int parity = 0;
#pragma unroll 1
  for (int chunk = work.chunks - 1; chunk >= 0; --chunk) {
    const bool is_last = chunk == 0;
    if (!is_last) rows.prefetch();
    const int slot = static_cast<int>(ring.acquire() - shared_memory());
    filled.wait(parity);
    const int groups = ceil_div(steps, kSweepSteps);
    const int last_block = groups * kSweepBlocks - 1;
    const int first_row = layout.team(work.team) + work.channel_in_warp * kRowStride * 4;
    LaneRows at{first_row, slot + work.slice * Shape::kChunkBytes + work.part * 16,
                own + Shape::kCheckpoints + work.lane * 16};
    States before = start;
    if constexpr (kGoesByIncrements<kMethod>) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) before.v[s] *= poles.A[s];
    }
    sweep_forward<Shape, kMethod>(at, last_block, poles, before);

    at.row += last_block * kBlockSteps * 4;
    at.projection += last_block * kBlockSteps * Shape::kRow;
    at.checkpoint += (last_block - 1) * Shape::kCheckpoint;
    BlockInputs<float, kStates> inputs;
    load_block<Shape, kMethod, true>(at, inputs);
    const auto work_on_block = [&]<int kBlock>(int group) {
      typename Sums::Block block_sums;
      const BlockParts parts = sweep_block_backward<Shape, kMethod>(
          at.projection, inputs, poles, before, carry, lane_sums, channel_sums, block_sums);
      at.row -= kBlockSteps * 4;
      at.projection -= kBlockSteps * Shape::kRow;
      if (kBlock > 0 || group > 0) {
        before = shared_load<float, kStates>(at.checkpoint);
        at.checkpoint -= Shape::kCheckpoint;
        load_block<Shape, kMethod, true>(at, inputs);
      }
      planes.template put<kBlock>(parts, has_z);
      channel_sums.template put<kBlock>(
          block_sums, chunk * kChunk + group * kSweepSteps + kBlock * kBlockSteps);
    };
    static_assert(kSweepBlocks == 2);
#pragma unroll 1
    for (int group = groups - 1; group >= 0; --group) {
      work_on_block.template operator()<1>(group);
      work_on_block.template operator()<0>(group);
      group_sums.run(group);
    }
    ring.release();
    if (!is_last) {
      rows.fetch(kChunk);
      start = fetch_start(chunk - 1);
    }
    swept.signal();
    if (!is_last) rows.convert(kChunk);
    swept.wait(parity);
    rows.finish();
    if (!is_last) {
      rows.put();
      filled.signal();
    }
    rows.store(steps);
    __syncwarp();
    rows.step_back();
    __syncwarp();
    steps = kChunk;
    parity ^= 1;
  }
  channel_sums.finish(0);

  store_results<false>(args, order, work, poles, carry, lane_sums);
  const bool is_second = order.is_second(item);
  rows.each_channel([&](int channel, float dD, float ddelta_bias) {
    const auto store = [&](void* array, float value) {
      if (array == nullptr) return;
      float& target = static_cast<float*>(array)[work.channel_row - work.channel_in_warp + channel];
      target = is_second ? target + value : value;
    };
    store(args.workspace.dD, dD);
    store(args.workspace.ddelta_bias, ddelta_bias);
  });
  order.signal(item);
}

template <int kWarps, int kSize, Method kMethod, LaneMap kMap>
cudaError_t TeamBackward<kWarps, kSize, kMethod, kMap>::run(const BackwardArgs& args,
                                                            const LaunchShape& shape,
                                                            cudaStream_t stream) {
  return launch_kernel(team_backward_kernel<kWarps, kSize, kMethod, kMap>, shape, stream, args);
}

}  // namespace selective_scan::cuda::streamed
