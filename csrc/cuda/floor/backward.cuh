// The backward scan.
//
// With dy = dout·silu(z) the gradient g of the state is, backward in time,
//
//   g[t] = conj(abar[t+1])·g[t+1] + conj(C[t])·dy[t]            dC[t] = conj(h[t])·dy[t]
//
// and du, dΔ, dA and dB follow from g, B and h[t-1] (kit/update_gradient.cuh). A block has a tile
// as in the forward scan and takes its chunks from the last to the first. For each chunk, it
//
//   1. brings Δ, u, dy, the slope of the gate, B and C to shared memory;
//   2. goes forward from the state saved before the chunk and keeps every lane's states in a plane
//      [step][thread], from which it sums dC over the channels;
//   3. goes backward, writes the terms of dB in place of the states, and sums them likewise;
//   4. stores the sums over the lanes of each channel: du, ddelta and, times the slope, y.
//
// Bound by: shared memory and its latency.
#pragma once

#include "../kit/launch_tools.h"
#include "../kit/update_gradient.cuh"
#include "block.cuh"

namespace selective_scan::cuda::floor {

/// Sums term(place in the rows, value of the plane) over the tile's channels, for dB or dC. The
/// first of the tiles that share a partial sum writes it, and the others add to it.
template <class T, class Term>
__device__ __forceinline__ void add_over_channels(const Block<T>& block, Kept which,
                                                  const ElementTile& chunk, int slice,
                                                  const T* plane, const Term& term) {
  if (!block.is_variable(which)) return;
  const ScanParams& params = block.params;
  const WorkItem& item = block.item;
  const int padded = block.slices * block.lanes;
  const int64_t sequence =
      (item.sum_index * params.batch + item.batch) * params.groups + item.group;
  T* const target = static_cast<T*>(block.launch.workspace.dBC_partials) +
                    ((sequence * params.seqlen + chunk.first_step) * 2 + (which == kC)) * padded +
                    slice * block.lanes;
  for (int i = threadIdx.x; i < chunk.steps * block.lanes; i += blockDim.x) {
    const int t = i / block.lanes, n = i % block.lanes;
    T& total = target[t * 2 * padded + n];
    T sum = item.tile == item.sum_index ? T{} : total;
#pragma unroll 4
    for (int c = 0; c < item.channels; ++c) {
      sum += term(c * kElementRow + t, plane[t * blockDim.x + c * block.lanes + n]);
    }
    total = sum;
  }
}

/// Takes a lane's state forward through a chunk, from `start` on, and its gradient back. A summary
/// takes only the gradient. With input_delta, kDu gets the value that times input_delta is the
/// gradient of u, and times u that of input_delta.
template <Method kMethod, class T, class R>
__device__ __forceinline__ void scan_back(const Block<T>& block, const ElementTile& chunk,
                                          int slice, T start, bool has_gate, R& ddelta_bias) {
  constexpr R kScale = kOutputScale<T>;
  const bool is_summary = block.launch.is_summary;
  const bool has_input_delta = block.params.input_delta.present();
  const Pole<T> pole = block.pole(slice);
  const Projection<T> B = block.projection(kB, slice), C = block.projection(kC, slice);
  const R* const dy = block.own_row(kDy);
  T* const plane = shared<T>() + block.launch.layout.plane;
  T* const own = plane + block.place;
  T dA{}, dB{}, dC{};
  if (!is_summary) {
    const auto visit = [&](int t, const Pack<T, kBlockSteps>& states, const auto&) {
      Pack<R, kBlockSteps> y;
#pragma unroll
      for (int j = 0; j < kBlockSteps; ++j) {
        own[(t + j) * blockDim.x] = states.v[j];
        dC += (kScale * dy[t + j]) * conj(states.v[j]);
        y.v[j] = kScale * real_of_product(C[t + j], states.v[j]);
      }
      if (has_gate) gather(block, kY, slice, t, y);
    };
    sweep<kMethod>(block, chunk, pole, B, start, visit);
    __syncthreads();
    add_over_channels(block, kC, chunk, slice, plane,
                      [&](int at, T h) { return (kScale * block.rows(kDy)[at]) * conj(h); });
    __syncthreads();
  }
  T carry = block.kept(kState, slice);
  T factor = block.kept(kFactor, slice);
  for (int t = round_up(chunk.steps, kBlockSteps) - kBlockSteps; t >= 0; t -= kBlockSteps) {
    Pack<R, kBlockSteps> du, ddelta;
#pragma unroll
    for (int j = kBlockSteps - 1; j >= 0; --j) {
      const R delta = block.own_row(kDelta)[t + j], u = block.own_row(kU)[t + j];
      const T g = carry + (kScale * dy[t + j]) * conj(C[t + j]);
      const T before = t + j > 0 ? own[(t + j - 1) * blockDim.x] : start;
      UpdateGradient<T> update;
      if (has_input_delta) {
        const R gain = block.own_input_steps()[t + j] * u;
        const Hold<T> hold = hold_of<kMethod>(delta, pole);
        update = backpropagate_hold<kMethod>(delta, gain, pole, hold, B[t + j], before, g);
        factor = factor * conj(hold.a);
      } else {
        const auto value = coefficients<kMethod>(delta, pole);
        update = backpropagate_update<kMethod>(delta, u, pole, value, B[t + j], before, g);
        factor = factor * conj(value.abar);
      }
      carry = update.carry;
      dA += update.dA;
      dB += update.dB;
      du.v[j] = update.du;
      ddelta.v[j] = t + j < chunk.steps ? update.ddelta * block.own_row(kSlope)[t + j] : R(0);
      ddelta_bias += block.has_state(slice) ? ddelta.v[j] : R(0);
      if (!is_summary) own[(t + j) * blockDim.x] = update.dB;
    }
    if (is_summary) continue;
    gather(block, kDu, slice, t, du);
    gather(block, kDdelta, slice, t, ddelta);
  }
  block.kept(kState, slice) = carry;
  block.kept(kFactor, slice) = factor;
  block.kept(kSumA, slice) += dA;
  block.kept(kSumB, slice) += dB;
  block.kept(kSumC, slice) += dC;
  __syncthreads();
  if (is_summary) return;
  add_over_channels(block, kB, chunk, slice, plane, [](int, T term) { return term; });
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kMostWarps* kWarpSize, sizeof(T) == sizeof(float) ? 3 : 2)
    backward_kernel(const __grid_constant__ Args<BackwardParams> args) {
  using R = real_t<T>;
  const BackwardParams& params = args.params;
  const bool has_gate = params.z.present();
  const bool has_input_delta = params.input_delta.present();

  const auto load = [&](const Block<T>& block, const ElementTile& chunk) {
    chunk.load(params.delta, block.rows(kDelta), [&](R delta, int64_t c, int at) {
      delta = block.make_step(delta, c);
      block.rows(kSlope)[at] = params.delta_softplus ? softplus_slope_from(delta) : R(1);
      return delta;
    });
    chunk.load(params.u, block.rows(kU));
    if (has_input_delta) chunk.load(params.input_delta, block.input_steps());
    chunk.load(params.dout, block.rows(kDy));
    if (!has_gate) return;
    __syncthreads();
    chunk.load(params.z, block.rows(kGate), [&](R z, int64_t, int at) {
      if (!params.dout.present()) return R(0);
      R& dy = block.rows(kDy)[at];
      const R dout = dy, s = device_sigmoid(z);
      dy = dout * (z * s);
      return dout * silu_derivative(z, s);
    });
  };
  const auto store = [&](const Block<T>& block, const ElementTile& chunk) {
    chunk.store(params.du, [&](int64_t c, int at) {
      R du = block.rows(kDu)[at];
      if (has_input_delta) du *= block.input_steps()[at];
      return du + block.of_channel(params.D, c) * block.rows(kDy)[at];
    });
    if (has_input_delta) {
      chunk.store(params.dinput_delta,
                  [&](int64_t, int at) { return block.rows(kDu)[at] * block.rows(kU)[at]; });
    }
    chunk.store(params.ddelta, [&](int64_t, int at) { return block.rows(kDdelta)[at]; });
    if (!has_gate) return;
    chunk.store(params.dz,
                [&](int64_t c, int at) { return block.output(c, at) * block.rows(kGate)[at]; });
  };

  const int64_t items = args.geometry.work_items * args.geometry.tiles_per_sum;
  for (int64_t index = blockIdx.x; index < items; index += gridDim.x) {
    const Block<T> block{params, args, index};
    if (block.item.channels <= 0) continue;
    R dD = 0, ddelta_bias = 0;
    for (int slice = 0; slice < block.slices; ++slice) {
      for (const Kept sum : {kSumA, kSumB, kSumC}) block.kept(sum, slice) = T{};
    }
    const ArrayView saved = block.own_array(params.states, params.dstate);
    const int64_t end = block.end_sequence();
    for (int64_t i = block.item.segment; i < end; i += args.geometry.segments) {
      const Steps steps = block.steps_of(i);
      block.enter(params.dlast_state, steps.sequence);
      for (int64_t k = ceil_div(steps.end - steps.first, kChunk) - 1; k >= 0; --k) {
        const ElementTile chunk = block.chunk(steps.first + k * kChunk, steps.end);
        load(block, chunk);
        for (int slice = 0; slice < block.slices; ++slice) {
          block.load_projection(params.B, kB, chunk, slice);
          block.load_projection(params.C, kC, chunk, slice);
          __syncthreads();
          T start{};
          if (chunk.first_step == steps.whole_first) {
            start = block.load_state(params.initial_state, steps.sequence, slice);
          } else if (!args.is_summary) {
            start = block.load_state(saved, steps.saved_before(chunk.first_step), slice);
          }
          visit_kernel_method(params.method, [&]<Method kMethod>() {
            scan_back<kMethod>(block, chunk, slice, start, has_gate, ddelta_bias);
          });
        }
        for (int t = block.lane; t < chunk.steps; t += block.lanes) {
          dD += block.own_row(kDy)[t] * block.own_row(kU)[t];
        }
        if (!args.is_summary) store(block, chunk);
        __syncthreads();  // before the rows of the next chunk are loaded
      }
      block.leave(params.dinitial_state, steps.sequence, steps.first == steps.whole_first);
    }
    if (args.is_summary) continue;
    const auto store_sum = [&](void* array, int slice, Kept what) {
      const ArrayView view = block.own_array(array, block.slices * block.lanes);
      block.store_state(view, block.row, slice, block.kept(what, slice));
    };
    for (int slice = 0; slice < block.slices; ++slice) {
      store_sum(args.workspace.dA, slice, kSumA);
      store_sum(args.workspace.dB, slice, kSumB);
      store_sum(args.workspace.dC, slice, kSumC);
    }
    const int64_t at = (block.row * params.dim + block.channel) * block.lanes + block.lane;
    const auto store_part = [&](void* array, R part) {
      if (array != nullptr && block.exists) static_cast<R*>(array)[at] = part;
    };
    store_part(args.workspace.dD, dD);
    store_part(args.workspace.ddelta_bias, ddelta_bias);
  }
}

template <class T>
cudaError_t Scan<T>::launch(const Args<BackwardParams>& args, const LaunchShape& shape,
                            cudaStream_t stream) {
  return launch_kernel(backward_kernel<T>, shape, stream, args);
}

}  // namespace selective_scan::cuda::floor
