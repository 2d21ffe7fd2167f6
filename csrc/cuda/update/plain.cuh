// The state update as decoders call it: one step, real states in fp32 arithmetic, inputs of one
// type and the states of that type or fp32, channels side by side, states aligned for vectors.
//
// A thread has 16 bytes of the states of one channel and row; the lanes that share a channel add up
// their parts of the output by shuffles. Many threads with one access each keep memory busier than
// few with more to do. Rows are the same for a block, so that their addresses take no instructions
// of a thread. Bound by memory, with the issue of instructions close behind; at batch 1 by the way
// from the launch to the last store, so it is launched before the kernel in front is done, and its
// arguments are few.
#pragma once

#include "../kit/launch_tools.h"
#include "dense_access.cuh"
#include "strided_access.cuh"

namespace selective_scan::cuda::update {

template <class Access, Method kMethod>
__global__ void __launch_bounds__(kUpdateThreads, Access::kBlocks)
    plain_update_kernel(const __grid_constant__ typename Access::Args args) {
  using State = typename Access::State;
  using Input = typename Access::Input;
  constexpr int kStates = Access::kStates;
  Access access(args);
  if (!access.find_slot()) return;
  auto states = load_pack<State, kStates>(access.source());
  const Input raw_dt = *access.input(args.dt);
  const Input raw_x = *access.input(args.x);
  Input raw_z{};
  if (access.has_z()) raw_z = *access.z();
  const auto raw_B = load_pack<Input, kStates>(access.projection(args.B));
  const auto raw_C = load_pack<Input, kStates>(access.projection(args.C));
  auto A = load_pack<float, kStates>(access.A());
  const typename Access::Parameters parameters(access);

  const float delta = step_of(to_real(raw_dt) + parameters.dt_bias, access.has_softplus());
  const float x = to_real(raw_x);
  float before[kStates], B[kStates], C[kStates];
  to_reals<State>(states, before);
  to_reals<Input>(raw_B, B);
  to_reals<Input>(raw_C, C);
  if (args.A_is_log) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) A.v[s] = -DeviceMath::exp(A.v[s]);
  }
  float y = 0;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const float h =
        after_step<kMethod>(before[s], delta, x, make_pole<DeviceMath>(A.v[s], args.method), B[s]);
    y += C[s] * h;
    states.v[s] = from_real<State>(h);
  }
  if (access.has_states()) {
    access.store(states);
  } else {
    y = 0;
  }
  for (int distance = access.lanes() >> 1; distance > 0; distance >>= 1) {
    y += __shfl_xor_sync(kFullMask, y, distance);
  }
  if (!access.is_writer()) return;
  float out = y + parameters.D * x;
  if (access.has_z()) {
    const float z = to_real(raw_z);
    out *= z * device_sigmoid(z);
  }
  *access.input(args.out) = from_real<Input>(access.is_live() ? out : 0.0f);
}

template <class Access, Method kMethod>
cudaError_t PlainUpdate<Access, kMethod>::launch(const typename Access::Args& args,
                                                 const LaunchShape& shape, cudaStream_t stream) {
  return launch_kernel(plain_update_kernel<Access, kMethod>, shape, stream, args);
}

}  // namespace selective_scan::cuda::update
