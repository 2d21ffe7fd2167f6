// The forward scan of few sequences (prompts), in one launch without segments.
//
// Mapping. The first warps of a block scan: each has kChannels channels of one group, and a lane
// holds kStates states of one of these channels and walks through all of time. With one state per
// lane there are four times as many warps as in the streamed kernels, so that few channels fill the
// device. The other warps, the makers, prepare the scan's input one chunk ahead: Δ and Δ·u, once
// per (channel, step), and B and C in fp32. A maker waits most of the time, so there are as many
// makers as scanning warps if a block has room.
//
// Makers and scanners wait for each other at the barriers of each buffer. Makers receive arrays by
// asynchronous copies, as they lie in memory; each thread converts what it has copied itself, then
// copies the next chunk. Scanning lanes write their parts of y to planes. When these parts are
// summed, gated and stored, lanes lie along steps. Arrays are dense along steps or along channels,
// B and C along steps or states. See pieces.cuh for what a lane moves in either case, and maker.cuh
// and scanner.cuh for the two kinds of warps.
//
// Shared memory: raw B and C; two chunks of B and C in fp32; for each scanning warp its planes, two
// chunks of rows, its channels' delta_bias and D and, if rows lie along channels, its y; then raw u
// and delta; and, if rows lie along channels, a barrier of the scanning warps. See Shape.
//
// Bound by latency for short sequences; otherwise by shared memory accesses, half of which are for
// the parts of y, and with more channels by issue slots.
#pragma once

#include "../kit/launch_tools.h"
#include "maker.cuh"
#include "scanner.cuh"

namespace selective_scan::cuda::prompt {

template <class Element, int kStates, Along kAlong>
__global__ void __launch_bounds__(Shape<kStates>::kMostWarps* kWarpSize, 1)
    forward_kernel(const __grid_constant__ PromptArgs args) {
  if constexpr (!kHasAsyncCopies) return;
  using S = Shape<kStates>;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = uniform(threadIdx.x / kWarpSize);
  const int warps = blockDim.x / kWarpSize;
  const int group = blockIdx.y;
  const int offset = blockIdx.x * args.scanners * S::kChannels;
  const Tile tile{blockIdx.z, group, group * args.group_channels + offset,
                  args.group_channels - offset};
  const Shared<S, Element, kAlong> shared(args.scanners);
  const Maker<S, Element, kAlong> maker(args, tile, shared);
  maker.start(0, warp, warps);

  // --- inputs that are read once ---

  const bool is_scanner = warp < args.scanners;
  const LaneRole role = lane_role(lane, S::kLaneBits);
  const int warp_channels = is_scanner ? tile.channels - warp * S::kChannels : 0;
  const int64_t first_channel = tile.first_channel + warp * S::kChannels;
  const int64_t channel = first_channel + role.channel;
  const bool has_channel = lane < S::kChannels && lane < warp_channels;
  const RawElement raw_D(args.D, (first_channel + lane) * args.D.channel, has_channel);
  const RawElement raw_bias(args.delta_bias, (first_channel + lane) * args.delta_bias.channel,
                            has_channel);
  const auto state_at = [&](const ArrayView& view, int s) {
    return tile.batch * view.batch + channel * view.channel +
           (s * S::kLanes + role.part) * view.state;
  };
  LaneStates<kStates> states{};
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    states.exist[s] = role.channel < warp_channels && s * S::kLanes + role.part < args.dstate;
    if (!states.exist[s]) continue;
    states.rate[s] = static_cast<const float*>(args.A.data)[state_at(args.A, s)];
    if (args.initial_state.present()) {
      states.h[s] =
          static_cast<const float*>(args.initial_state.data)[state_at(args.initial_state, s)];
    }
  }
  if (!is_along_steps(kAlong) && threadIdx.x == 0) {
    SharedBarrier(shared.summed()).initialize(args.scanners * kWarpSize);
  }
  if (is_scanner && lane < S::kChannels) {
    shared.biases(warp)[lane] = raw_bias.value(args.delta_bias.dtype);
    shared.skips(warp)[lane] = raw_D.value(args.D.dtype);
  }
#pragma unroll
  for (float& value : states.rate) value = ScanMath::rate(value);
  __syncthreads();
  maker.finish(0, 0, warp, warps);
  __syncthreads();

  // --- making warps ---

  if (!is_scanner) {
    const int worker = warp - args.scanners;
    const int workers = warps - args.scanners;
    int buffer = 0;
#pragma unroll 1
    for (int next = S::kSteps; next < args.seqlen; next += S::kSteps) {
      maker.start(next, worker, workers);
      buffer ^= 1;
      if (next > S::kSteps) meet(kFree + buffer, warps);
      maker.finish(next, buffer, worker, workers);
      arrive(kFull + buffer, warps);
    }
    return;
  }

  // --- scanning warps ---

  Scanner<S, Element, kAlong>(args, tile, shared, warp, states).run(warps);
  if (!args.last_state.present()) return;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if (!states.exist[s]) continue;
    store_element(args.last_state.data, args.last_state.dtype, state_at(args.last_state, s),
                  states.h[s]);
  }
}

template <class Element, int kStates, Along kAlong>
cudaError_t PromptForward<Element, kStates, kAlong>::launch(const PromptArgs& args,
                                                            const LaunchShape& shape,
                                                            cudaStream_t stream) {
  return launch_kernel(forward_kernel<Element, kStates, kAlong>, shape, stream, args);
}

}  // namespace selective_scan::cuda::prompt
