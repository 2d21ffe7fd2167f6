// The narrow backward scan: few states of many channels.
//
// Mapping. As in the forward pass, a block is one warp with a channel per lane or pair of lanes. It
// walks backwards through time in chunks of kChunk steps. From the state saved before a chunk, each
// lane first goes forward, keeping Δ and the state before every block of steps. Then, from the last
// block to the first, it recomputes the block's states in registers and goes back through them. The
// lanes hold their terms of a block's dB and dC in registers and sum them over the channels by
// exchanging halves; each lane stores the sums that it ends up with.
//
// The sums over tiles and batch entries follow in add_gradients(). Every sum has a fixed order.
//
// Shared memory: a chunk's B and C in fp32; Δ, [step][lane]; the states before blocks,
// [block][state][lane]; then two chunks of rows of u, delta, dout and z, of which each lane reads
// its own channel's. du, ddelta and dz overwrite u, delta and z. Rows that are not aligned to 4
// bytes are copied with all their steps at once.
//
// Bound by instructions, about 100 per (channel, step) of one state, and by memory.
#pragma once

#include "../kit/shuffle.cuh"
#include "../kit/update_gradient.cuh"
#include "rows.cuh"

namespace selective_scan::cuda::narrow {

/// Sums kCount values over kLanes lanes. Sum i ends up in lane i·kLanes/kCount and the next
/// kSharing − 1 lanes or, with more values than lanes, in values[i % kHeld] of lane i / kHeld.
template <int kCount, int kLanes>
struct LaneSums {
  static constexpr int kHeld = kCount > kLanes ? kCount / kLanes : 1;
  static constexpr int kSharing = kCount > kLanes ? 1 : kLanes / kCount;

  template <int kLeft = kCount, int kMask = kLanes / 2>
  static __device__ __forceinline__ void add(float (&values)[kCount], int lane) {
    if constexpr (kMask > 0) {
      if constexpr (kMask >= kSharing) {
        add_halves<kLeft / 2>(values, lane, kMask);
        add<kLeft / 2, kMask / 2>(values, lane);
      } else {
        values[0] += __shfl_xor_sync(kFullMask, values[0], kMask);
        add<1, kMask / 2>(values, lane);
      }
    }
  }
};

/// The least number of blocks that a multiprocessor holds.
constexpr int kBackwardBlocks = 12;

template <class Element, int kStates, bool kDense>
__global__ void __launch_bounds__(kWarpSize, kBackwardBlocks)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  extern __shared__ __align__(16) char shared[];
  using Shape = WarpShape<kStates>;
  constexpr int kSize = sizeof(Element);
  constexpr int kOwn = Shape::kOwn;
  constexpr int kCount = Shape::kBackItems;
  using Layout = BackwardLayout<kStates>;
  const BackwardParams& params = args.params;
  const Tile<Shape> tile(params, args.tiles);
  const int lane = tile.lane;
  const auto seqlen = static_cast<int>(params.seqlen);
  const int chunks = ceil_div(seqlen, kChunk);
  const bool has_gate = args.inputs[args.kZ].present();
  const bool has_dout = args.inputs[args.kDout].present();
  const RowMover<Element, Shape, kDense> mover(args.rows, tile, seqlen);
  ProjectionMover<Element, kStates> projections(params, tile, shared);
  float* const kept_steps = reinterpret_cast<float*>(shared + Layout::kSteps) + lane;
  float* const checkpoints = reinterpret_cast<float*>(shared + Layout::kCheckpoints) + lane;
  char* const rows = shared + Layout::kRows;
  const int row_bytes = args.rows.bytes;
  const int stage_bytes = (has_gate ? args.kRows : args.kZ) * row_bytes;
  const bool fetches_ahead = args.rows.stages > 1;
  const auto stage_of = [&](int chunk) {
    return rows + (fetches_ahead ? chunk % 2 * stage_bytes : 0);
  };

