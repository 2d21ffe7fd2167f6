// The state update as decoders call it: one step, real states in fp32 arithmetic, inputs of one
// type and the states of that type or fp32, everything aligned for vectors.
//
// A thread has 16 bytes of the states of one channel and row; the lanes that share a channel add up
// their parts of the output by shuffles. Many threads with one access each keep memory busier than
// few with more to do. Offsets but those of slots have 32 bits. Bound by memory; at batch 1 by the
// way from the launch to the last store, so it is launched before the kernel in front is done, and
// its arguments are few.
#pragma once

#include "../kit/dependent_launch.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "place.cuh"

namespace selective_scan::cuda::update {

/// An array with strides in bytes.
struct PlainArray {
  char* data;
  uint32_t row;   // of `state` of the slot
  uint32_t head;  // of B and C of the group
  uint32_t channel;

  explicit PlainArray(const ArrayView& view)
      : data(static_cast<char*>(view.data)),
        row(static_cast<uint32_t>(view.batch * element_size(view.dtype))),
        head(static_cast<uint32_t>(view.group * element_size(view.dtype))),
        channel(static_cast<uint32_t>(view.channel * element_size(view.dtype))) {}

  __device__ __forceinline__ uint32_t lane_offset(uint32_t head_index,
                                                  uint32_t channel_index) const {
    return head_index * head + channel_index * channel;
  }
  __device__ __forceinline__ char* at(uint32_t offset) const { return data + offset; }
  /// Of the states, whose rows may be further apart than an offset goes.
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
  uint32_t dim;
  uint32_t heads_per_group;
  uint32_t dstate;
  uint32_t A_state;  // stride of A's states
  int lane_bits;
  int batch;
  int slots;
  DType D_dtype;
  DType dt_bias_dtype;
  bool A_is_vector;
  bool dt_softplus;
  bool has_groups;

  PlainArgs(const UpdateParams& params, const UpdatePlan& plan)
      : state(params.state),
        x(params.x),
        dt(params.dt),
        z(params.z),
        out(params.out),
        A(params.A),
        B(params.B),
        C(params.C),
        D(params.D),
        dt_bias(params.dt_bias),
        sources(params.sources),
        destinations(params.destinations),
        pad_slot_id(params.pad_slot_id),
        channels(static_cast<uint32_t>(params.heads * params.dim)),
        dim(static_cast<uint32_t>(params.dim)),
        heads_per_group(static_cast<uint32_t>(params.heads / params.groups)),
        dstate(static_cast<uint32_t>(params.dstate)),
        A_state(static_cast<uint32_t>(params.A.state * element_size(params.A.dtype))),
        lane_bits(plan.lane_bits),
        batch(static_cast<int>(params.batch)),
        slots(static_cast<int>(params.slots)),
        D_dtype(params.D.dtype),
        dt_bias_dtype(params.dt_bias.dtype),
        A_is_vector(plan.vectors.A),
        dt_softplus(params.dt_softplus),
        has_groups(params.groups > 1) {}

