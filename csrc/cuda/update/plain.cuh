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

#include "../kit/dependent_launch.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "place.cuh"

namespace selective_scan::cuda::update {

/// An array of rows, and in them of groups or channels, by strides in bytes.
struct PlainArray {
  char* data;
  uint32_t row;     // of `state` of the slot
  uint32_t inside;  // of B and C of the group, of `state` and A of the channel

  PlainArray(const ArrayView& view, int64_t stride)
      : data(static_cast<char*>(view.data)),
        row(static_cast<uint32_t>(view.batch * element_size(view.dtype))),
        inside(static_cast<uint32_t>(stride * element_size(view.dtype))) {}
  explicit PlainArray(const ArrayView& view) : PlainArray(view, view.channel) {}

  __device__ __forceinline__ char* at(uint32_t index, uint32_t offset) const {
    return data + (index * row + offset);
  }
  /// Of the states, whose slots may be further apart than an offset of 32 bits goes.
  __device__ __forceinline__ char* at_slot(int slot, uint32_t offset) const {
    return data + static_cast<uint64_t>(static_cast<uint32_t>(slot)) * row + offset;
  }
};

struct PlainArgs {
  PlainArray state, x, dt, z, out, A, B, C, D, dt_bias;
  IndexArray sources;
  IndexArray destinations;
  int64_t pad_slot_id;
  uint32_t channels;  // of all heads
  uint32_t group_channels;
  uint32_t dstate;
  int lane_bits;
  int slots;
  bool D_is_single;
  bool dt_bias_is_single;
  bool dt_softplus;

  explicit PlainArgs(const UpdateParams& params, const UpdatePlan& plan)
      : state(params.state),
        x(params.x),
        dt(params.dt),
        z(params.z),
        out(params.out),
        A(params.A),
        B(params.B, params.B.group),
        C(params.C, params.C.group),
        D(params.D),
        dt_bias(params.dt_bias),
        sources(params.sources),
        destinations(params.destinations),
        pad_slot_id(params.pad_slot_id),
        channels(static_cast<uint32_t>(params.heads * params.dim)),
        group_channels(static_cast<uint32_t>(params.heads / params.groups * params.dim)),
        dstate(static_cast<uint32_t>(params.dstate)),
        lane_bits(plan.lane_bits),
        slots(static_cast<int>(params.slots)),
        D_is_single(params.D.dtype == DType::kFloat32),
        dt_bias_is_single(params.dt_bias.dtype == DType::kFloat32),
        dt_softplus(params.dt_softplus) {}

  /// UpdateParams::slot_of in 32 bits.
  static constexpr int kNoSlot = -1;
  __device__ __forceinline__ int slot_of(const IndexArray& indices, uint32_t row) const {
    const int64_t index = indices.at(row, 0);
    return index < 0 || index >= slots || index == pad_slot_id ? kNoSlot : static_cast<int>(index);
  }
  __device__ __forceinline__ int source(uint32_t row) const {
    return sources.present() ? slot_of(sources, row) : static_cast<int>(row);
  }
};

/// D or dt_bias, in fp32 or the inputs' type, as it lies in memory; 0 where it is absent.
template <class Input>
struct PlainParameter {
  Pack<float, 1> single{};
  Pack<Input, 1> other{};

