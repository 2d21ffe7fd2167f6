// The state update: every state read once, changed, and written once.
//
// Mapping: see UpdatePlan. Two rows at a time have their states and inputs under way before the
// first is waited for, and the states of the next two are asked for to the second-level cache; the
// sum over the states goes through shuffles. Bound by memory: with 1024 threads on a multiprocessor
// and 32 bytes of states each, 32 KiB are in flight, and as much on its way to the cache. A row of
// eight states in a lane takes about 200 instructions, two thirds of what can be issued in the time
// that bf16 states take from memory on an H200.
#pragma once

#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "fetch.cuh"
#include "kernels.h"

namespace selective_scan::cuda::update {

constexpr int kRows = 2;  // at a time

struct UpdateArgs {
  UpdateParams params;
  UpdatePlan plan;
};

/// Where a lane stands.
struct Place {
  int64_t head;
  int64_t channel;
  int64_t group;
  int part;     // of the lanes that share the channel
  bool exists;  // the last block's channels may be too many

  __device__ __forceinline__ Place(const UpdateParams& params, const UpdatePlan& plan) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t tile = blockIdx.x % static_cast<unsigned>(plan.tiles);
    const int64_t index = tile * (kUpdateThreads >> plan.lane_bits) + (thread >> plan.lane_bits);
    part = thread & ((1 << plan.lane_bits) - 1);
    exists = index < params.heads * params.dim;
    head = params.heads == 1 || !exists ? 0 : index / params.dim;
    channel = exists ? index - head * params.dim : 0;
    group = params.groups == 1 ? 0 : params.group_of(head);
  }

  /// Of an array of channels, at row and step 0.
  __device__ __forceinline__ int64_t offset(const ArrayView& view) const {
    return head * view.group + channel * view.channel;
  }
};

/// What a row's step needs beside its state.
template <class T, int kStates, int kPacks>
struct StepInputs {
  using R = real_t<T>;
  using States = Fetched<R, kStates*(is_complex_v<T> ? 2 : 1)>;
  Fetched<R, 1> dt;
  Fetched<R, 1> x;
  Fetched<R, 1> z;
  States B[kPacks];
  States C[kPacks];
};

template <class T, int kStates, int kPacks, Method kMethod>
class RowUpdates {
  using R = real_t<T>;
  using Inputs = StepInputs<T, kStates, kPacks>;