  /// UpdateParams::slot_of in 32 bits.
  static constexpr int kNoSlot = -1;
  __device__ __forceinline__ int slot_of(const IndexArray& indices, int row) const {
    const int64_t index = indices.at(row, 0);
    return index < 0 || index >= slots || index == pad_slot_id ? kNoSlot : static_cast<int>(index);
  }
  __device__ __forceinline__ int source(int row) const {
    return sources.present() ? slot_of(sources, row) : row;
  }
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

template <class Element, int kCount>
__device__ __forceinline__ Pack<Element, kCount> load_at(const char* address) {
  return load_pack<Element, kCount>(reinterpret_cast<const Element*>(address));
}

template <class State, class Input, Method kMethod>
__global__ void __launch_bounds__(kUpdateThreads, 12)
    plain_update_kernel(const __grid_constant__ PlainArgs args) {
  constexpr int kStates = 16 / sizeof(State);
  const uint32_t lane = threadIdx.x & ((1u << args.lane_bits) - 1);
  const uint32_t index = (blockIdx.x * kUpdateThreads + threadIdx.x) >> args.lane_bits;
  const uint32_t head = args.dim == args.channels ? 0 : index / args.dim;
  const uint32_t channel = index - head * args.dim;
  const uint32_t first = lane * kStates;
  const bool exists = index < args.channels;
  const bool has_states = exists && first < args.dstate;
  const uint32_t group = args.has_groups ? head / args.heads_per_group : 0;
  wait_for_primary();

  Pack<float, kStates> A{};
  Fetched<float, 1> fetched_D, fetched_bias;
  if (has_states) {
    const uint32_t A_at = args.A.lane_offset(head, channel) + first * args.A_state;
    if (args.A_is_vector) {
      A = load_at<float, kStates>(args.A.at(A_at));
    } else {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        A.v[s] = *reinterpret_cast<const float*>(args.A.at(A_at + s * args.A_state));
      }
    }
  }
  if (exists) {
    fetched_D = fetch_channel(args.D, args.D_dtype, head, channel);
    fetched_bias = fetch_channel(args.dt_bias, args.dt_bias_dtype, head, channel);
  }

  for (int row = static_cast<int>(blockIdx.y); row < args.batch; row += gridDim.y) {
    const auto at = [&](const PlainArray& array) {
      return array.at(array.lane_offset(head, channel) + static_cast<uint32_t>(row) * array.row);
    };
    const auto state_at = [&](int slot) {
      return args.state.at_slot(slot, args.state.lane_offset(head, channel) + lane * 16);
    };
    const int source = args.source(row);
    const bool is_live = exists && source != PlainArgs::kNoSlot;
    Pack<State, kStates> states{};
    Pack<Input, kStates> B{}, C{};
    Pack<Input, 1> raw_dt{}, raw_x{}, raw_z{};
    if (is_live && has_states) {
      states = load_at<State, kStates>(state_at(source));
      const auto projection_at = [&](const PlainArray& array) {
        return array.at(static_cast<uint32_t>(row) * array.row + group * array.head +
                        first * static_cast<uint32_t>(sizeof(Input)));
      };
      B = load_at<Input, kStates>(projection_at(args.B));
      C = load_at<Input, kStates>(projection_at(args.C));
    }
    if (is_live) {
      raw_dt = load_at<Input, 1>(at(args.dt));
      raw_x = load_at<Input, 1>(at(args.x));
      if (args.z.data != nullptr) raw_z = load_at<Input, 1>(at(args.z));
    }
    float delta = to_real(raw_dt.v[0]) + fetched_bias.converted(args.dt_bias_dtype).v[0];
    if (args.dt_softplus) delta = device_softplus(delta);
    const float x = to_real(raw_x.v[0]);
    float y = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const float h = after_step<kMethod>(to_real(states.v[s]), delta, x,
                                          make_pole<DeviceMath>(A.v[s]), to_real(B.v[s]));
      y += to_real(C.v[s]) * h;
      states.v[s] = from_real<State>(h);
    }
    if (is_live && has_states) {
      const int target =
          args.destinations.present() ? args.slot_of(args.destinations, row) : source;
      if (target != PlainArgs::kNoSlot) {
        store_pack(reinterpret_cast<State*>(state_at(target)), states);
      }
    }
    for (int distance = 1 << args.lane_bits >> 1; distance > 0; distance >>= 1) {
      y += __shfl_xor_sync(kFullMask, y, distance);
    }
    if (exists && lane == 0) {
      float out = y + fetched_D.converted(args.D_dtype).v[0] * x;
      if (args.z.data != nullptr) {
        const float z = to_real(raw_z.v[0]);
        out *= z * device_sigmoid(z);
      }
      const Pack<Input, 1> result{from_real<Input>(is_live ? out : 0.0f)};
      store_pack(reinterpret_cast<Input*>(at(args.out)), result);
    }
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