  float start[kOwn] = {};
  const float* const saved =
      static_cast<const float*>(params.states) +
      (tile.batch * num_saved_states(seqlen) * params.dim + tile.channel()) * params.dstate +
      tile.part * kOwn;
  const auto fetch = [&](int chunk) {
    if (kDense ? chunk == chunks - 1 : chunk >= 0) {
      mover.fetch(stage_of(chunk), args.inputs, chunk);
    }
    __pipeline_commit();
  };
  const auto fetch_start = [&](int chunk) {
    projections.fetch(chunk);
    if (chunk <= 0) {
      load_states(params.initial_state, tile, params, start);
    } else {
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        if (n < tile.states(params)) {
          start[n] = saved[(chunk - 1) * params.dim * params.dstate + n];
        }
      }
    }
  };
  if (kDense || fetches_ahead) fetch(chunks - 1);
  fetch_start(chunks - 1);

  float A[kOwn], rate[kOwn], carry[kOwn], dA[kOwn] = {};
  load_states(params.A, tile, params, A);
  load_states(params.dlast_state, tile, params, carry);
#pragma unroll
  for (int n = 0; n < kOwn; ++n) rate[n] = ScanMath::rate(A[n]);
  const float D = load_component<float>(params.D, tile.channel() * params.D.channel);
  const float bias =
      load_component<float>(params.delta_bias, tile.channel() * params.delta_bias.channel);
  float dD = 0, ddelta_bias = 0;
  float* const sums = static_cast<float*>(args.workspace.dBC_partials) +
                      ((tile.index * params.batch + tile.batch) * params.groups + tile.group) *
                          params.seqlen * 2 * kStates;

#pragma unroll 1
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    __syncwarp();
    projections.put();
    float h[kOwn];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) h[n] = start[n];
    fetch_start(chunk - 1);
    if constexpr (!kDense) fetch(fetches_ahead ? chunk - 1 : chunk);
    __pipeline_wait_prior(fetches_ahead ? 1 : 0);
    __syncwarp();
    char* const stage = stage_of(chunk);
    char* const u_row = mover.lane_row(stage, chunk);
    char* const delta_row = u_row + args.kDelta * row_bytes;
    const char* const dout_row = u_row + args.kDout * row_bytes;
    char* const z_row = u_row + args.kZ * row_bytes;
    const int steps = min(seqlen - chunk * kChunk, kChunk);
    const int blocks = ceil_div(steps, kCount);

#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const int t = block * kCount;
      const int left = tile.exists() ? steps - t : 0;
      Pack<float, kCount> u, delta;
      read_row<Element, kDense>(u_row + t * kSize, left, u);
      read_row<Element, kDense>(delta_row + t * kSize, left, delta);
#pragma unroll
      for (float& value : delta.v) value += bias;
      make_steps_by_series<kSize>(delta, params.delta_softplus);
#pragma unroll
      for (int n = 0; n < kOwn; ++n) checkpoints[(block * kOwn + n) * kWarpSize] = h[n];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i >= left) delta.v[i] = 0;  // missing steps leave the states unchanged
        kept_steps[(t + i) * kWarpSize] = delta.v[i];
        const auto projected = projections[t + i];
        const float input = delta.v[i] * u.v[i];
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          h[n] = fmaf(ScanMath::exp_at(delta.v[i], rate[n]), h[n], input * projected.B[n]);
        }
      }
    }

#pragma unroll 1
    for (int block = blocks - 1; block >= 0; --block) {
      const int t = block * kCount;
      const int left = tile.exists() ? steps - t : 0;
      Pack<float, kCount> u, slope, dy{};
      read_row<Element, kDense>(u_row + t * kSize, left, u);
      read_row<Element, kDense>(delta_row + t * kSize, left, slope);
      if (has_dout) read_row<Element, kDense>(dout_row + t * kSize, left, dy);
      if (params.delta_softplus) {
#pragma unroll
        for (float& value : slope.v) {
          value += bias;
          value = softplus_slope(value, decay_of<kSize>(value));
        }
      } else {
#pragma unroll
        for (float& value : slope.v) value = 1.0f;
      }
      float delta[kCount];
      float states[kCount + 1][kOwn], abar[kCount][kOwn];
#pragma unroll
      for (int n = 0; n < kOwn; ++n) states[0][n] = checkpoints[(block * kOwn + n) * kWarpSize];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        delta[i] = kept_steps[(t + i) * kWarpSize];
        const auto projected = projections[t + i];
        const float input = delta[i] * u.v[i];
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          abar[i][n] = ScanMath::exp_at(delta[i], rate[n]);
          states[i + 1][n] = fmaf(abar[i][n], states[i][n], input * projected.B[n]);
        }
      }
      if (has_gate) {
        Pack<float, kCount> z;
        read_row<Element, kDense>(z_row + t * kSize, left, z);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const auto projected = projections[t + i];
          float sum = 0;
#pragma unroll
          for (int n = 0; n < kOwn; ++n) sum = fmaf(projected.C[n], states[i + 1][n], sum);
          const float y = fmaf(D, u.v[i], add_parts<Shape>(sum));
          const float s = sigmoid_for<kSize>(z.v[i]);
          const float dout = dy.v[i];
          dy.v[i] = dout * (z.v[i] * s);
          z.v[i] = dout * y * silu_derivative(z.v[i], s);
        }
        write_row<Element, Shape, kDense>(z_row + t * kSize, tile, left, z);
      }

      float terms[kCount * 2 * kOwn];  // [step][dB | dC][state]