 public:
  __device__ __forceinline__ RowUpdates(const UpdateParams& params, const UpdatePlan& plan)
      : params_(params), plan_(plan), place_(params, plan) {
    typename Inputs::States A[kPacks];
    Fetched<R, 1> D, dt_bias;
    if (place_.exists) {
      for_each_pack([&](int p, int first) {
        A[p] = fetch_states<false, T, kStates>(params.A, plan.vectors.A, place_.offset(params.A),
                                               first, params.dstate);
      });
      D = fetch<R>(params.D, place_.offset(params.D));
      dt_bias = fetch<R>(params.dt_bias, place_.offset(params.dt_bias));
    }
    D_ = value_of(D, params.D);
    dt_bias_ = value_of(dt_bias, params.dt_bias);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const auto poles = states_of<T, kStates>(A[p], params.A.dtype);
#pragma unroll
      for (int s = 0; s < kStates; ++s) poles_[p][s] = make_pole<DeviceMath>(poles.v[s]);
    }
  }

  __device__ __forceinline__ void run(int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kRows) {
      int64_t source[kRows];
      typename Inputs::States fetched[kRows][kPacks];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        source[i] = row + i < end ? params_.source(row + i) : UpdateParams::kNoSlot;
        if (!has_state(source[i])) continue;
        for_each_pack([&](int p, int first) {
          fetched[i][p] = fetch_states<true, T, kStates>(
              params_.state, plan_.vectors.state, state_offset(source[i]), first, params_.dstate);
        });
      }
      Inputs inputs[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (has_state(source[i])) fetch_inputs(row + i, 0, inputs[i]);
      }
      for (int64_t next = row + kRows; next < row + 2 * kRows && next < end; ++next) {
        prefetch_state(params_.source(next));
      }

      Pack<T, kStates> h[kRows][kPacks];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          h[i][p] = states_of<T, kStates>(fetched[i][p], params_.state.dtype);
        }
      }
      for (int64_t step = 0; step < params_.steps; ++step) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (step > 0 && has_state(source[i])) fetch_inputs(row + i, step, inputs[i]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (row + i < end) advance(row + i, step, source[i], inputs[i], h[i]);
        }
      }
    }
  }

 private:
  template <class Visit>
  __device__ __forceinline__ void for_each_pack(const Visit& visit) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) visit(p, first_state(p));
  }
  __device__ __forceinline__ int first_state(int pack) const {
    return ((pack << plan_.lane_bits) + place_.part) * kStates;
  }
  __device__ __forceinline__ bool has_state(int64_t slot) const {
    return place_.exists && slot != UpdateParams::kNoSlot;
  }
  __device__ __forceinline__ int64_t state_offset(int64_t slot) const {
    return place_.offset(params_.state) + slot * params_.state.batch;
  }
  __device__ __forceinline__ int64_t row_offset(const ArrayView& view, int64_t row,
                                                int64_t step) const {
    return place_.offset(view) + row * view.batch + step * view.step;
  }

  __device__ __forceinline__ void fetch_inputs(int64_t row, int64_t step, Inputs& inputs) const {
    inputs.dt = fetch<R>(params_.dt, row_offset(params_.dt, row, step));
    inputs.x = fetch<R>(params_.x, row_offset(params_.x, row, step));
    inputs.z = fetch<R>(params_.z, row_offset(params_.z, row, step));
    const auto fetch_projection = [&](const ArrayView& view, bool is_vector, int first) {
      const int64_t index = row * view.batch + step * view.step + place_.group * view.group;
      return fetch_states<false, T, kStates>(view, is_vector, index, first, params_.dstate);
    };
    for_each_pack([&](int p, int first) {
      inputs.B[p] = fetch_projection(params_.B, plan_.vectors.B, first);
      inputs.C[p] = fetch_projection(params_.C, plan_.vectors.C, first);
    });
  }

  /// Has the second-level cache fetch a state.
  __device__ __forceinline__ void prefetch_state(int64_t slot) const {
    if (!has_state(slot)) return;
    for_each_pack([&](int, int first) {
      if (first >= params_.dstate) return;
      const char* address =
          address_of(params_.state, state_offset(slot) + first * params_.state.state);
      asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
    });
  }

  /// All lanes of a warp come here together: they differ in neither row nor source.
  __device__ __forceinline__ void advance(int64_t row, int64_t step, int64_t source,
                                          const Inputs& inputs, Pack<T, kStates> (&h)[kPacks]) {
    R out = 0;
    if (source != UpdateParams::kNoSlot) {
      R delta = value_of(inputs.dt, params_.dt) + dt_bias_;
      if (params_.dt_softplus) delta = device_softplus(delta);
      const R x = value_of(inputs.x, params_.x);
      R y = 0;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const auto B = states_of<T, kStates>(inputs.B[p], params_.B.dtype);
        const auto C = states_of<T, kStates>(inputs.C[p], params_.C.dtype);
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          const auto value = coefficients<kMethod>(delta, poles_[p][s]);
          T& state = h[p].v[s];
          state = value.abar * state + held_input<kMethod>(delta, x, value) * B.v[s];
          y += real_of_product(C.v[s], state);
        }
      }
      for (int distance = 1 << plan_.lane_bits >> 1; distance > 0; distance >>= 1) {
        y += __shfl_xor_sync(kFullMask, y, distance);
      }
      out = R(kOutputScale<T>) * y + D_ * x;
      if (params_.z.present()) {
        const R z = value_of(inputs.z, params_.z);
        out *= z * device_sigmoid(z);
      }
    }
    if (!place_.exists) return;
    if (place_.part == 0) {
      store_element(params_.out.data, params_.out.dtype, row_offset(params_.out, row, step), out);
    }
    if (source == UpdateParams::kNoSlot) return;
    const int64_t destination = params_.destination(row, step, source);
    if (destination == UpdateParams::kNoSlot) return;
    for_each_pack([&](int p, int first) {
      put_states(params_.state, plan_.vectors.state, state_offset(destination), first,
                 params_.dstate, h[p]);
    });
  }

  const UpdateParams& params_;
  const UpdatePlan& plan_;
  Place place_;
  R D_;
  R dt_bias_;
  Pole<T> poles_[kPacks][kStates];
};

/// With 64 registers a thread, what a multiprocessor has suffices for 1024.
template <class T, int kPacks>
constexpr int kBlocksAtOnce = sizeof(T) == 4 && kPacks == 1 ? 1024 / kUpdateThreads : 1;

template <class T, int kStates, int kPacks, Method kMethod>
__global__ void __launch_bounds__(kUpdateThreads, kBlocksAtOnce<T, kPacks>)
    update_kernel(const __grid_constant__ UpdateArgs args) {
  const int64_t begin = blockIdx.x / static_cast<unsigned>(args.plan.tiles) * args.plan.rows;
  const int64_t end = begin + args.plan.rows;
  RowUpdates<T, kStates, kPacks, kMethod>(args.params, args.plan)
      .run(begin, end < args.params.batch ? end : args.params.batch);
}

template <class T, int kStates, int kPacks, Method kMethod>
cudaError_t Update<T, kStates, kPacks, kMethod>::launch(const UpdateParams& params,
                                                        const UpdatePlan& plan,
                                                        cudaStream_t stream) {
  return launch_kernel(update_kernel<T, kStates, kPacks, kMethod>, plan.shape, stream,
                       UpdateArgs{params, plan});
}

}  // namespace selective_scan::cuda::update
