// Code that the kernels of both layouts share: a step of the convolution, its gradient, and states.
#pragma once

#include "../../core/conv_runs.h"
#include "../../core/element.h"
#include "../kit/elements.cuh"
#include "../kit/math.cuh"

namespace selective_scan::cuda::conv {

/// Elements that were loaded together and are still packed: unpacked they would take twice the
/// registers while they wait.
template <class Element, int kCount>
struct Packed {
  using Word = Vector<sizeof(Pack<Element, kCount>)>;
  Word words[sizeof(Pack<Element, kCount>) / sizeof(Word)];

  static __device__ Packed load(const Element* address) {
    return bit_cast<Packed>(load_pack<Element, kCount>(address));
  }
  __device__ void unpack(float (&values)[kCount]) const { to_reals<Element>(*this, values); }
};

/// Returns the first tap of a kernel that the call has. Kernels for the common width have exactly
/// its taps. Kernels for the largest width run any width, whose taps are the last ones.
template <int kTaps>
__device__ __forceinline__ int first_tap(const ConvParams& params) {
  return kTaps < kMaxConvWidth ? 0 : static_cast<int>(kMaxConvWidth - params.width);
}

/// Returns sum + Σ_k weight(k)·value(k), added in the same order in every kernel, so that a step's
/// result has the same bits wherever it is computed.
template <int kTaps, class R, class Weight, class Value>
__device__ __forceinline__ R add_products(R sum, int first, const Weight& weight,
                                          const Value& value) {
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    if (kTaps < kMaxConvWidth || k >= first) sum = fma(weight(k), value(k), sum);
  }
  return sum;
}

/// Turns sums into outputs.
template <class R, int kCount>
__device__ __forceinline__ void activate(R (&sums)[kCount], bool silu) {
  if (!silu) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] *= device_sigmoid(sums[i]);
}

template <class R, int kRows, int kCount>
__device__ __forceinline__ void activate(R (&sums)[kRows][kCount], bool silu) {
  if (!silu) return;  // one test for all rows
#pragma unroll
  for (auto& row : sums) activate(row, true);
}

/// Turns the gradients of outputs into those of the sums.
template <class R, int kCount>
__device__ __forceinline__ void differentiate(R (&gradients)[kCount], const R (&sums)[kCount],
                                              bool silu) {
  if (!silu) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    gradients[i] *= silu_derivative(sums[i], device_sigmoid(sums[i]));
  }
}

template <class R, int kRows, int kCount>
__device__ __forceinline__ void differentiate(R (*gradients)[kCount],
                                              const R (&sums)[kRows][kCount], bool silu) {
  if (!silu) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) differentiate(gradients[i], sums[i], true);
}

/// Returns element `position` of a sequence's states, or 0 if it does not exist. Out of line,
/// because it is rarely needed.
template <class R>
__device__ __noinline__ R load_state(const ArrayView& states, int64_t sequence, int64_t channel,
                                     int64_t position) {
  if (!states.present() || sequence == Run::kNone || position < 0) return R(0);
  return load_element<R>(
      states.data, states.dtype,
      sequence * states.batch + channel * states.channel + position * states.step);
}

/// Returns x at a step, or the initial state that stands for it before the run's first step.
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
/// Loads a channel's taps, preceded by `first` zeros. All loads are in flight together, which a
/// branch on the dtype around each would prevent.
template <int kTaps, class R>
__device__ __forceinline__ void load_taps(const ConvParams& params, int64_t channel, int first,
                                          R (&taps)[kTaps]) {
  const ArrayView& weight = params.weight;
  visit_dtype(weight.dtype, [&]<class Element>(Element*) {
    const auto* row = static_cast<const Element*>(weight.data) + channel * weight.channel;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      taps[k] = k < first ? R(0) : from_element<R>(row[(k - first) * weight.step]);
    }
  });
}
template <class R>
__device__ R load_bias(const ConvParams& params, int64_t channel) {
  if (!params.bias.present()) return R(0);
  return load_element<R>(params.bias.data, params.bias.dtype, channel * params.bias.channel);
}

/// Finds the run of a step in a batch entry that may hold several; see run_at(). Out of line,
/// because dense calls do not need it.
static __device__ __noinline__ Run find_run(const ConvParams& params, int64_t batch, int64_t step,
                                            int64_t limit) {
  return run_at(params, batch, step, limit);
}

/// Calls visit(run, from, to) for every run with steps in [first, stop), which are [from, to). Ends
/// of runs are only exact up to `limit`.
template <class Step, class Visit>
__device__ __forceinline__ void for_each_run(const ConvParams& params, int64_t batch, Step first,
                                             Step stop, int64_t limit, const Visit& visit) {
  const bool is_divided = params.seq_idx.present() || params.cu_seqlens.present();
  while (first < stop) {
    Run run{0, params.seqlen, batch, false};
    if (is_divided) run = find_run(params, batch, first, limit);
    const Step to = run.end < stop ? static_cast<Step>(run.end) : stop;
    visit(run, first, to);
    first = to;
  }
}

/// Computes the gradient of the sum at a step entirely from memory, for the few steps whose inputs
/// no kernel has at hand.
template <class R>
__device__ __noinline__ R gradient_at(const ConvBackwardParams& params, int64_t batch,
                                      int64_t channel, int64_t step) {
  R gradient[1] = {};
  if (!params.dout.present()) return gradient[0];
  const auto visit = [&](const Run& run, int64_t, int64_t) {
    if (run.is_padding) return;
    R sum[1] = {load_bias<R>(params, channel)};
#pragma unroll 1
    for (int64_t k = 0; k < params.width; ++k) {
      const R x = continued_x<R>(params, run, batch, channel, step - (params.width - 1) + k);
      sum[0] = fma(load_tap<R>(params, channel, k), x, sum[0]);
    }
    gradient[0] = load_element<R>(
        params.dout.data, params.dout.dtype,
        batch * params.dout.batch + channel * params.dout.channel + step * params.dout.step);
    differentiate(gradient, sum, params.silu);
  };
  for_each_run(params, batch, step, step + 1, step + 1, visit);
  return gradient[0];
}

/// Returns what the final states, which are x at a sequence's last steps, contribute to dx of a
/// step.
template <class R>
__device__ __noinline__ R final_gradient_at(const ConvBackwardParams& params, int64_t batch,
                                            int64_t channel, int64_t step) {
  R gradient = 0;
  const auto visit = [&](const Run& run, int64_t, int64_t) {
    gradient =
        load_state<R>(params.dfinal_states, run.states, channel, step - run.end + params.width - 1);
  };
  for_each_run(params, batch, step, step + 1, step + 1, visit);
  return gradient;
}

}  // namespace selective_scan::cuda::conv
