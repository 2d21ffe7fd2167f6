// The state update as decoders call it: one step, real states in fp32 arithmetic, inputs of one
// type and the states of that type or fp32, everything aligned for vectors.
//
// A block takes its rows one behind the other. It asks the second-level cache for the states of the
// next kRowsAhead, so that memory is busy with few registers: 1024 threads on a multiprocessor have
// 48 KiB on their way. Offsets but those of slots have 32 bits, and go from row to row by one
// addition. Bound by memory; at batch 1 by the way from the launch to the first load, for which the
// host prepares what it can.
#pragma once

#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "place.cuh"

namespace selective_scan::cuda::update {

/// An array with strides in bytes.
struct PlainArray {
  char* data;
  int64_t row;
  uint32_t head;  // of B and C of the group
  uint32_t channel;

  explicit PlainArray(const ArrayView& view)
      : data(static_cast<char*>(view.data)),
        row(view.batch * element_size(view.dtype)),
        head(static_cast<uint32_t>(view.group * element_size(view.dtype))),
        channel(static_cast<uint32_t>(view.channel * element_size(view.dtype))) {}

  __device__ __forceinline__ uint32_t lane_offset(uint32_t head_index,
                                                  uint32_t channel_index) const {
    return head_index * head + channel_index * channel;
  }
  __device__ __forceinline__ char* at(uint32_t offset) const { return data + offset; }
  /// Of the states.
  __device__ __forceinline__ char* at_slot(int64_t slot, uint32_t offset) const {
    return data + slot * row + offset;
  }
};

struct PlainArgs {
  UpdateParams params;
  PlainArray state, x, dt, z, out, A, B, C, D, dt_bias;
  uint32_t channels;  // of all heads
  uint32_t dim;
  uint32_t heads_per_group;
  int lane_bits;
  int batch;
  int rows;  // that a block takes

