// Forward scan for dstate 1.
//
// A warp owns kWindowChannels channels of one group and walks through time in chunks of kChunk
// steps; kChannelLanes lanes share a channel and hold kItems consecutive steps each. A lane
// composes its steps into one map, shuffles carry the state through the channel's lanes, and the
// lane walks its steps. The next chunk is on its way to registers meanwhile. Warps share nothing.
//
// Shared memory of a warp: the chunk of B and C in fp32, and a tile for rows that vectors cannot
// read; then whole rows of u, delta and z, if rows are dense, where out takes the place of u. Bound
// by memory; per (channel, step) about 55 instructions.
#pragma once

#include "scan.cuh"

namespace selective_scan::cuda::dstate1 {

/// The inputs of a chunk on their way.
template <class Storage>
struct ForwardChunk {
  typename RowAccess<Storage>::Raw u, delta, z;
};

template <class Storage>
__device__ __forceinline__ void forward_tile(const ForwardArgs& args, const ChannelTile& tile,
                                             WarpShared& shared, char* rows) {
  using Access = RowAccess<Storage>;
  const ForwardParams& params = args.params;
  const int lane = threadIdx.x % kWarpSize;
  const auto seqlen = static_cast<int>(params.seqlen);
  const bool has_output = params.wanted == ForwardWanted::kOutput;
  const bool has_gate = args.z.present();

  const SequenceStrides& strides = args.strides;
  const DenseWindow dense(strides, seqlen);
  /// Where the first channel's first step of an array of global memory is.
  const auto origin = [&](const Sequence& sequence) {
    return tile.origin(sequence) + tile.first_channel * strides.channel;
  };
  if constexpr (kIsDense<Storage>) {
    dense.fetch(rows, ForwardRows::kU, origin(args.u), lane);
    dense.fetch(rows, ForwardRows::kDelta, origin(args.delta), lane);
    if (has_gate) dense.fetch(rows, ForwardRows::kZ, origin(args.z), lane);
  }

  const bool exists = lane / kChannelLanes < tile.channels;
  const int64_t channel = tile.first_channel + (exists ? lane / kChannelLanes : 0);
  const auto load = [&](const ArrayView& view) {
    return load_component<float>(view, tile.batch * view.batch + channel * view.channel);
  };
  const auto pole = make_pole<DeviceMath>(load(params.A));
  const float D = load(params.D);
  const float delta_bias = load(params.delta_bias);
  float state = load(params.initial_state);
  float* saved = nullptr;
  if (params.states != nullptr) {
    saved = static_cast<float*>(params.states) +
            tile.batch * num_saved_states(seqlen) * params.dim + channel;
  }

  Projection<Storage> B(params.B, tile, lane, kChunk);
  Projection<Storage> C(params.C, tile, lane, kChunk);
  uint32_t next_B = B.fetch(lane < seqlen);
  uint32_t next_C = C.fetch(lane < seqlen);
  const auto lane_row = [&](const Sequence& sequence, ForwardRows::Number number) {
    char* const first = kIsDense<Storage> ? dense.origin(rows, number) : origin(sequence);
    return first + Access::lane_offset(strides, lane);
  };
  const char* u = lane_row(args.u, ForwardRows::kU);
  const char* delta = lane_row(args.delta, ForwardRows::kDelta);
  const char* z = lane_row(args.z, ForwardRows::kZ);
  char* out = lane_row(args.out, ForwardRows::kU);

  const auto fetch = [&](int first_step) {
    ForwardChunk<Storage> chunk{};
    const Window window{tile.channels, seqlen - first_step, lane};
    const int offset = first_step * strides.step;
    chunk.u = Access::fetch(strides, u + offset, window);
    chunk.delta = Access::fetch(strides, delta + offset, window);
    if (has_gate) chunk.z = Access::fetch(strides, z + offset, window);
    return chunk;
  };

  ForwardChunk<Storage> next{};
  if constexpr (kIsDense<Storage>) {
    __pipeline_commit();
    __pipeline_wait_prior(0);
  } else {
    next = fetch(0);
  }
  for (int first_step = 0; first_step < seqlen; first_step += kChunk) {
    const int next_step = first_step + kChunk;
    const Window window{tile.channels, seqlen - first_step, lane};
    __syncwarp();
    B.put(next_B, lane, shared.B);
    C.put(next_C, lane, shared.C);
    next_B = B.fetch(next_step + lane < seqlen);
    next_C = C.fetch(next_step + lane < seqlen);
    __syncwarp();
    const auto chunk = kIsDense<Storage> ? fetch(first_step) : next;
    if constexpr (!kIsDense<Storage>) next = fetch(next_step);

    Items u_items, delta_items;
    Access::convert(strides, chunk.u, window, shared.tile, u_items);
    Access::convert(strides, chunk.delta, window, shared.tile, delta_items);
#pragma unroll
    for (int i = 0; i < kItems; ++i) delta_items[i] += delta_bias;
    make_steps<Access::kSize>(delta_items, params.delta_softplus);
    if (window.steps < kChunk) {
      // A step that does not exist leaves the state as it is.
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (window.first_step() + i >= window.steps) delta_items[i] = 0.0f;
      }
    }

    Items abar, held;
    read_shared(shared.B + window.first_step(), held);
    StepMap map = StepMap::identity();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const auto value = coefficients<kCommonMethod>(delta_items[i], pole);
      abar[i] = value.abar;
      held[i] *= held_input<kCommonMethod>(delta_items[i], u_items[i], value);
      map.offset = abar[i] * map.offset + held[i];
      map.product *= abar[i];
    }
    float h = carry_through_lanes<false>(map, state);
    if (saved != nullptr && next_step < seqlen) {
      if (exists && lane % kChannelLanes == 0) *saved = state;
      saved += params.dim;
    }
    if (!has_output) continue;

