// The adaptive unitary scan of a slab on the GPU, forward.
//
// The effect of kSteps steps on a state is one rotation and one addition. In every round each warp
// computes the rotations of its steps, which is most of the work, scans the steps from a state of
// zero and stores their map to shared memory. After the round's only barrier every lane composes
// the maps of the warps before its own. The result is the state before its steps, whose part it
// adds to y. Rotations are multiplied and angles are never added, so phases are as accurate as in a
// scan step by step.
//
// Shared memory: v = dt·silu(u) by (warp, channel, step), each lane's part of y by (step, thread),
// and two sets of maps by (warp, lane), used in turn.
//
// Bound by instruction issue: about 80 per state and step, 44 of them for the rotation. With one
// state per lane, theta of the next round is loaded while a round is finished.
#pragma once

#include "../kit/exchange.cuh"
#include "access.cuh"

namespace selective_scan::cuda::unitary {

template <class T>
using StateMap = AffineMap<Complex<T>>;

/// Rows of steps, padded against bank conflicts between the teams of a warp.
template <class T, int kLanes>
using StepTile = T[kWarpSize / kLanes][kSteps<T> + 16 / sizeof(T)];

template <class T, int kLanes, int kStates, bool kVariable>
__global__ void __launch_bounds__(kThreads<T>, kBlocksPerMultiprocessor<T>)
    forward_kernel(const __grid_constant__ UnitaryForwardParams params) {
  __shared__ __align__(16) StepTile<T, kLanes> v_tile[kWarps<T>];
  using MapExchange = Exchange<StateMap<T>, kWarps<T>>;
  __shared__ __align__(16) typename MapExchange::Storage shared_maps;
  __shared__ ThreadTile<T, T> y_tile;
  constexpr int kCount = kSteps<T>;
  constexpr int kOwn = kOwned<T, kLanes>;
  const Place<T, kLanes> place(params);
  const int thread_lane = threadIdx.x % kWarpSize;
  const int64_t last = params.seqlen - 1;
  auto* carry = static_cast<Complex<T>*>(params.state);
  auto* saved = static_cast<Complex<T>*>(params.states);

  Complex<T> carried[kStates];  // the state before the round; all warps keep it
  StateInputs<T, kVariable> inputs[kStates];
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    carried[s] = {};
    inputs[s] = {};
    if (!place.active || n >= params.dstate) continue;
    carried[s] = carry[place.state_index(params, n)];
    inputs[s] = {load_bias<T>(params, place.channel, n),
                 {params.b, params.variable_b, place, n},
                 {params.c, params.variable_c, place, n}};
  }
  const T D = place.active
                  ? load_element<T>(params.D.data, params.D.dtype, place.channel * params.D.channel)
                  : T(0);

  // A round's inputs are loaded while the round before it is computed.
  using Steps = OwnedSteps<T, kLanes>;
  Steps u_steps(params.u, place, params.first_step);
  Steps dt_steps(params.dt, place, params.first_step);
  Steps z_steps(params.z, place, params.first_step);
  Steps out_steps(params.out, place, params.first_step);
  const int steps = static_cast<int>(params.steps);
  const auto owned_left = [&](int round) {
    const int left = steps - round - place.warp * kCount - place.first_owned;
    return place.active ? left : 0;
  };
  T u[kOwn], dt[kOwn], z[kOwn];
  const auto fetch = [&](int round) {
    const int count = owned_left(round);
    u_steps.load(count, u);
    dt_steps.load(count, dt);
    if (params.z.present()) z_steps.load(count, z);
    u_steps.move(kRound);
    dt_steps.move(kRound);
    z_steps.move(kRound);
  };
  fetch(0);

  MapExchange exchange{shared_maps};
  const T* theta_at = place.at(params.theta, place.warp * kCount, place.lane);
  constexpr bool kAhead = kStates == 1;
  T theta[kCount];
  if (kAhead && place.active && place.lane < params.dstate) {
    load_theta(theta_at, params.theta.step, steps - place.warp * kCount, theta);
  }
  for (int round = 0; round < steps; round += kRound) {
    const int64_t first = params.first_step + round + place.warp * kCount;
    const int left = steps - round - place.warp * kCount;
    T skip[kOwn], gate[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const T silu_u = device_silu(u[i]);
      skip[i] = D * silu_u;
      gate[i] = params.z.present() ? device_silu(z[i]) : T(1);
      v_tile[place.warp][place.team][place.first_owned + i] = dt[i] * silu_u;
    }
    __syncwarp();
    fetch(round + kRound);

    T y[kOwn] = {};
#pragma unroll 1
    for (int s = 0; s < kStates; ++s) {
      const int64_t n = place.lane + s * kLanes;
      const bool has_state = place.active && n < params.dstate;
      const StateInputs<T, kVariable>& input = inputs[s];
      StateMap<T> map = StateMap<T>::identity();
      Complex<T> turns[kCount];  // later c·product, or the product if c is constant
      T y_from_zero[kCount];
      if (has_state) {
        if (!kAhead) load_theta(theta_at + s * kLanes, params.theta.step, left, theta);
        make_turns(theta, input.bias, left, turns);
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
          const T v = v_tile[place.warp][place.team][t];
          map.offset =
              turns[t] * map.offset + v * input.b.at(params.b, params.variable_b, first + t, last);
          map.product = turns[t] * map.product;
          const Complex<T> weight = input.c.at(params.c, params.variable_c, first + t, last);
          y_from_zero[t] = weight.re * map.offset.re - weight.im * map.offset.im;
          turns[t] = kVariable && params.variable_c ? weight * map.product : map.product;
        }
        if (kAhead) {
          load_theta(theta_at + kRound * params.theta.step, params.theta.step, left - kRound,
                     theta);
        }
      } else {
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
          turns[t] = {};
          y_from_zero[t] = T(0);
        }
      }

      const auto& maps = exchange.share(map);
      Complex<T> h = carried[s];
      Complex<T> entering = h;
#pragma unroll
      for (int w = 0; w < kWarps<T>; ++w) {
        if (w == place.warp) entering = h;
        h = multiply_add(maps[w][thread_lane].product, h, maps[w][thread_lane].offset);
      }
      carried[s] = h;
      if (has_state) {
        if (saved != nullptr && first > 0 && place.warp == 0) {
          saved[place.saved_index(params, first, n)] = entering;
        }
        if (!(kVariable && params.variable_c)) entering = input.c.constant() * entering;
      }
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        y_tile[t][threadIdx.x] =
            (y_from_zero[t] + turns[t].re * entering.re) - turns[t].im * entering.im;
      }
      add_over_team<T, kLanes>(y_tile, place, y);
    }

    if (place.is_first_owner) {
      const int count = owned_left(round);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (i < count) out_steps.store(i, (y[i] + skip[i]) * gate[i]);
      }
    }
    out_steps.move(kRound);
    theta_at += kRound * params.theta.step;
  }
  if (place.warp > 0) return;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    const int64_t n = place.lane + s * kLanes;
    if (place.active && n < params.dstate) carry[place.state_index(params, n)] = carried[s];
  }
}

}  // namespace selective_scan::cuda::unitary
