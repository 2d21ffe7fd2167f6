// The state update as decoders call it: one step, real states in fp32 arithmetic, inputs of one
// type and the states of that type or fp32, everything aligned for vectors.
//
// A block takes its rows in groups. What a channel has but one of in a row, its step, input, gate
// and slot, the lanes that share the channel prepare for one row of the group each, and tell each
// other. The states of the whole group are under way at once, those of the next are asked for to
// the second-level cache: with 1024 threads on a multiprocessor 32 to 64 KiB, each. Offsets but
// those of slots have 32 bits, and go from group to group by one addition. Bound by memory; at
// batch 1 by the way from the launch to the first load, for which the host prepares what it can.
#pragma once

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
  UpdateParams params;
  PlainArray state, x, dt, z, out, A, B, C, D, dt_bias;
  uint32_t channels;  // of all heads
  uint32_t dim;
  uint32_t heads_per_group;
  int lane_bits;
  uint32_t A_state;  // stride of A's states
  bool A_is_vector;
  int batch;
  int rows;  // that a block takes
  int slots;

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
        A_state(static_cast<uint32_t>(params.A.state * element_size(params.A.dtype))),
        A_is_vector(plan.vectors.A),
        batch(static_cast<int>(params.batch)),
        rows(static_cast<int>(plan.rows)),
        slots(static_cast<int>(params.slots)) {}

  /// UpdateParams::slot_of in 32 bits.
  static constexpr int kNoSlot = -1;
  __device__ __forceinline__ int slot_of(const IndexArray& indices, int index_row) const {
    const int64_t index = indices.at(index_row, 0);
    return index < 0 || index >= slots || index == params.pad_slot_id ? kNoSlot
                                                                      : static_cast<int>(index);
  }
  __device__ __forceinline__ int source(int index_row) const {
    return params.sources.present() ? slot_of(params.sources, index_row) : index_row;
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

/// 16 bytes of states, past the first-level cache, which is for what rows share.
template <class State, int kStates>
__device__ __forceinline__ Pack<State, kStates> load_streamed(const char* address) {
  return bit_cast<Pack<State, kStates>>(__ldcg(reinterpret_cast<const uint4*>(address)));
}
/// What the kernel writes nothing of, so that loads may pass stores.
template <class Element, int kCount>
__device__ __forceinline__ Pack<Element, kCount> load_shared(const char* address) {
  using Word = Vector<sizeof(Pack<Element, kCount>)>;
  Pack<Word, sizeof(Pack<Element, kCount>) / sizeof(Word)> words;
#pragma unroll
  for (size_t i = 0; i < sizeof(words) / sizeof(Word); ++i) {
    words.v[i] = __ldg(reinterpret_cast<const Word*>(address) + i);
  }
  return bit_cast<Pack<Element, kCount>>(words);
}
template <class Element, int kCount>
__device__ __forceinline__ Pack<Element, kCount> load_at(const char* address) {
  return load_pack<Element, kCount>(reinterpret_cast<const Element*>(address));
}

template <class State, class Input, Method kMethod>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateBlocksAtOnce)
    plain_update_kernel(const __grid_constant__ PlainArgs args) {
  constexpr int kStates = 16 / sizeof(State);
  constexpr int kGroup = plain_group(kStates);
  const UpdateParams& params = args.params;
  const uint32_t lane = threadIdx.x & ((1u << args.lane_bits) - 1);
  const uint32_t index = (blockIdx.x * kUpdateThreads + threadIdx.x) >> args.lane_bits;
  const uint32_t head = args.dim == args.channels ? 0 : index / args.dim;
  const uint32_t channel = index - head * args.dim;
  const uint32_t group = params.groups == 1 ? 0 : head / args.heads_per_group;
  const uint32_t first = lane * kStates;
  const bool exists = index < args.channels;
  const bool has_states = exists && first < params.dstate;
  const int own = static_cast<int>(lane) % kGroup;
  const auto lane_offset = [&](const PlainArray& array) {
    return array.lane_offset(head, channel);
  };
  const uint32_t state_lane = lane_offset(args.state) + first * sizeof(State);
  const int begin = static_cast<int>(blockIdx.y) * args.rows;
  const int end = begin + args.rows < args.batch ? begin + args.rows : args.batch;
  const auto row_offset = [&](const PlainArray& array) {
    return lane_offset(array) + static_cast<uint32_t>(begin + own) * array.row;
  };
  const auto projection_offset = [&](const PlainArray& array) {
    return static_cast<uint32_t>(begin) * array.row + group * array.head +
           first * static_cast<uint32_t>(sizeof(Input));
  };
  uint32_t x_at = row_offset(args.x), dt_at = row_offset(args.dt), z_at = row_offset(args.z);
  uint32_t out_at = row_offset(args.out);
  uint32_t B_at = projection_offset(args.B), C_at = projection_offset(args.C);

  Pack<float, kStates> A{};
  Fetched<float, 1> fetched_D, fetched_bias;
  if (has_states) {
    const uint32_t A_at = lane_offset(args.A) + first * args.A_state;
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
    fetched_D = fetch_channel(args.D, params.D.dtype, head, channel);
    fetched_bias = fetch_channel(args.dt_bias, params.dt_bias.dtype, head, channel);
  }

  // From the lane that prepares row `i` of a group.
  const auto from_row = [&](auto value, int i) {
    return __shfl_sync(kFullMask, value, threadIdx.x % kWarpSize - lane + i);
  };
  const auto source_of = [&](int row) { return row < end ? args.source(row) : PlainArgs::kNoSlot; };
  int next_slot = source_of(begin + own);
  for (int group_begin = begin; group_begin < end; group_begin += kGroup) {
    const int row = group_begin + own;
    const int slot = next_slot;
    next_slot = source_of(row + kGroup);
    Pack<State, kStates> states[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int source = from_row(slot, i);
      if (has_states && source != PlainArgs::kNoSlot) {
        states[i] = load_streamed<State, kStates>(args.state.at_slot(source, state_lane));
      }
    }
    const bool is_mine = exists && slot != PlainArgs::kNoSlot;
    Pack<Input, 1> raw_dt{}, raw_x{}, raw_z{};
    if (is_mine) {
      raw_dt = load_at<Input, 1>(args.dt.at(dt_at));
      raw_x = load_at<Input, 1>(args.x.at(x_at));
      if (args.z.data != nullptr) raw_z = load_at<Input, 1>(args.z.at(z_at));
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int ahead = from_row(next_slot, i);
      if (has_states && ahead != PlainArgs::kNoSlot) {
        prefetch(args.state.at_slot(ahead, state_lane));
      }
    }
    int destination = slot;
    if (params.destinations.present() && slot != PlainArgs::kNoSlot) {
      destination = args.slot_of(params.destinations, row);
    }
    float delta = to_real(raw_dt.v[0]) + value_of(fetched_bias, params.dt_bias);
    if (params.dt_softplus) delta = device_softplus(delta);
    const float x = to_real(raw_x.v[0]);

    float own_y = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (group_begin + i >= end) break;
      float y = 0;
      const int source = from_row(slot, i);
      const int target = from_row(destination, i);
      const float delta_of_row = from_row(delta, i);
      const float x_of_row = from_row(x, i);
      if (has_states && source != PlainArgs::kNoSlot) {
        const auto B = load_shared<Input, kStates>(args.B.at(B_at + i * args.B.row));
        const auto C = load_shared<Input, kStates>(args.C.at(C_at + i * args.C.row));
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          const float h = after_step<kMethod>(to_real(states[i].v[s]), delta_of_row, x_of_row,
                                              make_pole<DeviceMath>(A.v[s]), to_real(B.v[s]));
          y += to_real(C.v[s]) * h;
          states[i].v[s] = from_real<State>(h);
        }
        if (target != PlainArgs::kNoSlot) {
          store_pack(reinterpret_cast<State*>(args.state.at_slot(target, state_lane)), states[i]);
        }
      }
      for (int distance = 1 << args.lane_bits >> 1; distance > 0; distance >>= 1) {
        y += __shfl_xor_sync(kFullMask, y, distance);
      }
      if (own == i) own_y = y;
    }

    if (exists && lane < kGroup && row < end) {
      float out = own_y + value_of(fetched_D, params.D) * x;
      if (args.z.data != nullptr) {
        const float z = to_real(raw_z.v[0]);
        out *= z * device_sigmoid(z);
      }
      const Pack<Input, 1> result{from_real<Input>(slot != PlainArgs::kNoSlot ? out : 0.0f)};
      store_pack(reinterpret_cast<Input*>(args.out.at(out_at)), result);
    }
    x_at += kGroup * args.x.row;
    dt_at += kGroup * args.dt.row;
    z_at += kGroup * args.z.row;
    out_at += kGroup * args.out.row;
    B_at += kGroup * args.B.row;
    C_at += kGroup * args.C.row;
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