  PlainArgs(const UpdateParams& params, const UpdatePlan& plan)
      : params(params),
        state(params.state),
        x(params.x),
        dt(params.dt),
        z(params.z),
        out(params.out),
        A(params.A),
        B(params.B),
        C(params.C),
        D(params.D),
        dt_bias(params.dt_bias),
        channels(static_cast<uint32_t>(params.heads * params.dim)),
        dim(static_cast<uint32_t>(params.dim)),
        heads_per_group(static_cast<uint32_t>(params.heads / params.groups)),
        lane_bits(plan.lane_bits),
        batch(static_cast<int>(params.batch)),
        rows(static_cast<int>(plan.rows)) {}
};

/// D or dt_bias, of any type.
__device__ __forceinline__ Fetched<float, 1> fetch_channel(const PlainArray& array, DType dtype,
                                                           uint32_t head, uint32_t channel) {
  Fetched<float, 1> fetched;
  if (array.data != nullptr) {
    fetched.set(0, array.at(array.lane_offset(head, channel)),
                static_cast<int>(element_size(dtype)));
  }
  return fetched;
}

/// 16 bytes of states, past the first-level cache, which is for what rows share.
template <class State, int kStates>
__device__ __forceinline__ Pack<State, kStates> load_streamed(const char* address) {
  return bit_cast<Pack<State, kStates>>(__ldcg(reinterpret_cast<const uint4*>(address)));
}
template <class Element, int kCount>
__device__ __forceinline__ Pack<Element, kCount> load_at(const char* address) {
  return load_pack<Element, kCount>(reinterpret_cast<const Element*>(address));
}

template <class State, class Input, Method kMethod>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateBlocksAtOnce)
    plain_update_kernel(const __grid_constant__ PlainArgs args) {
  constexpr int kStates = 16 / sizeof(State);
  const UpdateParams& params = args.params;
  const uint32_t lane = threadIdx.x & ((1u << args.lane_bits) - 1);
  const uint32_t index = (blockIdx.x * kUpdateThreads + threadIdx.x) >> args.lane_bits;
  const uint32_t head = args.dim == args.channels ? 0 : index / args.dim;
  const uint32_t channel = index - head * args.dim;
  const uint32_t group = params.groups == 1 ? 0 : head / args.heads_per_group;
  const uint32_t first = lane * kStates;
  const bool has_states = index < args.channels && first < params.dstate;
  const auto lane_offset = [&](const PlainArray& array) {
    return array.lane_offset(head, channel);
  };
  const uint32_t state_lane = lane_offset(args.state) + first * sizeof(State);
  const int begin = static_cast<int>(blockIdx.y) * args.rows;
  const int end = begin + args.rows < args.batch ? begin + args.rows : args.batch;
  const auto row_offset = [&](const PlainArray& array) {
    return lane_offset(array) + static_cast<uint32_t>(begin) * static_cast<uint32_t>(array.row);
  };
  const auto projection_offset = [&](const PlainArray& array) {
    return static_cast<uint32_t>(begin) * static_cast<uint32_t>(array.row) + group * array.head +
           first * static_cast<uint32_t>(sizeof(Input));
  };
  uint32_t x_at = row_offset(args.x), dt_at = row_offset(args.dt), z_at = row_offset(args.z);
  uint32_t out_at = row_offset(args.out);
  uint32_t B_at = projection_offset(args.B), C_at = projection_offset(args.C);
  const auto next_row = [&] {
    x_at += static_cast<uint32_t>(args.x.row);
    dt_at += static_cast<uint32_t>(args.dt.row);
    z_at += static_cast<uint32_t>(args.z.row);
    out_at += static_cast<uint32_t>(args.out.row);
    B_at += static_cast<uint32_t>(args.B.row);
    C_at += static_cast<uint32_t>(args.C.row);
  };

  const auto prefetch_state = [&](int row) {
    const int64_t slot = params.source(row);
    if (has_states && slot != UpdateParams::kNoSlot) prefetch(args.state.at_slot(slot, state_lane));
  };

  Pack<float, kStates> A{};
  Fetched<float, 1> fetched_D, fetched_bias;
  if (has_states) {
    A = load_at<float, kStates>(args.A.at(lane_offset(args.A) + first * sizeof(float)));
    fetched_D = fetch_channel(args.D, params.D.dtype, head, channel);
    fetched_bias = fetch_channel(args.dt_bias, params.dt_bias.dtype, head, channel);
  }
  for (int row = begin + 1; row < end && row <= begin + kRowsAhead; ++row) prefetch_state(row);

  for (int row = begin; row < end; ++row, next_row()) {
    const int64_t source = params.source(row);
    if (row > begin && row + kRowsAhead < end) prefetch_state(row + kRowsAhead);
    const bool is_live = source != UpdateParams::kNoSlot;
    float y = 0, x = 0, z = 0;
    Pack<State, kStates> states;
    if (has_states && is_live) {
      states = load_streamed<State, kStates>(args.state.at_slot(source, state_lane));
      const auto raw_dt = load_at<Input, 1>(args.dt.at(dt_at));
      const auto raw_x = load_at<Input, 1>(args.x.at(x_at));
      Pack<Input, 1> raw_z{};
      if (args.z.data != nullptr) raw_z = load_at<Input, 1>(args.z.at(z_at));
      const auto B = load_at<Input, kStates>(args.B.at(B_at));
      const auto C = load_at<Input, kStates>(args.C.at(C_at));

      float delta = to_real(raw_dt.v[0]) + value_of(fetched_bias, params.dt_bias);
      if (params.dt_softplus) delta = device_softplus(delta);
      x = to_real(raw_x.v[0]);
      z = to_real(raw_z.v[0]);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const auto value = coefficients<kMethod>(delta, make_pole<DeviceMath>(A.v[s]));
        const float input = held_input<kMethod>(delta, x, value) * to_real(B.v[s]);
        const float h = value.abar * to_real(states.v[s]) + input;
        y += to_real(C.v[s]) * h;
        states.v[s] = from_real<State>(h);
      }
    }
    if (is_live) {
      for (int distance = 1 << args.lane_bits >> 1; distance > 0; distance >>= 1) {
        y += __shfl_xor_sync(kFullMask, y, distance);
      }
    }
    if (!has_states) continue;
    if (lane == 0) {
      float out = y + value_of(fetched_D, params.D) * x;
      if (args.z.data != nullptr) out *= z * device_sigmoid(z);
      Pack<Input, 1> result{from_real<Input>(is_live ? out : 0.0f)};
      store_pack(reinterpret_cast<Input*>(args.out.at(out_at)), result);
    }
    if (!is_live) continue;
    const int64_t destination = params.destination(row, 0, source);
    if (destination == UpdateParams::kNoSlot) continue;
    store_pack(reinterpret_cast<State*>(args.state.at_slot(destination, state_lane)), states);
  }
}

template <class State, class Input, Method kMethod>
cudaError_t PlainUpdate<State, Input, kMethod>::launch(const UpdateParams& params,
                                                       const UpdatePlan& plan,
                                                       cudaStream_t stream) {
  return launch_kernel(plain_update_kernel<State, Input, kMethod>, plan.shape, stream,
                       PlainArgs(params, plan));
}

}  // namespace selective_scan::cuda::update
