// Where a thread of the plain kernel finds its numbers by each array's strides, whatever is absent.
#pragma once

#include "../kit/dependent_launch.cuh"
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

/// Of any call that the plain kernel takes.
struct StridedArgs {
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
  bool A_is_log;
  Method method;

  explicit StridedArgs(const UpdateParams& params, const UpdatePlan& plan)
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
        dt_softplus(params.dt_softplus),
        A_is_log(params.A_is_log),
        method(params.method) {}

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

template <class StateType, class InputType>
class StridedAccess {
 public:
  using Args = StridedArgs;
  using State = StateType;
  using Input = InputType;
  static constexpr int kStates = 16 / sizeof(State);
  static constexpr int kBlocks = sizeof(State) == 4 ? 12 : 10;  // of a multiprocessor, at least

  /// Who has nothing to do loads what others do, since no load is to wait for a branch.
  __device__ __forceinline__ explicit StridedAccess(const Args& args)
      : args_(args),
        lane_(threadIdx.x & ((1u << args.lane_bits) - 1)),
        index_((blockIdx.x * kUpdateThreads + threadIdx.x) >> args.lane_bits),
        slot_((wait_for_primary(), args.source(row()))),
        exists_(index_ < args.channels),
        is_live_(exists_ && slot_ != Args::kNoSlot),
        has_states_(is_live_ && lane_ * kStates < args.dstate),
        channel_(exists_ ? index_ : args.channels - 1),
        first_(lane_ * kStates < args.dstate ? lane_ * kStates : 0),
        source_(slot_ == Args::kNoSlot ? 0 : slot_),
        group_(args.group_channels == args.channels ? 0 : channel_ / args.group_channels),
        state_offset_(channel_ * args.state.inside + first_ * uint32_t{sizeof(State)}) {}

  /// False where the row has no state and the thread has nothing left to do.
  static constexpr bool find_slot() { return true; }
  /// Whether its row has a state, and it has a part of that.
  __device__ __forceinline__ bool is_live() const { return is_live_; }
  __device__ __forceinline__ bool has_states() const { return has_states_; }
  /// Whether it is the one of a channel's lanes that writes the output.
  __device__ __forceinline__ bool is_writer() const { return exists_ && lane_ == 0; }
  __device__ __forceinline__ int lanes() const { return 1 << args_.lane_bits; }
  __device__ __forceinline__ bool has_z() const { return args_.z.data != nullptr; }
  __device__ __forceinline__ bool has_softplus() const { return args_.dt_softplus; }

  __device__ __forceinline__ const State* source() const { return states_of(source_); }
  __device__ __forceinline__ void store(const Pack<State, kStates>& states) const {
    const int target =
        args_.destinations.present() ? args_.slot_of(args_.destinations, row()) : source_;
    if (target != Args::kNoSlot) store_pack(states_of(target), states);
  }
  __device__ __forceinline__ Input* input(const PlainArray& array) const {
    return reinterpret_cast<Input*>(array.at(row(), channel_ * uint32_t{sizeof(Input)}));
  }
  __device__ __forceinline__ const Input* z() const { return input(args_.z); }
  __device__ __forceinline__ const Input* projection(const PlainArray& array) const {
    const uint32_t offset = group_ * array.inside + first_ * uint32_t{sizeof(Input)};
    return reinterpret_cast<const Input*>(array.at(row(), offset));
  }
  __device__ __forceinline__ const float* A() const {
    return reinterpret_cast<const float*>(args_.A.at(0, channel_ * args_.A.inside + first_ * 4));
  }

  /// Each in fp32 or the inputs' type, as it lies in memory; 0 where it is absent.
  class Parameter {
   public:
    __device__ __forceinline__ Parameter(const PlainArray& array, bool is_single,
                                         uint32_t channel) {
      if (array.data == nullptr) return;
      if (is_single) {
        single_.v[0] = reinterpret_cast<const float*>(array.data)[channel];
      } else {
        other_.v[0] = reinterpret_cast<const Input*>(array.data)[channel];
      }
    }
    __device__ __forceinline__ operator float() const {
      return single_.v[0] + to_real(other_.v[0]);
    }

   private:
    Pack<float, 1> single_{};
    Pack<Input, 1> other_{};
  };
  struct Parameters {
    Parameter dt_bias;
    Parameter D;

    __device__ __forceinline__ explicit Parameters(const StridedAccess& access)
        : dt_bias(access.args_.dt_bias, access.args_.dt_bias_is_single, access.channel_),
          D(access.args_.D, access.args_.D_is_single, access.channel_) {}
  };

 private:
  static __device__ __forceinline__ uint32_t row() { return blockIdx.y; }
  __device__ __forceinline__ State* states_of(int slot) const {
    return reinterpret_cast<State*>(args_.state.at_slot(slot, state_offset_));
  }

  const Args& args_;
  const uint32_t lane_;  // of those that share the channel
  const uint32_t index_;
  const int slot_;
  const bool exists_;
  const bool is_live_;
  const bool has_states_;
  const uint32_t channel_;
  const uint32_t first_;  // of its states
  const int source_;
  const uint32_t group_;
  const uint32_t state_offset_;
};

}  // namespace selective_scan::cuda::update