  __device__ __forceinline__ PlainParameter(const PlainArray& array, bool is_single,
                                            uint32_t channel) {
    if (array.data == nullptr) return;
    if (is_single) {
      single.v[0] = reinterpret_cast<const float*>(array.data)[channel];
    } else {
      other.v[0] = reinterpret_cast<const Input*>(array.data)[channel];
    }
  }
  __device__ __forceinline__ float value() const { return single.v[0] + to_real(other.v[0]); }
};

template <class State, class Input, Method kMethod>
__global__ void __launch_bounds__(kUpdateThreads, sizeof(State) == 4 ? 12 : 10)
    plain_update_kernel(const __grid_constant__ PlainArgs args) {
  constexpr int kStates = 16 / sizeof(State);
  const uint32_t lane = threadIdx.x & ((1u << args.lane_bits) - 1);
  const uint32_t index = (blockIdx.x * kUpdateThreads + threadIdx.x) >> args.lane_bits;
  const uint32_t row = blockIdx.y;
  wait_for_primary();
  const int slot = args.source(row);
  const bool exists = index < args.channels;
  const bool is_live = exists && slot != PlainArgs::kNoSlot;
  const bool has_states = is_live && lane * kStates < args.dstate;
  // Who has nothing to do loads what others do, since no load is to wait for a branch.
  const uint32_t channel = exists ? index : args.channels - 1;
  const uint32_t first = lane * kStates < args.dstate ? lane * kStates : 0;
  const int source = slot == PlainArgs::kNoSlot ? 0 : slot;
  const uint32_t group = args.group_channels == args.channels ? 0 : channel / args.group_channels;
  const uint32_t state_offset = channel * args.state.inside + first * uint32_t{sizeof(State)};
  const auto input_at = [&](const PlainArray& array) {
    return reinterpret_cast<Input*>(array.at(row, channel * uint32_t{sizeof(Input)}));
  };
  const auto projection = [&](const PlainArray& array) {
    const uint32_t offset = group * array.inside + first * uint32_t{sizeof(Input)};
    return load_pack<Input, kStates>(reinterpret_cast<const Input*>(array.at(row, offset)));
  };
  auto states = load_pack<State, kStates>(
      reinterpret_cast<const State*>(args.state.at_slot(source, state_offset)));
  const Input raw_dt = *input_at(args.dt);
  const Input raw_x = *input_at(args.x);
  Input raw_z{};
  if (args.z.data != nullptr) raw_z = *input_at(args.z);
  const auto B = projection(args.B);
  const auto C = projection(args.C);
  const auto A = load_pack<float, kStates>(
      reinterpret_cast<const float*>(args.A.at(0, channel * args.A.inside + first * 4)));
  const PlainParameter<Input> dt_bias(args.dt_bias, args.dt_bias_is_single, channel);
  const PlainParameter<Input> D(args.D, args.D_is_single, channel);

  float delta = to_real(raw_dt) + dt_bias.value();
  if (args.dt_softplus) delta = device_softplus(delta);
  const float x = to_real(raw_x);
  float y = 0;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const float h = after_step<kMethod>(to_real(states.v[s]), delta, x,
                                        make_pole<DeviceMath>(A.v[s]), to_real(B.v[s]));
    y += to_real(C.v[s]) * h;
    states.v[s] = from_real<State>(h);
  }
  if (has_states) {
    const int target = args.destinations.present() ? args.slot_of(args.destinations, row) : source;
    if (target != PlainArgs::kNoSlot) {
      store_pack(reinterpret_cast<State*>(args.state.at_slot(target, state_offset)), states);
    }
  } else {
    y = 0;
  }
  for (int distance = 1 << args.lane_bits >> 1; distance > 0; distance >>= 1) {
    y += __shfl_xor_sync(kFullMask, y, distance);
  }
  if (!exists || lane != 0) return;
  float out = y + D.value() * x;
  if (args.z.data != nullptr) {
    const float z = to_real(raw_z);
    out *= z * device_sigmoid(z);
  }
  *input_at(args.out) = from_real<Input>(is_live ? out : 0.0f);
}

template <class State, class Input, Method kMethod>
cudaError_t PlainUpdate<State, Input, kMethod>::launch(const UpdateParams& params,
                                                       const UpdatePlan& plan,
                                                       cudaStream_t stream) {
  return launch_kernel(plain_update_kernel<State, Input, kMethod>, plan.shape, stream,
                       PlainArgs(params, plan));
}

}  // namespace selective_scan::cuda::update