#pragma unroll
      for (int i = kCount - 1; i >= 0; --i) {
        const auto [B, C] = projections[t + i];
        const float input = delta[i] * u.v[i];
        float w = 0, x = 0;
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          const float g = fmaf(dy.v[i], C[n], carry[n]);
          terms[i * 2 * kOwn + n] = input * g;
          terms[(i * 2 + 1) * kOwn + n] = dy.v[i] * states[i + 1][n];
          w = fmaf(g, B[n], w);
          carry[n] = g * abar[i][n];
          const float dx = carry[n] * states[i][n];
          dA[n] = fmaf(delta[i], dx, dA[n]);
          x = fmaf(A[n], dx, x);
        }
        w = add_parts<Shape>(w);
        x = add_parts<Shape>(x);
        dD = fmaf(dy.v[i], u.v[i], dD);
        slope.v[i] *= fmaf(u.v[i], w, x);
        u.v[i] = fmaf(delta[i], w, D * dy.v[i]);
      }
      if (left < kCount) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (i >= left) slope.v[i] = 0.0f;
        }
      }
#pragma unroll
      for (int i = kCount - 1; i >= 0; --i) ddelta_bias += slope.v[i];
      write_row<Element, Shape, kDense>(u_row + t * kSize, tile, left, u);
      write_row<Element, Shape, kDense>(delta_row + t * kSize, tile, left, slope);

      using Sums = LaneSums<kCount * 2 * kOwn, Shape::kChannels>;
      Sums::add(terms, lane);
      if (lane % Sums::kSharing == 0) {
        const int first = tile.own / Sums::kSharing * Sums::kHeld;
#pragma unroll
        for (int i = 0; i < Sums::kHeld; ++i) {
          const int row = (first + i) / kOwn;  // row of [step][dB | dC]
          const int at = row * kStates + tile.part * kOwn + (first + i) % kOwn;
          if (row / 2 < steps - t) {
            sums[static_cast<int64_t>(chunk * kChunk + t) * 2 * kStates + at] = terms[i];
          }
        }
      }
    }
    if (!kDense || chunk == 0) {
      __syncwarp();
      mover.store(stage, args.results, chunk);
    }
  }

  store_states(params.dinitial_state, tile, params, carry);
  if (!tile.exists()) return;
  const int64_t row = tile.batch * params.dim + tile.channel();
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    static_cast<float*>(args.workspace.dA)[row * kStates + tile.part * kOwn + n] = dA[n];
  }
  const auto store_channel = [&](void* array, float value) {
    if (array != nullptr && tile.part == 0) static_cast<float*>(array)[row] = value;
  };
  store_channel(args.workspace.dD, dD);
  store_channel(args.workspace.ddelta_bias, ddelta_bias);
}

template <class Element, int kStates, bool kDense>
cudaError_t Kernels<Element, kStates, kDense>::backward(const BackwardArgs& args,
                                                        const LaunchShape& shape,
                                                        cudaStream_t stream) {
  return launch_kernel(backward_kernel<Element, kStates, kDense>, shape, stream, args);
}

}  // namespace selective_scan::cuda::narrow
