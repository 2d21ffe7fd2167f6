// The state update for any call: states and inputs of all types and strides, and several steps.
//
// A thread fetches everything that a row needs before it converts any of it. If a lane's states
// cannot be moved together, they are moved one by one.
#pragma once

#include "../../core/method_table.h"
#include "../kit/dependent_launch.cuh"
#include "../kit/launch_tools.h"
#include "../kit/states.cuh"
#include "kernels.h"
#include "place.cuh"

namespace selective_scan::cuda::update {

template <class T, int kStates, int kPacks>
class RowUpdates {
  using R = real_t<T>;
  static constexpr int kReals = kStates * (is_complex_v<T> ? 2 : 1);
  /// Bytes of a real number of the states; if 16 bytes hold eight states, it can only be two.
  static constexpr int kStateSize = kStates == 8 ? 2 : sizeof(R);
  using FetchedStates = Fetched<R, kReals, kStateSize>;

  /// The inputs of a row's step, besides its state.
  struct Inputs {
    Fetched<R, 1> dt, x, z, input_delta;
    Fetched<R, kReals> B[kPacks], C[kPacks];
  };

 public:
  __device__ __forceinline__ RowUpdates(const UpdateParams& params, const UpdatePlan& plan)
      : params_(params), plan_(plan), place_(params, plan) {
    Fetched<R, kReals> A[kPacks];
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
      auto poles = states_of<T, kStates>(A[p], params.A.dtype);
      if constexpr (!is_complex_v<T>) {
        if (params.A_is_log) {
#pragma unroll
          for (int s = 0; s < kStates; ++s) poles.v[s] = -DeviceMath::exp(poles.v[s]);
        }
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s)
        poles_[p][s] = make_pole<DeviceMath>(poles.v[s], params.method);
    }
  }

  __device__ __forceinline__ void run() {
    const int64_t begin = blockIdx.y * plan_.rows;
    const int64_t end = begin + plan_.rows < params_.batch ? begin + plan_.rows : params_.batch;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t source = params_.source(row);
      FetchedStates fetched[kPacks];
      Inputs inputs;
      if (has_state(source)) {
        for_each_pack([&](int p, int first) {
          fetched[p] = fetch_states<true, T, kStates, kStateSize>(
              params_.state, plan_.vectors.state, state_offset(source), first, params_.dstate);
        });
        fetch_inputs(row, 0, inputs);
      }
      Pack<T, kStates> h[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        h[p] = states_of<T, kStates>(fetched[p], params_.state.dtype);
      }
      advance(row, 0, source, inputs, h);
      for (int64_t step = 1; step < params_.steps; ++step) {
        if (has_state(source)) fetch_inputs(row, step, inputs);
        advance(row, step, source, inputs, h);
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
    inputs.input_delta = fetch<R>(params_.input_delta, row_offset(params_.input_delta, row, step));
    const auto fetch_projection = [&](const ArrayView& view, bool is_vector, int first) {
      const int64_t index = row * view.batch + step * view.step + place_.group * view.group;
      return fetch_states<false, T, kStates>(view, is_vector, index, first, params_.dstate);
    };
    for_each_pack([&](int p, int first) {
      inputs.B[p] = fetch_projection(params_.B, plan_.vectors.B, first);
      inputs.C[p] = fetch_projection(params_.C, plan_.vectors.C, first);
    });
  }

  /// All lanes of a warp call this together, because they have the same row and source.
  __device__ __forceinline__ void advance(int64_t row, int64_t step, int64_t source,
                                          const Inputs& inputs, Pack<T, kStates> (&h)[kPacks]) {
    R out = 0;
    if (source != UpdateParams::kNoSlot) {
      const R delta = step_size(value_of(inputs.dt, params_.dt) + dt_bias_, params_.dt_softplus);
      const R x = value_of(inputs.x, params_.x);
      const R driven = value_of(inputs.input_delta, params_.input_delta) * x;
      R y = 0;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const auto B = states_of<T, kStates>(inputs.B[p], params_.B.dtype);
        const auto C = states_of<T, kStates>(inputs.C[p], params_.C.dtype);
        visit_kernel_method(params_.method, [&]<Method kMethod>() {
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            h[p].v[s] =
                params_.input_delta.present()
                    ? after_driven_step<kMethod>(h[p].v[s], delta, driven, poles_[p][s], B.v[s])
                    : after_step<kMethod>(h[p].v[s], delta, x, poles_[p][s], B.v[s]);
          }
        });
#pragma unroll
        for (int s = 0; s < kStates; ++s) y += real_of_product(C.v[s], h[p].v[s]);
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

template <class T, int kStates, int kPacks>
__global__ void __launch_bounds__(kUpdateThreads)
    update_kernel(const __grid_constant__ UpdateArgs args) {
  wait_for_primary();
  RowUpdates<T, kStates, kPacks>(args.params, args.plan).run();
}

template <class T, int kStates, int kPacks>
cudaError_t Update<T, kStates, kPacks>::launch(const UpdateArgs& args, cudaStream_t stream) {
  return launch_kernel(update_kernel<T, kStates, kPacks>, args.plan.shape, stream, args);
}

}  // namespace selective_scan::cuda::update
