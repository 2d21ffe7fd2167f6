// The narrow forward scan: few states, of channels enough.
//
// Mapping. A warp is a block, and owns 32 channels of one group: a lane has one of them, with all
// of its states in registers, and walks through time in chunks of kChunk steps. The rows of the
// next chunk are copied to shared memory meanwhile, and B and C of it to registers.
//
// Shared memory: B and C of a chunk in fp32, which all lanes read at the same time; then two chunks
// of rows of u, delta and z as they lie in memory, of which a lane reads its own channel's. out
// takes the place of u. Rows that are not aligned come all at once.
//
// Bound by memory, with softplus close behind: about 45 instructions for a (channel, step) of one
// state.
#pragma once

#include "rows.cuh"

namespace selective_scan::cuda::narrow {

template <class Element, int kStates, bool kDense>
__global__ void __launch_bounds__(kWarpSize)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(16) char shared[];
  constexpr int kSize = sizeof(Element);
  const ForwardParams& params = args.params;
  const Tile tile(params, args.tiles);
  const auto seqlen = static_cast<int>(params.seqlen);
  const int chunks = ceil_div(seqlen, kChunk);
  const bool has_gate = args.z.present();
  const bool has_output = params.wanted == ForwardWanted::kOutput;
  const RowMover<Element, kDense> mover(args.rows, tile, seqlen);
  ProjectionMover<Element, kStates> projections(params, tile, shared);
  char* const rows = shared + kProjectionBytes<kStates>;
  const int stage_bytes = (has_gate ? 3 : 2) * args.rows.bytes;

  const auto fetch = [&](int chunk) {
    if (chunk < (kDense ? 1 : chunks)) {
      char* const stage = rows + (kDense ? 0 : chunk % 2 * stage_bytes);
      mover.fetch(stage, args.u, chunk);
      mover.fetch(stage + args.rows.bytes, args.delta, chunk);
      if (has_gate) mover.fetch(stage + 2 * args.rows.bytes, args.z, chunk);
    }
    __pipeline_commit();
    projections.fetch(chunk);
  };
  fetch(0);

  float rate[kStates], h[kStates];
  load_states(params.A, tile, params, rate);
  load_states(params.initial_state, tile, params, h);
#pragma unroll
  for (int n = 0; n < kStates; ++n) rate[n] = ScanMath::rate(rate[n]);
  const float D = load_component<float>(params.D, tile.channel() * params.D.channel);
  const float bias =
      load_component<float>(params.delta_bias, tile.channel() * params.delta_bias.channel);
  float* saved = static_cast<float*>(params.states) +
                 (tile.batch * num_saved_states(seqlen) * params.dim + tile.channel()) *
                     params.dstate;

#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncwarp();
    projections.put();
    fetch(chunk + 1);
    __pipeline_wait_prior(1);
    __syncwarp();
    char* const stage = rows + (kDense ? 0 : chunk % 2 * stage_bytes);
    char* const u_row = mover.lane_row(stage, chunk);
    const char* const delta_row = u_row + args.rows.bytes;
    const char* const z_row = delta_row + args.rows.bytes;
    const int steps = min(seqlen - chunk * kChunk, kChunk);
#pragma unroll 1
    for (int t = 0; t < steps; t += kItems) {
      const int left = tile.exists() ? steps - t : 0;
      Values<kItems> u, delta, y;
      read_row<Element, kDense>(u_row + t * kSize, left, u);
      read_row<Element, kDense>(delta_row + t * kSize, left, delta);
#pragma unroll
      for (float& value : delta.v) value += bias;
      make_steps<kSize>(delta, params.delta_softplus);
      if (left < kItems) {  // such a step leaves states as they are
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (i >= left) delta.v[i] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const auto [B, C] = projections[t + i];
        const float input = delta.v[i] * u.v[i];
        y.v[i] = D * u.v[i];
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          h[n] = fmaf(ScanMath::exp_at(delta.v[i], rate[n]), h[n], input * B[n]);
          y.v[i] = fmaf(C[n], h[n], y.v[i]);
        }
      }
      if (!has_output) continue;
      if (has_gate) {
        Values<kItems> z;
        read_row<Element, kDense>(z_row + t * kSize, left, z);
#pragma unroll
        for (int i = 0; i < kItems; ++i) y.v[i] *= z.v[i] * sigmoid_for<kSize>(z.v[i]);
      }
      write_row<Element, kDense>(u_row + t * kSize, left, y);
    }
    if (params.states != nullptr && chunk + 1 < chunks) {
      if (tile.exists()) {
#pragma unroll
        for (int n = 0; n < kStates; ++n) {
          if (n < params.dstate) saved[n] = h[n];
        }
      }
      saved += params.dim * params.dstate;
    }
    if (has_output && (!kDense || chunk + 1 == chunks)) {
      __syncwarp();
      mover.store(stage, args.out, chunk);
    }
  }
  if (tile.exists() && params.last_state.present()) {
    const int64_t at =
        tile.batch * params.last_state.batch + tile.channel() * params.last_state.channel;
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      if (n < params.dstate) store_component(params.last_state, at + n * params.last_state.state, h[n]);
    }
  }
}

template <class Element, int kStates, bool kDense>
cudaError_t Kernels<Element, kStates, kDense>::forward(const ForwardArgs& args,
                                                       const LaunchShape& shape,
                                                       cudaStream_t stream) {
  return launch_kernel(forward_kernel<Element, kStates, kDense>, shape, stream, args);
}

}  // namespace selective_scan::cuda::narrow
