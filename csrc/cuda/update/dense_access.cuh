// Where a thread of the plain kernel finds its numbers in a call of which much is known: see
// UpdatePlan::is_dense. To find addresses and to look for what may be absent takes as many
// instructions as the step itself, and most of them are spared here.
#pragma once

#include "../kit/dependent_launch.cuh"
#include "place.cuh"

namespace selective_scan::cuda::update {

/// Strides count elements.
template <class Input>
struct DenseArgs {
  void* state;
  Input *x, *dt, *z, *out;
  const float* A;
  const Input *B, *C;
  const void *D, *dt_bias;
  IndexArray sources;
  int64_t pad_slot_id;
  int slots;
  uint32_t slot;        // from one to the next
  uint32_t row;         // of x, dt and out
  uint32_t z_row;       // of z
  uint32_t projection;  // of B and C
  bool parameters_are_single;
  bool A_is_log;
  Method method;

  explicit DenseArgs(const UpdateParams& params, const UpdatePlan&)
      : state(params.state.data),
        x(static_cast<Input*>(params.x.data)),
        dt(static_cast<Input*>(params.dt.data)),
        z(static_cast<Input*>(params.z.data)),
        out(static_cast<Input*>(params.out.data)),
        A(static_cast<const float*>(params.A.data)),
        B(static_cast<const Input*>(params.B.data)),
        C(static_cast<const Input*>(params.C.data)),
        D(params.D.data),
        dt_bias(params.dt_bias.data),
        sources(params.sources),
        pad_slot_id(params.pad_slot_id),
        slots(static_cast<int>(params.slots)),
        slot(static_cast<uint32_t>(params.state.batch)),
        row(static_cast<uint32_t>(params.x.batch)),
        z_row(static_cast<uint32_t>(params.z.batch)),
        projection(static_cast<uint32_t>(params.B.batch)),
        parameters_are_single(params.D.dtype == DType::kFloat32),
        A_is_log(params.A_is_log),
        method(params.method) {}
};

template <class StateType, class InputType>
class DenseAccess {
 public:
  using Args = DenseArgs<InputType>;
  using State = StateType;
  using Input = InputType;
  static constexpr int kStates = 16 / sizeof(State);
  static constexpr int kLanes = kDenseStates / kStates;
  static constexpr int kBlocks = 12;

  __device__ __forceinline__ explicit DenseAccess(const Args& args)
      : args_(args),
        thread_(blockIdx.x * kUpdateThreads + threadIdx.x),
        channel_(thread_ / kLanes),
        first_(threadIdx.x % kLanes * kStates),
        at_(row() * args.row + channel_),
        projection_(row() * args.projection + first_) {
    wait_for_primary();
  }

  __device__ __forceinline__ bool find_slot() {
    uint32_t slot = row();
    if (args_.sources.present()) {
      const int64_t index = args_.sources.at(row(), 0);
      if (index < 0 || index >= args_.slots || index == args_.pad_slot_id) {
        if (is_writer()) *input(args_.out) = Input{};
        return false;
      }
      slot = static_cast<uint32_t>(index);
    }
    state_ = static_cast<State*>(args_.state) +
             (static_cast<uint64_t>(slot) * args_.slot + thread_ * kStates);
    return true;
  }
  __device__ __forceinline__ bool is_writer() const { return first_ == 0; }
  static constexpr bool is_live() { return true; }
  static constexpr bool has_states() { return true; }
  static constexpr int lanes() { return kLanes; }
  static constexpr bool has_z() { return true; }
  static constexpr bool has_softplus() { return true; }

  __device__ __forceinline__ const State* source() const { return state_; }
  __device__ __forceinline__ void store(const Pack<State, kStates>& states) const {
    store_pack(state_, states);
  }
  __device__ __forceinline__ Input* input(Input* rows) const { return rows + at_; }
  __device__ __forceinline__ const Input* z() const {
    return args_.z + (row() * args_.z_row + channel_);
  }
  __device__ __forceinline__ const Input* projection(const Input* rows) const {
    return rows + projection_;
  }
  __device__ __forceinline__ const float* A() const { return args_.A + thread_ * kStates; }

  /// Both in fp32, or both in the inputs' type.
  struct Parameters {
    float D;
    float dt_bias;

    __device__ __forceinline__ explicit Parameters(const DenseAccess& access) {
      const Args& args = access.args_;
      const auto take = [&](auto type) {
        using Type = decltype(type);
        D = to_real(static_cast<const Type*>(args.D)[access.channel_]);
        dt_bias = to_real(static_cast<const Type*>(args.dt_bias)[access.channel_]);
      };
      if (args.parameters_are_single) {
        take(float{});
      } else {
        take(Input{});
      }
    }
  };

 private:
  static __device__ __forceinline__ uint32_t row() { return blockIdx.y; }

  const Args& args_;
  const uint32_t thread_;
  const uint32_t channel_;
  const uint32_t first_;       // of the thread's states in the channel
  const uint32_t at_;          // of x, dt and out
  const uint32_t projection_;  // of B and C
  State* state_ = nullptr;
};

}  // namespace selective_scan::cuda::update
