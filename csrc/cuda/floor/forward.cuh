// The forward scan.
//
//   h[t] = abar(Δ[t], A)·h[t-1] + bbar(Δ[t], A)·B[t]·u[t]        y[t] = Σ C[t]·h[t]
//   out = (y + D·u)·silu(z)
//
// A block owns a tile of channels of one group and walks through time in chunks of kChunk steps:
//
//   1. all threads bring the chunk's Δ, u, gate, B and C to shared memory;
//   2. each lane takes its state through the steps, and the lanes of a channel add up y;
//   3. all threads store out.
//
// Bound by: latency. No loads are in flight while a chunk is scanned; other blocks fill the gap.
#pragma once

#include "../kit/launch_tools.h"
#include "block.cuh"

namespace selective_scan::cuda::floor {

template <class T>
__global__ void __launch_bounds__(kMostWarps* kWarpSize, sizeof(T) == sizeof(float) ? 3 : 2)
    forward_kernel(const __grid_constant__ Args<ForwardParams> args) {
  using R = real_t<T>;
  const ForwardParams& params = args.params;
  const bool has_output = params.wanted == ForwardWanted::kOutput && !args.is_summary;
  const bool has_gate = has_output && params.z.present();
  const bool has_input_delta = params.input_delta.present();
  const auto gate = [](R z, int64_t, int) { return z * device_sigmoid(z); };

  for (int64_t index = blockIdx.x; index < args.geometry.work_items; index += gridDim.x) {
    const Block<T> block{params, args, index};
    const ArrayView saved = block.own_array(params.states, params.dstate);
    const int64_t end = block.end_sequence();
    for (int64_t i = block.item.segment; i < end; i += args.geometry.segments) {
      const Steps steps = block.steps_of(i);
      block.enter(params.initial_state, steps.sequence);
      for (int64_t first = steps.first; first < steps.end; first += kChunk) {
        const ElementTile chunk = block.chunk(first, steps.end);
        chunk.load(params.delta, block.rows(kDelta),
                   [&](R delta, int64_t c, int) { return block.make_step(delta, c); });
        chunk.load(params.u, block.rows(kU));
        if (has_input_delta) chunk.load(params.input_delta, block.input_steps());
        if (has_gate) chunk.load(params.z, block.rows(kGate), gate);
        for (int slice = 0; slice < block.slices; ++slice) {
          block.load_projection(params.B, kB, chunk, slice);
          block.load_projection(params.C, kC, chunk, slice);
          __syncthreads();
          const Projection<T> B = block.projection(kB, slice), C = block.projection(kC, slice);
          T factor = block.kept(kFactor, slice);
          const auto visit = [&](int t, const Pack<T, kBlockSteps>& states,
                                 const Pack<T, kBlockSteps>& abar) {
            constexpr R kScale = kOutputScale<T>;
            Pack<R, kBlockSteps> y;
#pragma unroll
            for (int j = 0; j < kBlockSteps; ++j) {
              if (args.is_summary) factor = abar.v[j] * factor;
              y.v[j] = kScale * real_of_product(C[t + j], states.v[j]);
            }
            if (has_output) gather(block, kY, slice, t, y);
          };
          T& h = block.kept(kState, slice);
          visit_kernel_method(params.method, [&]<Method kMethod>() {
            h = sweep<kMethod>(block, chunk, block.pole(slice), B, h, visit);
          });
          block.kept(kFactor, slice) = factor;
          if (first + kChunk < steps.whole_end && !args.is_summary) {
            block.store_state(saved, steps.saved_before(first + kChunk), slice, h);
          }
          __syncthreads();  // before B and C of the next slice are loaded
        }
        if (!has_output) continue;
        chunk.store(params.out, [&](int64_t c, int at) {
          return block.output(c, at) * (has_gate ? block.rows(kGate)[at] : R(1));
        });
        __syncthreads();  // before the rows of the next chunk are loaded
      }
      block.leave(params.last_state, steps.sequence, steps.end == steps.whole_end);
    }
  }
}

template <class T>
cudaError_t Scan<T>::launch(const Args<ForwardParams>& args, const LaunchShape& shape,
                            cudaStream_t stream) {
  return launch_kernel(forward_kernel<T>, shape, stream, args);
}

}  // namespace selective_scan::cuda::floor
