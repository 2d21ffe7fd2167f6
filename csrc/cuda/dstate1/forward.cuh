// Forward scan for dstate 1.
//
// A warp owns the channels of a window, eight or one of a group, and walks through time in windows
// of 32 or 256 steps; each of a channel's lanes holds kItems consecutive steps. A lane composes its
// steps into one map, shuffles carry the state through the channel's lanes, and the lane walks its
// steps. Either warps share nothing, or four of them share a channel and take its windows in turns:
// then shared memory carries the state through one window of each, with a single barrier.
//
// Shared memory of a warp: B and C in fp32 of a window of several channels, two maps of windows if
// these are shared, and a tile for rows that vectors cannot read; then u, delta and z, with out in
// place of u. If rows are dense, these are whole rows; if they are vectors, two windows, one of
// which is being copied. Bound by memory, with about 55 instructions per (channel, step), or by
// latency if windows have one channel.
#pragma once

#include "scan.cuh"

namespace selective_scan::cuda::dstate1 {

template <class Storage, class Shape>
__device__ __forceinline__ void forward_tile(const ForwardArgs& args, const ChannelTile& tile,
                                             WarpShared<Shape>& shared, StepMap* maps, char* rows) {
  using Access = RowAccess<Storage, Shape>;
  using Staged = StagedWindow<Storage, Shape>;
  using Row = ForwardRows::Number;
  constexpr bool kHasStages = kIsStaged<Storage>;
  const ForwardParams& params = args.params;
  const int rank = round_rank<Shape>();
  const int own_step = rank * Shape::kSteps;
  const int lane = threadIdx.x % kWarpSize;
  const auto seqlen = static_cast<int>(params.seqlen);
  const bool has_output = params.wanted == ForwardWanted::kOutput;
  const bool has_gate = args.inputs[Row::kZ].present();

  const SequenceStrides& strides = args.strides;
  const DenseWindow dense(strides, seqlen);
  const Staged staged(strides);
  /// Returns the address of the first channel's first step of an array in global memory.
  const auto origin = [&](const Sequence& sequence) {
    return tile.origin(sequence) + tile.first_channel * strides.channel;
  };
  const auto for_inputs = [&](const auto& move) {
    move(Row::kU);
    move(Row::kDelta);
    if (has_gate) move(Row::kZ);
  };
  const auto window_at = [&](int first_step) {
    return Window<Shape>{tile.channels, seqlen - first_step, lane};
  };
  int staged_at = 0;  // where the scanned window begins in the rows
  const auto other_stage = [&] {
    return ForwardRows::count(has_gate) * Staged::kBytes - staged_at;
  };
  /// Starts to copy a window.
  const auto stage = [&](int first_step, int stage_at) {
    const auto pieces = staged.pieces(window_at(first_step));
    for_inputs([&](Row row) {
      Staged::fetch(pieces, rows + (stage_at + row * Staged::kBytes),
                    origin(args.inputs[row]) + first_step * strides.step);
    });
    __pipeline_commit();
  };

  // The slowest loads are started first.
  if constexpr (kIsDense<Storage>) {
    for_inputs([&](Row row) { dense.fetch(rows, row, origin(args.inputs[row]), lane); });
    __pipeline_commit();
  } else if constexpr (kHasStages) {
    stage(own_step, staged_at);
  }
  Projection<Storage, Shape> B(params.B, tile, own_step, Shape::kRoundSteps);
  Projection<Storage, Shape> C(params.C, tile, own_step, Shape::kRoundSteps);
  auto next_B = B.fetch(seqlen - own_step);
  auto next_C = C.fetch(seqlen - own_step);
  const int lane_offset = Access::lane_offset(staged.lane_strides(), lane);

  constexpr int kChannelLanes = Shape::kChannelLanes;
  const bool exists = lane / kChannelLanes < tile.channels;
  const int64_t channel = tile.first_channel + lane / kChannelLanes;
  const auto ask_for = [&](const ArrayView& view) {
    return RawElement(view, tile.batch * view.batch + channel * view.channel, exists);
  };
  const RawElement raw_A = ask_for(params.A), raw_D = ask_for(params.D);
  const RawElement raw_bias = ask_for(params.delta_bias);
  const RawElement raw_state = ask_for(params.initial_state);
  const auto pole = make_pole<DeviceMath>(raw_A.value(params.A.dtype));
  const float D = raw_D.value(params.D.dtype);
  const float delta_bias = raw_bias.value(params.delta_bias.dtype);
  float state = raw_state.value(params.initial_state.dtype);
  float* saved = nullptr;
  if (params.states != nullptr) {
    const int chunk = lane % kChannelLanes / kChunkLanes;  // of the lane's window
    saved = static_cast<float*>(params.states) +
            (tile.batch * num_saved_states(seqlen) + rank * Shape::kChunks + chunk) * params.dim +
            channel;
  }

  if constexpr (kIsDense<Storage>) __pipeline_wait_prior(0);
  for (int round = 0; round * Shape::kRoundSteps < seqlen; ++round) {
    const int first_step = round * Shape::kRoundSteps + own_step;
    const int next_step = first_step + Shape::kRoundSteps;
    const auto window = window_at(first_step);
    __syncwarp();
    if constexpr (kHasStages) stage(next_step, other_stage());
    const auto own_B = next_B, own_C = next_C;
    B.put(own_B, shared.B);
    C.put(own_C, shared.C);
    next_B = B.fetch(seqlen - next_step);
    next_C = C.fetch(seqlen - next_step);
    if constexpr (kHasStages) __pipeline_wait_prior(1);
    __syncwarp();
    const int scanned_at = staged_at;
    staged_at = other_stage();
    /// Returns the address of the lane's part of a row of the window.
    const auto address = [&](const Sequence& sequence, Row row) {
      if constexpr (kHasStages) {
        return rows + (scanned_at + row * Staged::kBytes + staged.origin() + lane_offset);
      } else {
        char* const first = kIsDense<Storage> ? dense.origin(rows, row) : origin(sequence);
        return first + (lane_offset + first_step * strides.step);
      }
    };
    const auto fetch = [&](Row row) {
      return Access::fetch(staged.lane_strides(), address(args.inputs[row], row), window);
    };
    const auto convert = [&](const typename Access::Raw& raw, Items& items) {
      Access::convert(staged.lane_strides(), raw, window, shared.tile, items);
    };

    Items u_items, delta_items;
    const auto raw_u = fetch(Row::kU), raw_delta = fetch(Row::kDelta);
    convert(raw_u, u_items);
    convert(raw_delta, delta_items);
#pragma unroll
    for (int i = 0; i < kItems; ++i) delta_items[i] += delta_bias;
    make_steps<Access::kSize>(delta_items, params.delta_softplus);
    if (window.steps < Shape::kSteps) {
      // A missing step leaves the state unchanged.
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (window.first_step() + i >= window.steps) delta_items[i] = 0.0f;
      }
    }

    Items abar, held;
    B.read(own_B, shared.B, window.first_step(), held);
    StepMap map = StepMap::identity();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const auto value = coefficients<kCommonMethod>(delta_items[i], pole);
      abar[i] = value.abar;
      held[i] *= held_input<kCommonMethod>(delta_items[i], u_items[i], value);
      map.offset = abar[i] * map.offset + held[i];
      map.product *= abar[i];
    }
    const LaneStates carried =
        carry_through_lanes<Shape, false>(map, state, maps + round % 2 * kForwardWarps);
    if constexpr (Shape::kChunks == 1) {
      // The last lane's state is at hand here; keeping each lane's own would take registers and
      // time.
      if (saved != nullptr && next_step < seqlen) {
        if (exists && lane % kChannelLanes == 0) *saved = state;
        saved += params.dim;
      }
    } else if (saved != nullptr) {
      const bool ends_chunk = lane % kChunkLanes == kChunkLanes - 1;
      if (ends_chunk && window.items() > kItems) *saved = carried.left;
      saved += Shape::kWarps * Shape::kChunks * params.dim;
    }
    if (!has_output) continue;
    float h = carried.entered;

