// The narrow forward scan: few states of many channels.
//
// Mapping. A block is one warp. It owns 32 channels of one group, or 16 if there are more than two
// states: a lane keeps one channel's states, or half of them, in registers and walks through time
// in chunks of kChunk steps. Meanwhile the next chunk's rows are copied to shared memory, and its B
// and C to registers.
//
// Shared memory: a chunk's B and C in fp32, which all lanes read at the same time; then two chunks
// of rows of u, delta and z as they lie in memory, of which each lane reads its own channel's. out
// overwrites u. Rows that are not aligned to 4 bytes are copied with all their steps at once.
//
// Bound by memory, with softplus close behind: one state takes about 45 instructions per (channel,
// step).
#pragma once

#include "rows.cuh"

namespace selective_scan::cuda::narrow {

template <class Element, int kStates, bool kDense>
__global__ void __launch_bounds__(kWarpSize)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  extern __shared__ __align__(16) char shared[];
  using Shape = WarpShape<kStates>;
  constexpr int kSize = sizeof(Element);
  constexpr int kOwn = Shape::kOwn;
  const ForwardParams& params = args.params;
  const Tile<Shape> tile(params, args.tiles);
  const auto seqlen = static_cast<int>(params.seqlen);
  const int chunks = ceil_div(seqlen, kChunk);
  const bool has_gate = args.inputs[args.kZ].present();
  const bool has_output = params.wanted == ForwardWanted::kOutput;
  const RowMover<Element, Shape, kDense> mover(args.rows, tile, seqlen);
  ProjectionMover<Element, kStates> projections(params, tile, shared);
  char* const rows = shared + kProjectionBytes<kStates>;
  const int stage_bytes = (has_gate ? args.kRows : args.kZ) * args.rows.bytes;
  const bool fetches_ahead = args.rows.stages > 1;
  const auto stage_of = [&](int chunk) {
    return rows + (fetches_ahead ? chunk % 2 * stage_bytes : 0);
  };

  const auto fetch = [&](int chunk) {
    if (chunk < (kDense ? 1 : chunks)) mover.fetch(stage_of(chunk), args.inputs, chunk);
    __pipeline_commit();
  };
  if (kDense || fetches_ahead) fetch(0);
  projections.fetch(0);

  float rate[kOwn], h[kOwn];
  load_states(params.A, tile, params, rate);
  load_states(params.initial_state, tile, params, h);
#pragma unroll
  for (float& value : rate) value = ScanMath::rate(value);
  const float D = load_component<float>(params.D, tile.channel() * params.D.channel);
  const float bias =
      load_component<float>(params.delta_bias, tile.channel() * params.delta_bias.channel);
  float* saved =
      static_cast<float*>(params.states) +
      (tile.batch * num_saved_states(seqlen) * params.dim + tile.channel()) * params.dstate +
      tile.part * kOwn;

#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncwarp();
    projections.put();
    projections.fetch(chunk + 1);
    if constexpr (!kDense) fetch(fetches_ahead ? chunk + 1 : chunk);
    __pipeline_wait_prior(fetches_ahead ? 1 : 0);
    __syncwarp();
    char* const stage = stage_of(chunk);
    char* const u_row = mover.lane_row(stage, chunk);
    const char* const delta_row = u_row + args.rows.bytes;
    const char* const z_row = delta_row + args.rows.bytes;
    const int steps = min(seqlen - chunk * kChunk, kChunk);
#pragma unroll 1
    for (int t = 0; t < steps; t += kItems) {
      const int left = tile.exists() ? steps - t : 0;
      Pack<float, kItems> u, delta, y;
      read_row<Element, kDense>(u_row + t * kSize, left, u);
      read_row<Element, kDense>(delta_row + t * kSize, left, delta);
#pragma unroll
      for (float& value : delta.v) value += bias;
      make_steps_by_series<kSize>(delta, params.delta_softplus);
      if (left < kItems) {  // missing steps leave the states unchanged
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (i >= left) delta.v[i] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const auto [B, C] = projections[t + i];
        const float input = delta.v[i] * u.v[i];
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          h[n] = fmaf(ScanMath::exp_at(delta.v[i], rate[n]), h[n], input * B[n]);
          sum = fmaf(C[n], h[n], sum);
        }
        y.v[i] = fmaf(D, u.v[i], add_parts<Shape>(sum));
      }
      if (!has_output) continue;
      if (has_gate) {
        Pack<float, kItems> z;
        read_row<Element, kDense>(z_row + t * kSize, left, z);
#pragma unroll
        for (int i = 0; i < kItems; ++i) y.v[i] *= z.v[i] * sigmoid_for<kSize>(z.v[i]);
      }
      write_row<Element, Shape, kDense>(u_row + t * kSize, tile, left, y);
    }
    if (params.states != nullptr && chunk + 1 < chunks) {
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        if (n < tile.states(params)) saved[n] = h[n];
      }
      saved += params.dim * params.dstate;
    }
    if (has_output && (!kDense || chunk + 1 == chunks)) {
      __syncwarp();
      mover.store(stage, args.results, chunk);
    }
  }
  store_states(params.last_state, tile, params, h);
}

template <class Element, int kStates, bool kDense>
cudaError_t Kernels<Element, kStates, kDense>::forward(const ForwardArgs& args,
                                                       const LaunchShape& shape,
                                                       cudaStream_t stream) {
  return launch_kernel(forward_kernel<Element, kStates, kDense>, shape, stream, args);
}

}  // namespace selective_scan::cuda::narrow
