// The state update as decoders call it: see is_dense() in plan/update.cpp.
//
// A thread has 16 bytes of the states of one channel and row; the lanes that share a channel sum
// their parts of the output by shuffles. Many threads with one access each keep memory busier than
// few with more to do. A block has a single row, so row addresses cost its threads no instructions.
// Handling any strides and absent inputs would take as many instructions as the step itself. Bound
// by memory, with instruction issue close behind; at batch 1 by latency, from the launch to the
// last store. Therefore the kernel is launched before the preceding one has ended, and its
// arguments are few.
#pragma once

#include "../kit/dependent_launch.cuh"
#include "../kit/launch_tools.h"
#include "place.cuh"

namespace selective_scan::cuda::update {

constexpr int kDenseBlocks = 12;  // per multiprocessor, at least

template <class State, class Input>
__global__ void __launch_bounds__(kUpdateThreads, fitting_blocks(kUpdateThreads, kDenseBlocks))
    dense_update_kernel(const __grid_constant__ DenseArgs<Input> args) {
  constexpr int kStates = 16 / sizeof(State);
  constexpr int kLanes = kDenseStates / kStates;
  const uint32_t row = blockIdx.y;
  const uint32_t thread = blockIdx.x * kUpdateThreads + threadIdx.x;
  const uint32_t channel = thread / kLanes;
  const uint32_t first = threadIdx.x % kLanes * kStates;  // the thread's first state in the channel
  const bool is_writer = first == 0;
  const uint32_t at = row * args.row + channel;  // offset in x, dt and out
  const uint32_t projection = row * args.projection + first;
  wait_for_primary();

  uint32_t slot = row;
  if (args.sources.present()) {
    const int64_t index = SlotRule::named_slot(args.sources.at(row, 0), args);
    if (index == SlotRule::kNoSlot) {
      if (is_writer) args.out[at] = Input{};
      return;
    }
    slot = static_cast<uint32_t>(index);
  }
  State* const state = static_cast<State*>(args.state) +
                       (static_cast<uint64_t>(slot) * args.slot + thread * kStates);
  auto states = load_pack<State, kStates>(state);
  const Input raw_dt = args.dt[at];
  const Input raw_x = args.x[at];
  const Input raw_z = args.z[row * args.z_row + channel];
  const auto raw_B = load_pack<Input, kStates>(args.B + projection);
  const auto raw_C = load_pack<Input, kStates>(args.C + projection);
  Fetched<float, kStates> raw_A;
  const int size = args.A_dtype == DType::kFloat32 ? 4 : sizeof(Input);
  raw_A.template set_all<false>(static_cast<const char*>(args.A) + thread * kStates * size, size);
  const RawElement raw_D(args.D, args.parameters, channel);
  const RawElement raw_bias(args.dt_bias, args.parameters, channel);

  const float delta = step_size(to_real(raw_dt) + raw_bias.value(args.parameters), true);
  const float x = to_real(raw_x);
  float before[kStates], B[kStates], C[kStates];
  to_reals<State>(states, before);
  to_reals<Input>(raw_B, B);
  to_reals<Input>(raw_C, C);
  auto A = raw_A.converted(args.A_dtype);
  if (args.A_is_log) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) A.v[s] = -DeviceMath::exp(A.v[s]);
  }
  float y = 0;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const auto pole = make_pole<DeviceMath>(A.v[s], kCommonMethod);
    const float h = after_step<kCommonMethod>(before[s], delta, x, pole, B[s]);
    y += C[s] * h;
    states.v[s] = to_element<State>(h);
  }
  store_pack(state, states);
  for (int distance = kLanes >> 1; distance > 0; distance >>= 1) {
    y += __shfl_xor_sync(kFullMask, y, distance);
  }
  if (!is_writer) return;
  const float z = to_real(raw_z);
  const float D = raw_D.value(args.parameters);
  args.out[at] = to_element<Input>((y + D * x) * (z * device_sigmoid(z)));
}

template <class State, class Input>
cudaError_t DenseUpdate<State, Input>::launch(const DenseArgs<Input>& args,
                                              const LaunchShape& shape, cudaStream_t stream) {
  return launch_kernel(dense_update_kernel<State, Input>, shape, stream, args);
}

}  // namespace selective_scan::cuda::update