    Items C_items;
    C.read(own_C, shared.C, window.first_step(), C_items);
    Items y;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      h = abar[i] * h + held[i];
      y[i] = C_items[i] * h + D * u_items[i];
    }
    if (has_gate) {
      Items z_items;
      convert(fetch(Row::kZ), z_items);
#pragma unroll
      for (int i = 0; i < kItems; ++i) y[i] *= z_items[i] * device_sigmoid(z_items[i]);
    }
    Access::store(staged.lane_strides(), address(args.out, Row::kU), window, shared.tile, y);
    if constexpr (kHasStages) {
      __syncwarp();
      Staged::store(staged.pieces(window), rows + (scanned_at + Row::kU * Staged::kBytes),
                    origin(args.out) + first_step * strides.step);
    }
  }
  if constexpr (kIsDense<Storage>) {
    __syncwarp();
    if (has_output) dense.store(rows, Row::kU, origin(args.out), lane);
  }
  const bool writes = exists && lane % kChannelLanes == 0 && rank == 0;
  if (writes && params.last_state.present()) {
    store_component(params.last_state,
                    tile.batch * params.last_state.batch + channel * params.last_state.channel,
                    state);
  }
}

template <class Storage, class Shape>
__global__ void __launch_bounds__(kForwardWarps* kWarpSize,
                                  forward_blocks<Shape>(RowAccess<Storage, Shape>::kSize))
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  __shared__ __align__(16) WarpShared<Shape> shared[kForwardWarps];
  extern __shared__ __align__(16) char memory[];  // rows
  __shared__ StepMap maps[2 * kForwardWarps];
  const int warp = threadIdx.x / kWarpSize;
  const int index = static_cast<int>(blockIdx.x * kForwardWarps + warp) / Shape::kWarps;
  if (index >= args.work_items) return;
  const ChannelTile tile(args.params, index, args.windows, Shape::kChannels);
  const DenseWindow dense(args.strides, static_cast<int>(args.params.seqlen));
  constexpr int kSize = RowAccess<Storage, Shape>::kSize;
  const int row_bytes = kIsStaged<Storage> ? kStages * staged_bytes<Shape>(kSize) : dense.bytes();
  char* const rows =
      memory + warp * ForwardRows::count(args.inputs[ForwardRows::kZ].present()) * row_bytes;
  forward_tile<Storage, Shape>(args, tile, shared[warp], maps, rows);
}

template <class Storage, class Shape>
cudaError_t Kernels<Storage, Shape>::forward(const ForwardArgs& args, const LaunchShape& shape,
                                             cudaStream_t stream) {
  return launch_kernel(forward_kernel<Storage, Shape>, shape, stream, args);
}

}  // namespace selective_scan::cuda::dstate1
