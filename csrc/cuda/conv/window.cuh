// What both layouts' kernels share: one step of the convolution and of its gradient, and states.
#pragma once

#include "../../core/conv_runs.h"
#include "../../core/element.h"
#include "../kit/elements.cuh"
#include "../kit/math.cuh"

namespace selective_scan::cuda::conv {

/// Kernels are compiled for so many taps: those of the common widths for as many as they have,
/// those of the largest for any width, whose taps are the last ones.
template <int kTaps>
__device__ __forceinline__ int first_tap(const ConvParams& params) {
  return kTaps < kMaxConvWidth ? 0 : static_cast<int>(kMaxConvWidth - params.width);
}

/// sum + Σ_k weight(k)·value(k), in the same order in every kernel: a step's result has the same
/// bits wherever it is computed.
template <int kTaps, class R, class Weight, class Value>
__device__ __forceinline__ R add_products(R sum, int first, const Weight& weight,
                                          const Value& value) {
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    if (kTaps < kMaxConvWidth || k >= first) sum = fma(weight(k), value(k), sum);
  }
  return sum;
}

template <class R>
__device__ __forceinline__ R activated(R sum, bool silu) {
  return silu ? sum * device_sigmoid(sum) : sum;
}

/// The gradient of the sum before the activation.
template <class R>
__device__ __forceinline__ R gradient_of_sum(R dout, R sum, bool silu) {
  return silu ? dout * silu_derivative(sum, device_sigmoid(sum)) : dout;
}

/// Element `position` of a sequence's states, 0 where there is none. Rarely needed, so it is kept
/// out of line.
template <class R>
__device__ __noinline__ R load_state(const ArrayView& states, int64_t sequence, int64_t channel,
                                     int64_t position) {
  if (!states.present() || sequence == Run::kNone || position < 0) return R(0);
  return load_element<R>(
      states.data, states.dtype,
      sequence * states.batch + channel * states.channel + position * states.step);
}

/// x at a step, continued backwards beyond the run's first by its states.
template <class R>
__device__ R continued_x(const ConvParams& params, const Run& run, int64_t batch, int64_t channel,
                         int64_t step) {
  if (step < run.begin) {
    return load_state<R>(params.initial_states, run.states, channel,
                         step - run.begin + params.width - 1);
  }
  return load_element<R>(
      params.x.data, params.x.dtype,
      batch * params.x.batch + channel * params.x.channel + step * params.x.step);
}

template <class R>
__device__ R load_tap(const ConvParams& params, int64_t channel, int64_t tap) {
  return load_element<R>(params.weight.data, params.weight.dtype,
                         channel * params.weight.channel + tap * params.weight.step);
}
template <class R>
__device__ R load_bias(const ConvParams& params, int64_t channel) {
  if (!params.bias.present()) return R(0);
  return load_element<R>(params.bias.data, params.bias.dtype, channel * params.bias.channel);
}

/// The run of a step of a batch entry that may hold several; see run_at(). Dense calls do without,
/// so it is kept out of line.
static __device__ __noinline__ Run find_run(const ConvParams& params, int64_t batch, int64_t step,
                                            int64_t limit) {
  return run_at(params, batch, step, limit);
}

/// Calls visit(run, from, to) for every run with steps in [first, stop), and those it has there. Of
/// a run's end it is known up to `limit` whether it is the end.
template <class Visit>
__device__ __forceinline__ void for_each_run(const ConvParams& params, int64_t batch, int64_t first,
                                             int64_t stop, int64_t limit, const Visit& visit) {
  const bool is_divided = params.seq_idx.present() || params.cu_seqlens.present();
  while (first < stop) {
    Run run{0, params.seqlen, batch, false};
    if (is_divided) run = find_run(params, batch, first, limit);
    const int64_t to = run.end < stop ? run.end : stop;
    visit(run, first, to);
    first = to;
  }
}

/// The gradient of the sum at a step, all of it from memory: for the few steps that no kernel has
/// at hand.
template <class R>
__device__ __noinline__ R gradient_at(const ConvBackwardParams& params, int64_t batch,
                                      int64_t channel, int64_t step) {
  R gradient = 0;
  if (!params.dout.present()) return gradient;
  for_each_run(params, batch, step, step + 1, step + 1, [&](const Run& run, int64_t, int64_t) {
    if (run.is_padding) return;
    R sum = load_bias<R>(params, channel);
#pragma unroll 1
    for (int64_t k = 0; k < params.width; ++k) {
      const R x = continued_x<R>(params, run, batch, channel, step - (params.width - 1) + k);
      sum = fma(load_tap<R>(params, channel, k), x, sum);
    }
    const R dout = load_element<R>(
        params.dout.data, params.dout.dtype,
        batch * params.dout.batch + channel * params.dout.channel + step * params.dout.step);
    gradient = gradient_of_sum(dout, sum, params.silu);
  });
  return gradient;
}

}  // namespace selective_scan::cuda::conv