    Items C_items;
    read_shared(shared.C + window.first_step(), C_items);
    Items y;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      h = abar[i] * h + held[i];
      y[i] = C_items[i] * h + D * u_items[i];
    }
    if (has_gate) {
      Items z_items;
      Access::convert(strides, chunk.z, window, shared.tile, z_items);
#pragma unroll
      for (int i = 0; i < kItems; ++i) y[i] *= z_items[i] * device_sigmoid(z_items[i]);
    }
    Access::store(strides, out + first_step * strides.step, window, shared.tile, y);
  }
  if constexpr (kIsDense<Storage>) {
    __syncwarp();
    if (has_output) dense.store(rows, ForwardRows::kU, origin(args.out), lane);
  }
  if (exists && lane % kChannelLanes == 0 && params.last_state.present()) {
    store_component(params.last_state,
                    tile.batch * params.last_state.batch + channel * params.last_state.channel,
                    state);
  }
}

template <class Storage>
__global__ void __launch_bounds__(kForwardWarps* kWarpSize, kForwardBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  __shared__ __align__(16) WarpShared shared[kForwardWarps];
  extern __shared__ __align__(16) char memory[];  // dense rows
  const int warp = threadIdx.x / kWarpSize;
  const int index = static_cast<int>(blockIdx.x) * kForwardWarps + warp;
  if (index >= args.work_items) return;
  const ChannelTile tile(args.params, index, args.windows, kWindowChannels);
  const DenseWindow dense(args.strides, static_cast<int>(args.params.seqlen));
  char* const rows = memory + warp * ForwardRows::count(args.z.present()) * dense.bytes();
  forward_tile<Storage>(args, tile, shared[warp], rows);
}

template <class Storage>
cudaError_t Kernels<Storage>::forward(const ForwardArgs& args, const LaunchShape& shape,
                                      cudaStream_t stream) {
  return launch_kernel(forward_kernel<Storage>, shape, stream, args);
}

}  // namespace selective_scan::cuda::dstate1
