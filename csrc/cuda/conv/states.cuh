// Kernels for the states of sequences: the final states, and the gradient of the initial ones. A
// thread has one channel of one sequence. Sequences without steps need no special case.
#pragma once

#include "window.cuh"

namespace selective_scan::cuda::conv {

constexpr int kStateThreads = 128;

struct StatePlace {
  int64_t sequence;
  int64_t batch;
  int64_t channel;
  bool exists;

  __device__ explicit StatePlace(const ConvParams& params) {
    const int64_t index = int64_t{blockIdx.x} * kStateThreads + threadIdx.x;
    sequence = index / params.dim;
    channel = index - sequence * params.dim;
    batch = params.cu_seqlens.present() ? 0 : sequence;
    exists = sequence < params.sequences;
  }

  template <class R>
  __device__ void store(const ArrayView& states, int64_t position, R value) const {
    store_element(states.data, states.dtype,
                  sequence * states.batch + channel * states.channel + position * states.step,
                  value);
  }
};

template <class R>
__global__ void __launch_bounds__(kStateThreads)
    final_states_kernel(const __grid_constant__ ConvForwardParams params) {
  const StatePlace place(params);
  if (!place.exists) return;
  const Run run = run_of(params, place.sequence);
  for (int64_t i = 0; i + 1 < params.width; ++i) {
    const int64_t step = run.end - (params.width - 1) + i;
    place.store(params.final_states, i,
                continued_x<R>(params, run, place.batch, place.channel, step));
  }
}

template <class R>
__global__ void __launch_bounds__(kStateThreads)
    initial_gradient_kernel(const __grid_constant__ ConvBackwardParams params) {
  const StatePlace place(params);
  if (!place.exists) return;
  const Run run = run_of(params, place.sequence);
  const int64_t steps = run.end - run.begin;
  for (int64_t i = 0; i + 1 < params.width; ++i) {
    // In a short sequence, position i of the initial states remains as position i - steps of the
    // final ones.
    R sum = load_state<R>(params.dfinal_states, run.states, place.channel, i - steps);
    for (int64_t seen = 0; seen <= i && seen < steps; ++seen) {
      sum = fma(load_tap<R>(params, place.channel, i - seen),
                gradient_at<R>(params, place.batch, place.channel, run.begin + seen), sum);
    }
    place.store(params.dinitial_states, i, sum);
  }
}

}  // namespace selective_scan::cuda::conv
